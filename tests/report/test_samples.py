"""Contrasts as the page shows them, and what is read answer by answer.

Marks of scores, the browser of answers.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_up_report import line_of, results_of, sample, score, write_eval
from scipy import stats

from pipeline.benchmarks import primary_metric
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.errors import PipelineError
from pipeline.report import compare, page
from pipeline.report import marks as samples
from pipeline.report.frame import Comparison, Frame, NoScore
from pipeline.report.load.answers import answers_of
from pipeline.report.load.contents import CellResult, CellScore, Results
from pipeline.report.stored import StoredAnswers
from pipeline.tables.plan import Cell, Item, ScoreRef, ScoreWords


def evaluated(
    tmp_path: Path,
    answers: dict[str, list[dict[str, Any]]],
    task: str = "mgsm",
    where: str = "qac",
    language: str = "qac",
    n: int = 4,
    value: float | None = None,
) -> Results:
    """Return a cell for each row of the table, all of one evaluation with these answers.

    `value` is the value of its score, if it is not the share of right answers.
    """
    pair = where if "-" in where else None
    folders = {}
    for row, lines in answers.items():
        share = np.mean([line["correct"] for line in lines]) if value is None else value
        rows = [score(task, float(share), n, language, pair)]
        folders[row] = write_eval(tmp_path / row, rows, {f"{task}.{where}": lines})
    scores = {row: [CellScore(row, {"seed": "0"})] for row in folders}
    cells = [
        CellResult(row, "math", 50.0, runs=[row], scores=scores[row], task=task, pair=pair)
        for row in folders
    ]
    return results_of(cells, folders)


# --- contrasts ---


def test_the_headline_says_what_is_significant_and_what_could_have_been_detected():
    lines = [
        line_of("soup", "base", "math", 4.0, 0.4, n=100),
        line_of("swap", "base", "math", 10.0, 0.001, n=250),
        line_of("swap", "expert", "math", -20.0, 0.0001, n=250, low=-29.0, high=-11.0),
        line_of("TIES", "base", "math", 2.0, 0.6, n=100, detectable=13.4),
    ]
    assert compare.headline_sentences(compare.correct_contrasts(lines)) == [
        (
            "“swap” is worse than “expert” in “math”: -20.0 points (95 % CI -29.0 to -11.0,"
            " Holm-corrected p < 0.001)."
        ),
        (
            "“swap” is better than “base” in “math”: +10.0 points (95 % CI +5.0 to +15.0,"
            " Holm-corrected p = 0.003)."
        ),
        ("Not significant: 2 other differences. Detectable with 80 % power: 12.0 to 13.4 points."),
    ]
    assert compare.headline_sentences(compare.correct_contrasts(lines[:1])) == [
        "Not significant: 1 difference. Detectable with 80 % power: 12.0 points."
    ]
    many = [line_of("swap", f"rival {n}", "math", 10.0 + n, 0.001) for n in range(6)]
    said = compare.headline_sentences(compare.correct_contrasts(many))
    assert said[3].startswith(
        "“swap” is better than “rival 2” in “math”: +12.0 points (95 % CI +7.0 to +17.0"
    )
    assert said[4:] == ["2 more differences are significant."]
    said = compare.headline_sentences(
        compare.correct_contrasts([line_of("swap", "base", "math", 0.0, None)])
    )
    assert said == ["No two models have answers to compare."]
    (said,) = compare.headline_sentences([])
    assert said.startswith("No scores are compared.") and "compare:" in said


def test_the_primary_comparison_comes_first_and_has_half_of_the_error_rate():
    """By hand: of p = 0.02 the primary has half of the weights, 0.04.

    Then the two others share all: 0.03 * 2, 0.2.
    """
    lines = [
        line_of("soup", "base", "math", 4.0, 0.2),
        line_of("swap", "base", "math", 10.0, 0.02),
        line_of("swap", "expert", "math", -9.0, 0.03),
    ]
    primary = ["swap", "base", "math"]
    found = compare.correct_contrasts(lines, primary)
    assert [one["p_holm"] for one in found] == [
        pytest.approx(0.2),
        pytest.approx(0.04),
        pytest.approx(0.06),
    ]
    assert compare.headline_sentences(found, primary) == [
        (
            "“swap” is better than “base” in “math”: +10.0 points (95 % CI +5.0 to +15.0,"
            " Holm-corrected p = 0.040)."
        ),
        "Not significant: 2 other differences. Detectable with 80 % power: 12.0 points.",
    ]
    found = compare.correct_contrasts(lines, ["soup", "base", "math"])
    assert [one["p_holm"] for one in found] == [
        pytest.approx(0.2),
        pytest.approx(0.08),
        pytest.approx(0.09),
    ]
    assert (
        compare.headline_sentences(found)[0]
        == "No significant difference between “soup” and “base” in “math”: +4.0 points (95 % CI"
        " -1.0 to +9.0, Holm-corrected p = 0.200). Detectable with 80 % power: 12.0 points."
    )


# --- marks ---


def test_sanity_marks(tmp_path):
    responses = {
        "base": ["a 7", "b 2"],
        "twin": ["a 7", "b 2"],
        "mute": ["", ""],
        "fine": ["a 1", "b 7"],
    }
    answers = {
        row: [sample(doc, text, text.endswith("7")) for doc, text in enumerate(texts)]
        for row, texts in responses.items()
    }
    rows = {
        mark: [one.partition(",")[0] for one in found]
        for mark, found in samples.suspicious_scores(evaluated(tmp_path, answers)).items()
    }
    assert rows == {"exactly 0": ["mute"], "mostly unparsed": ["mute"]}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.25, "at chance"), (0.33, "at chance"), (0.34, None), (0.16, "below chance")],
)
def test_chance_of_four(tmp_path, value, wanted):
    """Two standard errors of guessing are 2 * sqrt(0.25 * 0.75 / 100) = 0.0866."""
    made = evaluated(tmp_path, {"base": options(4)}, task="belebele", value=value, n=100)
    assert [*samples.suspicious_scores(made)] == ([wanted] if wanted else [])


def options(*sizes: int, right: int = 0) -> list[dict[str, Any]]:
    """Answers to questions with so many options, of which the first `right` are right."""
    weighed: list[dict[str, float]] = [
        {chr(65 + at): -float(at) for at in range(size)} for size in sizes
    ]
    return [sample(doc, "A", doc < right, loglikelihoods=of) for doc, of in enumerate(weighed)]


@pytest.mark.parametrize(
    ("task", "sizes", "chance"),
    [
        ("xcopa_et", [2] * 100, 50),
        ("arc_easy", [4] * 96 + [3] * 2 + [5] * 2, 25),
        ("global_mmlu", [4] * 100, 25),
        ("belebele", [4] * 100, 25),
    ],
)
def test_options_of_stored_answers_have_a_chance_level(tmp_path, task, sizes, chance):
    """`doc_to_choice` of a task of lm_eval may give each question its own options."""
    made = evaluated(tmp_path, {"e": options(*sizes)}, task=task, value=chance / 100 + 0.02, n=100)
    problem, told = next(iter(samples.suspicious_scores(made).items()))
    assert problem == "at chance" and f"where guessing gives {chance} ±" in told[0]
    made = evaluated(
        tmp_path / "better", {"e": options(*sizes)}, task=task, value=chance / 100 + 0.15, n=100
    )
    assert samples.suspicious_scores(made) == {}


def test_the_browser_has_the_first_evaluation_of_each_language(tmp_path):
    """Of a cell of two seeds and two languages: the answers of seed 0, once a language."""
    folders = {}
    for name in ("a0", "a1", "b0", "b1"):
        where = f"qa{name[0]}"
        lines = {f"mgsm.{where}": [sample(0, f"{name} 7", True)]}
        folders[name] = write_eval(tmp_path / name, [score("mgsm", 1.0, 1, where)], lines)
    scores = [CellScore(name, {"seed": name[1]}) for name in folders]
    cell = CellResult("swap", "math", 100.0, runs=list(folders), scores=scores, task="mgsm")
    made = results_of([cell], folders)
    shown = page.answer_data(samples.browsed(made.cells), made.answers, 10**6)
    found = [[shown["strings"][at] for at in item] for item in shown["models"]["swap"]]
    assert [(item[1], item[7]) for item in found] == [("qaa", "a0 7"), ("qab", "b0 7")]


def test_the_answers_of_a_page_are_limited_by_their_number_and_bytes(tmp_path):
    """50 evaluations share 10,000 answers; long ones are fewer, the same for all.

    Cells share evaluations.
    """
    lines = {  # 2,000 bytes, five per model
        name: [
            sample(doc, f"{name}{'é' * 999}{doc}", True, prompt=f"question {doc}")
            for doc in range(5)
        ]
        for name in ("a", "b")
    }
    once = evaluated(tmp_path, lines, n=5)
    cells = [*once.cells, *(replace(cell, column="again") for cell in once.cells)]
    answers = once.answers
    whole = page.answer_data(samples.browsed(cells), answers, 10**6)
    assert {name: len(items) for name, items in whole["models"].items()} == {
        "a": 10,
        "b": 10,
    }  # of two columns
    assert (
        sum("é" in text for text in whole["strings"]) == 10
    )  # each once, though it is what was extracted, too
    fewer = page.answer_data(samples.browsed(cells), answers, 2 * 3 * 2150)  # three questions
    assert fewer["models"] == {name: items[:6] for name, items in whole["models"].items()}
    assert fewer["strings"] == whole["strings"][: len(fewer["strings"])]
    many = {f"e{number}": [sample(doc, "7", True) for doc in range(300)] for number in range(50)}
    kept = evaluated(tmp_path / "many", many, n=300).answers.values()
    assert {len(of_place.first) for of_place in kept} == {200}


def test_answers_cut_off_are_counted(tmp_path):
    lines = [sample(0, "7", True, cut_off=False), sample(1, "the answer", False, cut_off=True)]
    marks = samples.suspicious_scores(evaluated(tmp_path, {"e": lines}, n=2))
    told = "e, math, qac, seed 0: 1 of 2 answers ran out of tokens (eval.max_gen_toks)"
    assert marks == {"cut off": [told]}


def test_an_unpaired_surrogate_becomes_a_question_mark(tmp_path):
    """JSON can write one and UTF-8 cannot; a pair is a character."""
    made = evaluated(tmp_path, {"e": [sample(0, "\ud800 \U0001f600 7", True)]})
    assert "\\ud83d\\ude00" in (tmp_path / "e/samples/mgsm.qac.jsonl").read_text()
    (answers,) = made.answers.values()
    assert answers.first[0][5] == "? \U0001f600 7"


@pytest.mark.parametrize("text", ['{"doc_id": 0, "resp', "[1, 2]\n", '{"doc": 1}\n'])
def test_a_samples_file_that_is_cut_off_or_none_is_one_sentence(tmp_path, text):
    made = evaluated(tmp_path, {"e": [sample(0, "7", True)]})
    path = tmp_path / "e/samples/mgsm.qac.jsonl"
    path.write_text(json.dumps(sample(0, "7", True)) + "\n" + text)
    with pytest.raises(
        PipelineError, match=r"mgsm.qac.jsonl.*([Rr]erun it|Repeat the run) with redo=true"
    ) as told:
        results_of(made.cells, {"e": tmp_path / "e"})
    assert "\n" not in str(told.value)


def stored_answers(task: str, scores: list[dict[str, Any]], *shown: float) -> StoredAnswers:
    """Return the answers of a task, whose number is read as each of these in turn."""
    numbers = iter(shown)

    class Stored(StoredAnswers):
        def finished(self, key: Any) -> Any:
            return SimpleNamespace(
                name="r", config=SimpleNamespace(eval=Eval(tasks=[EvalTask(task, 0)]))
            )

        def number(
            self, score: ScoreRef, metric: str | None = None, pair: str | None = None
        ) -> float:
            return next(numbers)

    table: Any = None
    key, rows = (
        ("r", task, "en"),
        [{"doc_id": at, "response": "", "scores": one} for at, one in enumerate(scores)],
    )
    return Stored(table, answers={key: answers_of(key, rows)})


@pytest.mark.parametrize(
    ("task", "scores"), [("wikitext", {}), ("wmt16-de-en", {"bleu": ["Water", "Maji"]})]
)
def test_a_score_of_all_answers_together_has_no_interval(task: str, scores: dict[str, Any]) -> None:
    """A perplexity, or the harness' BLEU, whose answers keep no number of their own.

    Not an error of their file.
    """
    metric, _ = primary_metric(task)
    with pytest.raises(NoScore, match=f"{metric} is of all answers together, not of each"):
        score = ScoreRef("m", ScoreWords(eval=task), "en")
        stored_answers(task, [scores] * 2).scores_by_question(score, metric, None)


def test_a_score_by_a_tasks_own_function_has_no_interval() -> None:
    """tinyArc's acc_norm is an estimate by item response theory, not a mean of answers."""
    answers = stored_answers("tinyArc", [{"acc_norm": at % 2} for at in range(4)], 61.3, 50.0)
    score = ScoreRef("m", ScoreWords(eval="tinyArc"), "en")
    with pytest.raises(NoScore, match="acc_norm is of all answers together, not of each"):
        answers.scores_by_question(score, "acc_norm", None)
    assert answers.scores_by_question(score, "acc_norm", None) == {0: 0, 1: 1, 2: 0, 3: 1}


def test_numbers_of_the_harness_beyond_shares_are_tested_as_numbers() -> None:
    """crows_pairs' differences of log-likelihoods, against SciPy.

    Tango's test is of answers between 0 and 1.
    """
    rng = np.random.default_rng(0)
    sides = rng.normal(3, 2, (2, 50))
    scores = [
        ScoreRef(name, ScoreWords(eval="crows_pairs_english"), "en") for name in ("left", "right")
    ]

    class Stored(StoredAnswers):
        def scores_by_question(
            self, score: ScoreRef, metric: str, pair: str | None
        ) -> dict[Any, float]:
            return dict(enumerate(sides[scores.index(score)]))

    left, right = cells = [Cell(score.model, "all", [Item({}, ({(): score},))]) for score in scores]
    nothing: Any = None

    def frame(metric: str) -> Frame:
        return Stored(nothing).frame(SimpleNamespace(cells={}, choices={}), cells, metric)

    found = Comparison(frame("likelihood_diff"), [(1.0, left)], [(1.0, right)]).contrast()
    expected = stats.ttest_rel(*sides)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    sides[:] = sides > 3
    assert not frame("likelihood_diff").bounded  # differences all the same
    assert frame("pct_stereotype").bounded
