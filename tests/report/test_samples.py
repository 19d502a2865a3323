"""What is read question by question: paired differences and the marks of scores that deserve a look."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_report import sample, write_eval

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.report import samples
from pipeline.report.contents import Score
from pipeline.report.samples import Difference
from pipeline.report.tables import roles


def primary_score(row: str, task: str, value: float, n: int, where: str = "qac", target: str = "qac") -> Score:
    place = {"row": row, "target": target, "seed": 0, "eval": row, "label": "L", "primary": True}
    return Score(task, target, where if "-" in where else None, None, 0, "m", "none", value, None, n, **place)


def scored(tmp_path, answers, task="mgsm", value=0.5, n=4):
    """Primary scores and folders of rows -> responses; a response ending in 7 is right."""
    made, folders = [], {}
    for row, responses in answers.items():
        lines = [sample(doc, response, response.endswith("7")) for doc, response in enumerate(responses)]
        folders[row] = write_eval(tmp_path / row, [], {f"{task}.qac": lines})
        made.append(primary_score(row, task, value, n))
    return made, folders


def test_paired_differences(tmp_path):
    answers = {
        "base": ["1", "2", "3", "4"],
        "math expert": ["7", "2", "3", "4"],
        "language expert": ["7", "7", "3", "4"],
        "soup": ["7", "7", "7", "7"],
    }
    primary, folders = scored(tmp_path, answers)
    primary = [replace(score, value=value) for score, value in zip(primary, (0, 0.25, 0.5, 1), strict=True)]
    (block,) = samples.comparisons(primary, folders, roles(list(answers), {}), ["qac"])
    assert (block.language, block.expert) == ("qac", "language expert")
    base, expert = block.lines
    assert base == Difference("soup", "base", n=4, difference=100, low=100, high=100)
    assert (expert.row, expert.against, expert.difference) == ("soup", "language expert", 50)
    assert (expert.low, expert.high) == (
        0,
        100,
    )  # four questions, two won: P(all lost) = P(all won) = 1/16


def test_sanity_marks(tmp_path):
    answers = {"base": ["a 1", "b 2"], "twin": ["a 1", "b 2"], "mute": ["", ""], "fine": ["a 7", "b 1"]}
    primary, folders = scored(tmp_path, answers)
    primary[2] = replace(primary[2], value=0)
    marks = {(mark.row, mark.mark) for mark in samples.sanity(primary, folders)}
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
    primary, folders = scored(tmp_path, {"base": ["A"]}, task="belebele", value=value, n=100)
    assert [mark.mark for mark in samples.sanity(primary, folders)] == ([wanted] if wanted else [])


def test_answers_cut_off_are_counted(tmp_path):
    lines = [sample(0, "7", True, cut_off=False), sample(1, "the answer", False, cut_off=True)]
    folder = write_eval(tmp_path / "e", [], {"mgsm.qac": lines})
    (mark,) = samples.sanity([primary_score("e", "mgsm", 0.5, 2)], {"e": folder})
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
    folder = write_eval(tmp_path / "e", [], {f"{task}.{where}": lines})
    marks = samples.sanity([primary_score("e", task, 0.5, 4, where, "te")], {"e": folder})
    told = [mark.detail for mark in marks if mark.mark == "wrong script"]
    assert told == (["3 of 4 answers are mostly in letters of another script"] if marked else [])


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"')
    with pytest.raises(PipelineError, match=r"log.jsonl, line 2 is not JSON"):
        read_jsonl(tmp_path / "log.jsonl")
