"""Scores against answers that are known beforehand, and what scores.json holds of them."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
from made_up import Scripted, asked, choice, none_stored

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.evaluate import records
from pipeline.evaluate.bundle import over_languages
from pipeline.evaluate.model import Answering
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.records import (
    EvaluationResult,
    ScoreRow,
    language_rows,
    missing_row,
    read_scores,
    write_evaluation,
)
from pipeline.evaluate.score import score_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock


def scored(
    lm: Any,
    data_root: Path,
    folder: Path,
    task: Any,
    codes: tuple[str, ...] = ("qac",),
    **kwargs: Any,
) -> Any:
    limit = kwargs.pop("limit", None)
    definitions = task_specs(choice(task, **kwargs), codes, data_root, folder)
    return score_tasks(
        lm,
        definitions,
        load_tasks(definitions, Lock()),
        choice(task, limit=limit),
        none_stored(folder),
    )


def value(scores: Any, metric: str, **keys: Any) -> Any:
    (row,) = [
        row
        for row in scores.rows
        if row.metric == metric and all(getattr(row, key) == wanted for key, wanted in keys.items())
    ]
    return row.value


def number_of(prompt: str) -> int:
    return int(re.findall(r"problem (\d+)", prompt)[-1])


def test_the_share_that_is_right_is_the_score(data_root: Path, tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        i = number_of(prompt)
        if i < 4:  # right, as asked
            return f" So. The answer is {10 + i}."
        if i < 6:  # right, but not in the words of the exemplars
            return f" It makes {10 + i}"
        return " I do not know." if i < 9 else " The answer is 77."

    scores = scored(Scripted(answer), data_root, tmp_path / "tasks", asked("mgsm", 2))
    assert value(scores, "exact_match", filter="flexible-extract") == 0.6
    assert value(scores, "exact_match", filter="strict-match") == 0.4
    assert value(scores, "unparsed") == 0.3
    first = scores.rows[0]
    assert (first.metric, first.filter, first.n, first.num_fewshot) == (
        "exact_match",
        "flexible-extract",
        10,
        2,
    )
    assert first.stderr == pytest.approx((0.6 * 0.4 / 9) ** 0.5)
    samples = scores.samples["mgsm_qac_2shot"]
    assert [sample["correct"] for sample in samples] == [True] * 6 + [False] * 4
    assert [samples[i]["extracted"] for i in (0, 7, 9)] == ["10.", "[invalid]", "77."]
    assert samples[0]["target"] == "10" and samples[0]["response"] == " So. The answer is 10."


def test_belebele_by_hand(data_root: Path, tmp_path: Path) -> None:
    # Always the second option; right where number % 4 == 1, which of the rows 5..8 holds for row 5
    # alone.
    lm = Scripted(weigh=lambda prompt, continuation: -1.0 if continuation == " B" else -2.0)
    scores = scored(lm, data_root, tmp_path / "tasks", asked("belebele", 5))
    assert (value(scores, "acc"), value(scores, "acc_norm")) == (0.25, 0.25)
    assert scores.rows[0].metric == "acc" and scores.rows[0].n == 4
    first = scores.samples["belebele_qac_5shot"][0]
    assert (first["doc_id"], first["target"], first["extracted"], first["correct"]) == (
        5,
        "B",
        "B",
        True,
    )
    assert first["loglikelihoods"] == {"A": -2.0, "B": -1.0, "C": -2.0, "D": -2.0}


@pytest.mark.parametrize("shots", [0, 2])
def test_global_mmlu_by_hand(data_root: Path, tmp_path: Path, shots: int) -> None:
    # Always A: rows 0 (homes) and 4 (colors) of 3 homes and 5 colors.
    lm = Scripted(weigh=lambda prompt, continuation: -1.0 if continuation == " A" else -2.0)
    scores = scored(lm, data_root, tmp_path / "tasks", asked("global_mmlu", shots))
    found = {row.subject: (row.value, row.n) for row in scores.rows}
    assert found == {None: (0.25, 8), "homes": (pytest.approx(1 / 3), 3), "colors": (0.2, 5)}


def test_flores_is_sacrebleu(data_root: Path, tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        return (
            " the word number " + re.findall(r"number (\d) here", prompt)[-1] + " says here.\nmore"
        )

    scores = scored(
        Scripted(answer), data_root, tmp_path / "tasks", asked("flores", 2), ("en", "qac")
    )
    responses = [f"the word number {i} says here." for i in range(6)]
    references = [[f"qac devtest says the word number {i} here." for i in range(6)]]
    into = {"pair": "en-qac"}
    assert (
        value(scores, "chrf++", **into)
        == sacrebleu.corpus_chrf(responses, references, word_order=2).score
    )
    assert value(scores, "bleu", **into) == sacrebleu.corpus_bleu(responses, references).score
    assert [(row.pair, row.metric) for row in scores.rows[::2]] == [
        ("en-qac", "chrf++"),
        ("qac-en", "chrf++"),
    ]
    assert (
        scores.rows[0].language == "qac" and scores.rows[0].stderr is None and scores.rows[0].n == 6
    )
    sample = scores.samples["flores_en-qac_2shot"][0]
    assert (sample["extracted"], sample["correct"]) == (responses[0], None)


@pytest.mark.parametrize(
    ("tokens", "text", "cut_off"),
    [
        ([5, 6, 7], "a b c", True),
        ([5, 6], "a b", False),
        ([5, 2, 5], "a", False),
        ([5, 6, 7], "a Question: b", False),
    ],
)
def test_an_answer_that_ran_out_of_tokens(tokens: list[int], text: str, cut_off: bool) -> None:
    lm: Any = SimpleNamespace(_ends={2}, think_end=None)
    assert Answering._ran_out(lm, tokens, text, 3, ["Question:"]) is cut_off


def test_numbers_are_matched_as_a_person_reads_them(data_root: Path, tmp_path: Path) -> None:
    """Answers are 10 to 19.

    Read: 10.0, ১১, $12; then the last number of a worked answer; nothing of the rest.
    """
    answers = [" It is 10.0", " ১১", "$12.", "13 14 13", " none"] + [" 99"] * 5
    lm = Scripted(lambda prompt: answers[number_of(prompt)])
    task = asked("mgsm_direct", 0)
    definitions = task_specs(choice(task), ["qac"], data_root, tmp_path / "tasks")
    scores = score_tasks(
        lm, definitions, load_tasks(definitions, Lock()), choice(task), none_stored(tmp_path)
    )
    beside = records.further_rows_of(definitions, scores.samples, None)
    found = {(row.metric, row.filter): row.value for row in [*scores.rows, *beside]}
    assert found["numeric_match", "last-number"] == 0.4 and found["unparsed", "last-number"] == 0.1
    assert (
        found["exact_match", "flexible-extract"] == 0.2
        and found["unparsed", "flexible-extract"] == 0.2
    )
    assert scores.samples["mgsm_direct_qac_0shot"][1]["number"] == "11"


def test_the_average_of_languages_gives_each_the_same_weight(
    data_root: Path, tmp_path: Path
) -> None:
    codes = ["en", "sw", "de"]
    for code in codes[1:]:
        shutil.copytree(data_root / "mgsm/en", data_root / "mgsm" / code)
    seen: Counter[int] = Counter()

    def answer(prompt: str) -> str:
        """In the n-th language the first n answers are wrong."""
        number = number_of(prompt)
        seen[number] += 1
        return f" The answer is {10 + number}." if number >= seen[number] - 1 else " 99"

    task, lm = asked("mgsm_en_cot", 0), Scripted(answer)
    definitions = task_specs(choice(task), codes, data_root, tmp_path / "tasks")
    scores = score_tasks(
        lm, definitions, load_tasks(definitions, Lock()), choice(task), none_stored(tmp_path)
    )
    (row,) = [
        row
        for row in over_languages(scores.rows)
        if row.filter == "flexible-extract" and row.metric == "exact_match"
    ]
    assert row.value == pytest.approx((1 + 0.9 + 0.8) / 3)
    assert (row.language, row.n, row.stderr) == ("mean", 30, None)


ROW = ScoreRow("flores", "sw", "en-sw", None, 0, "chrf++", "none", 43.25, None, 50)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    definition = TaskSpec(
        "flores_en-sw_0shot",
        tmp_path / "task.yaml",
        "flores",
        "sw",
        "en-sw",
        0,
        benchmark_of("flores"),
    )
    samples = [{"doc_id": 0, "response": "maji\u2028"}]
    missing = missing_row("mbpp", "sw", 0, "no translation")
    result = EvaluationResult(
        [ROW], {definition.name: samples}, {"backend": "hf"}, beside=[missing]
    )
    assert write_evaluation(result, [definition], tmp_path) == {"flores/en-sw/chrf++": 43.25}
    assert read_scores(tmp_path / "scores.json") == ([ROW, missing], {"backend": "hf"})
    assert (
        json.loads((tmp_path / "samples/flores.en-sw.jsonl").read_text(encoding="utf-8"))
        == samples[0]
    )


def test_the_language_of_answers_is_told_beside() -> None:
    """Three answers in the small world, the last one in another script."""
    definition = TaskSpec(
        "mgsm_qac_0shot", Path("task.yaml"), "mgsm", "qac", None, 0, benchmark_of("mgsm")
    )
    texts = ["2 * 3 = 6. 5 + 6 = 11. The answer is 11.", "2 * 3 = 7. 5 + 7 = 12. The answer is 12."]
    texts += ["উত্তর হল বারো, এর বেশি নয়"]
    (row,) = language_rows(definition, [{"response": text} for text in texts])
    assert (row.metric, row.filter, round(row.value or 0, 3), row.n) == (
        "other_language",
        "script",
        0.333,
        3,
    )
    assert language_rows(definition, [{"response": "11"}]) == []  # nothing to have a share of
    english = TaskSpec(
        "mgsm_en_cot_sw_2shot",
        Path("task.yaml"),
        "mgsm_en_cot",
        "sw",
        None,
        2,
        benchmark_of("mgsm"),
    )
    (row,) = language_rows(english, [{"response": "The answer is eleven balls."}])
    assert (row.metric, row.filter, row.value) == (
        "other_language",
        "py3langid",
        0,
    )  # English is asked for
