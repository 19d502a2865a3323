"""What is read question by question: paired differences and the marks of scores that deserve a look."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist

import pytest
from made_up_report import sample, write_eval

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow
from pipeline.report.html import samples
from pipeline.report.load.answers import read_answers
from pipeline.report.load.contents import Score
from pipeline.report.stats import compare


def primary_score(row: str, task: str, value: float, n: int, where: str = "qac", target: str = "qac") -> Score:
    place = {"row": row, "target": target, "seed": 0, "eval": row, "label": "L", "primary": True}
    return Score(task, target, where if "-" in where else None, None, 0, "m", "none", value, None, n, **place)


def read(tmp_path: Path, folders: dict[str, Path], keep: int = 250):
    """The answers of all files in these folders."""
    places = {(name, *path.stem.split(".")) for name, folder in folders.items() for path in folder.glob("samples/*")}
    rows: dict[str, tuple[list[ScoreRow], dict]] = {name: ([], {}) for name in folders}
    return read_answers(folders, rows, places, keep, tmp_path / "answers.parquet")


def scored(tmp_path, answers, task="mgsm", value=0.5, n=4):
    """Primary scores and what was answered, of rows -> responses; a response ending in 7 is right."""
    made, folders = [], {}
    for row, responses in answers.items():
        lines = [sample(doc, response, response.endswith("7")) for doc, response in enumerate(responses)]
        folders[row] = write_eval(tmp_path / row, [], {f"{task}.qac": lines})
        made.append(primary_score(row, task, value, n))
    return made, read(tmp_path, folders)


def test_differences_are_paired_and_corrected(tmp_path):
    """By hand: of ten questions the soup wins seven over the base and none is lost: 70 points, z = 7 / sqrt(7)."""
    answers = {
        "base": ["1"] * 10,
        "math expert": ["7"] + ["1"] * 9,
        "language expert": ["7"] * 4 + ["1"] * 6,
        "soup": ["7"] * 7 + ["1"] * 3,
    }
    primary, found = scored(tmp_path, answers)
    by_row = {score.row: compare.questions_of({0: score}, found) for score in primary}
    values = {row: each.values(range(10)).sum() for row, each in by_row.items()}
    roles = {"base": "base", "math expert": "expert", "language expert": "expert", "soup": "merge"}
    pairs, expert = compare.pairs_of(list(answers), roles, values)
    assert expert == "language expert"
    assert pairs == [("soup", "base"), ("soup", "language expert")]
    block = compare.compared("MGSM qac", pairs, expert, by_row)
    base, best = block.lines
    assert (base.n, round(base.difference, 6), round(best.difference, 6)) == (10, 70, 30)
    alone = compare.difference("soup", "base", by_row["soup"], by_row["base"])
    assert alone.p == pytest.approx(2 * NormalDist().cdf(-(7**0.5)))
    assert alone.mid_p == pytest.approx(1 / 2**7)  # twice the probability of none of seven coins, less half of that
    assert base.p == pytest.approx(2 * alone.p) and base.p < 0.05 < best.p  # Holm: the lesser of two, twice
    assert base.mid_p == pytest.approx(2 * alone.mid_p)
    told = compare.headline([compare.Comparison("empty", None, []), block])
    assert told.startswith(
        f"MGSM qac, 10 questions: 1 of 2 differences is significant, soup over base by 70.0 points ({alone.low:.1f} to "
        f"{alone.high:.1f}); the others are not (minimum detectable difference "
    )
    none = compare.headline([compare.Comparison("MGSM qac", None, [best])])
    assert none.startswith("MGSM qac, 10 questions: none of 1 differences is significant (minimum detectable ")


@pytest.mark.parametrize("right, n", [("7", 3), ("1", 10), ("7", 1)])
def test_a_page_of_few_or_degenerate_answers_finds_nothing(tmp_path, right, n):
    """One side alone solves 3 of 3 questions, or 1 of 1, or nobody solves any of 10."""
    primary, found = scored(tmp_path, {"base": ["1"] * n, "soup": [right] * n}, n=n)
    by_row = {score.row: compare.questions_of({0: score}, found) for score in primary}
    block = compare.compared("MGSM qac", [("soup", "base")], None, by_row)
    (line,) = block.lines
    assert not line.significant and line.high - line.low > 40 and line.could_see >= min(100, 300 / n)
    assert "none of 1 differences is significant" in compare.headline([block])
    assert not compare.stands_out("soup", by_row)


def seeds(*trainings: dict[int, float]) -> compare.Kept:
    return compare.Kept("", {seed: (("qac", one),) for seed, one in enumerate(trainings)})


def test_one_lucky_seed_of_three_is_not_bold():
    """45 of 100 questions more in one of three seeds: significant over questions, not over seeds; in each of three it
    is, and against one model that serves all seeds likewise. Two seeds are compared by their means."""
    half, lucky = ({doc: float(doc < right) for doc in range(100)} for right in (50, 95))
    base = seeds(half, half, half)
    for rival in (base, seeds(half)):
        once = compare.difference("swap", "base", seeds(lucky, half, half), rival)
        assert once.difference == pytest.approx(15) and once.low < 0 and once.p > 0.3 and once.mid_p is None
        assert not compare.stands_out("swap", {"swap": seeds(lucky, half, half), "base": rival})
        assert compare.stands_out("swap", {"swap": seeds(lucky, lucky, lucky), "base": rival})
    two = compare.difference("swap", "base", seeds(lucky, half), seeds(half, half))
    means = compare.difference("swap", "base", seeds({doc: (lucky[doc] + half[doc]) / 2 for doc in half}), seeds(half))
    assert (two.difference, two.p) == pytest.approx((means.difference, means.p)) and two.p < 0.05
    unlike = compare.Kept("", {seed: (("qac", half),) for seed in (0, 1, 3)})
    assert compare.difference("swap", "base", seeds(lucky, half, half), unlike).p < 0.05  # other seeds: of their means


def test_languages_are_averaged_over_the_seeds_that_all_have():
    right, wrong = ({doc: value for doc in range(4)} for value in (1.0, 0.0))
    found = compare.averaged([seeds(right, wrong, right), seeds(right, right)])
    assert found.values(range(4)).tolist() == [[1.0] * 4, [0.5] * 4]
    assert not compare.averaged([seeds(right), compare.Kept()])


def test_a_best_is_bold_only_above_all_others(tmp_path):
    _, found = scored(tmp_path, {"a": ["7"] * 9 + ["1"], "b": ["7"] * 4 + ["1"] * 6, "c": ["7"] * 8 + ["1"] * 2})
    by_row = {row: seeds(one.scores) for (row, _, _), one in found.items()}
    assert not compare.stands_out("a", by_row)  # c is one question below
    assert compare.stands_out("a", {row: by_row[row] for row in ("a", "b")})
    assert not compare.stands_out("a", by_row | {"gone": compare.Kept()}) and not compare.stands_out(
        "a", {"a": by_row["a"]}
    )


def test_sanity_marks(tmp_path):
    answers = {"base": ["a 1", "b 2"], "twin": ["a 1", "b 2"], "mute": ["", ""], "fine": ["a 7", "b 1"]}
    primary, found = scored(tmp_path, answers)
    primary[2] = primary_score("mute", "mgsm", 0, 4)
    marks = {(mark.row, mark.mark) for mark in samples.sanity(primary, found)}
    assert marks == {
        ("base", "identical"),
        ("twin", "identical"),
        ("mute", "exactly 0"),
        ("mute", "mostly unparsed"),
    }


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.25, "at chance"), (0.33, "at chance"), (0.34, None), (0.16, "below chance")]
)
def test_chance_of_four(tmp_path, value, wanted):
    """Two standard errors of guessing over 100 questions are 2 * sqrt(0.25 * 0.75 / 100) = 0.0866."""
    primary, found = scored(tmp_path, {"base": ["A"]}, task="belebele", value=value, n=100)
    assert [mark.mark for mark in samples.sanity(primary, found)] == ([wanted] if wanted else [])


def test_answers_cut_off_are_counted(tmp_path):
    lines = [sample(0, "7", True, cut_off=False), sample(1, "the answer", False, cut_off=True)]
    found = read(tmp_path, {"e": write_eval(tmp_path / "e", [], {"mgsm.qac": lines})})
    (mark,) = samples.sanity([primary_score("e", "mgsm", 0.5, 2)], found)
    assert (mark.mark, mark.detail) == ("cut off", "1 of 2 answers ran out of tokens (eval.max_gen_toks)")


@pytest.mark.parametrize(
    ("task", "where", "response", "marked"),
    [
        ("mgsm", "te", "So it is seven in all", True),
        ("mgsm", "te", "కాబట్టి మొత్తం ఏడు అవుతుంది", False),
        ("mgsm_en_cot", "te", "So it is seven in all", False),
        ("mgsm_en_cot", "te", "కాబట్టి మొత్తం ఏడు అవుతుంది", True),
        ("flores", "en-ja", "the cat ate the fish", True),
        ("flores", "ja-en", "the cat ate the fish", False),
        ("mgsm", "bn", "7", False),
        ("mbpp", "te", "def add(first, second): pass", False),
    ],
)
def test_answers_in_another_script_are_marked(tmp_path, task, where, response, marked):
    lines = [sample(doc, response, True) for doc in range(3)] + [sample(3, "", False)]
    found = read(tmp_path, {"e": write_eval(tmp_path / "e", [], {f"{task}.{where}": lines})})
    marks = samples.sanity([primary_score("e", task, 0.5, 4, where, "te")], found)
    told = [mark.detail for mark in marks if mark.mark == "wrong script"]
    assert told == (["3 of 4 answers are mostly in letters of another script"] if marked else [])


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"')
    with pytest.raises(PipelineError, match=r"log.jsonl, line 2 is not JSON"):
        read_jsonl(tmp_path / "log.jsonl")


@pytest.mark.parametrize("text", ['{"doc_id": 0, "resp', "[1, 2]\n", '{"doc": 1}\n'])
def test_a_samples_file_that_is_cut_off_or_none_is_one_sentence(tmp_path, text):
    folder = write_eval(tmp_path / "e", [], {"mgsm.qac": [sample(0, "7", True)]})
    path = folder / "samples" / "mgsm.qac.jsonl"
    path.write_text(json.dumps(sample(0, "7", True)) + "\n" + text)
    with pytest.raises(PipelineError, match=r"mgsm.qac.jsonl.*make (it|the run) again with redo=true") as told:
        read(tmp_path, {"e": folder})
    assert "\n" not in str(told.value)
