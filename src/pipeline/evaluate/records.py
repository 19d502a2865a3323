"""From the harness' records to what is kept: score rows, and one record a question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.benchmarks.local_files import write_rows
from pipeline.errors import PipelineError
from pipeline.evaluate import metrics
from pipeline.evaluate.answer_language import in_another_language, told_by
from pipeline.stats.statistics import mean_stderr, value_per_question

Sample = dict[str, Any]  # one question as samples/ keeps it; what a line holds depends on the task


@dataclass(frozen=True)
class ScoreRow:
    """One score of scores.json.

    `language`: of a translation pair, the one that is not English. `subject`: None of all.

    `value` and `stderr` as the harness has them: fractions of 1; BLEU and chrF++ 0-100. `n`:
    questions. `reason`: why a requested task has no value.
    """

    task: str
    language: str
    pair: str | None
    subject: str | None
    num_fewshot: int | None  # None where the log of another tool does not tell
    metric: str
    filter: str
    value: float | None
    stderr: float | None
    n: int
    reason: str | None = None

    @property
    def where(self) -> str:
        return self.pair or self.language

    def as_json(self) -> dict[str, Any]:
        found = {}
        for name, value in vars(self).items():
            if name != "reason" or value:
                found[name] = value
        return found


@dataclass(frozen=True)
class TaskResult:
    """One task of one model: `rows` of scores, the harness' and what belongs to them, `samples` a
    question each.
    """

    rows: list[ScoreRow]
    samples: list[Sample]
    task_hash: str
    version: Any


@dataclass(frozen=True)
class EvaluationResult:
    """All tasks of one evaluation.

    `beside`: rows that are ours alone; `harness`: what scored them, and how.
    """

    rows: list[ScoreRow]
    samples: dict[str, list[Sample]]  # by a spec's name
    harness: dict[str, Any]
    beside: list[ScoreRow] = field(default_factory=list)


def score_row(
    spec: TaskSpec,
    metric: str,
    filter_name: str,
    item_values: Sequence[Any],
    value: float | None = None,
    subject: str | None = None,
) -> ScoreRow:
    """One score. item_values: a number per question, or (question, number) of its parts, from which
    the standard error is computed; anything else for corpus scores, which have none. value: that of
    the score; by default their mean.
    """
    value, benchmark = fmean(item_values) if value is None else float(value), spec.benchmark
    if benchmark.question_column:
        item_values = list(value_per_question(item_values, metric in benchmark.measures).values())
    single = all(isinstance(item, int | float) for item in item_values)
    return ScoreRow(
        task=spec.task,
        language=spec.language,
        pair=spec.pair,
        subject=subject or spec.part or None,
        num_fewshot=spec.num_fewshot,
        metric=metric,
        filter=filter_name,
        value=value,
        stderr=mean_stderr(item_values, value) if single else None,
        n=len(item_values),
    )


def rows_of(
    spec: TaskSpec, results: Mapping[str, Any], records: list[dict[str, Any]]
) -> list[ScoreRow]:
    """Return the harness' scores of one task, the primary one first."""
    rows = []
    for name, value in results.items():
        metric, _, filter_name = name.partition(",")
        if filter_name and not metric.endswith("_stderr"):
            if not isinstance(value, Real):
                raise PipelineError(
                    f"{spec.name}: its metric {metric} is {value!r}, which is not a number: leave"
                    " the metric out of metric_list, or give it an aggregation that returns a"
                    " number; its answers are stored"
                )
            of_filter = []
            for record in records:
                if record["filter"] == filter_name:
                    of_filter.append(record)
            # some questions may have none
            item_values = []
            for record in of_filter:
                if metric in record:
                    item_values.append(record[metric])
            rows.append(score_row(spec, metric, filter_name, item_values, float(value)))
    return sorted(rows, key=lambda row: (row.metric, row.filter) != spec.primary)


def share_rows(spec: TaskSpec, samples: list[Sample]) -> list[ScoreRow]:
    """Shares of the answers to each question that held none or ran out of tokens, scores by group,
    and what several answers alone have.
    """
    benchmark, (metric, chief) = spec.benchmark, spec.primary
    answers, shares = list(map(answers_of, samples)), dict[str, list[Any]]()
    if benchmark.kind == "number":
        shares["unparsed"] = [
            fmean([answer["extracted"] == metrics.INVALID for answer in some]) for some in answers
        ]
    shares["cut_off"] = [
        fmean([answer["cut_off"] for answer in some]) for some in answers if "cut_off" in some[0]
    ]
    for name in samples[0]["scores"] if samples else ():
        if name == "majority" or name.startswith("pass@"):
            shares[name] = [sample["scores"][name] for sample in samples]
    rows = []
    for name, values in shares.items():
        if values:
            rows.append(score_row(spec, name, chief, values))
    if benchmark.group:
        for group in sorted({sample[benchmark.group] for sample in samples}):
            item_values = []
            for sample in samples:
                if sample[benchmark.group] == group:
                    item_values.append(sample["scores"][metric])
            rows.append(score_row(spec, metric, chief, item_values, subject=group))
    return rows


def sample_of(spec: TaskSpec, record: Mapping[str, Any], cut_off: bool | None) -> Sample:
    """One question as it is kept: what was asked, what came back, what was read from it, whether it
    is right.

    `cut_off`: whether the answer ran out of tokens; None where nobody knows, or nothing was
    generated.
    """
    benchmark, answer = spec.benchmark, record["filtered_resps"]
    sample: Sample = {"doc_id": record["doc_id"], "prompt": record["arguments"][0][0]}
    scores = {name: record[name] for name in record["metrics"]}
    if benchmark.kind == "choice":
        arguments = record["arguments"]
        if (
            "acc_mutual_info" in record["metrics"]
        ):  # each option stands a second time, without the question
            arguments = arguments[: len(arguments) // 2]
        letters = [continuation.strip() for _, continuation in arguments]
        if len({*letters}) < len(
            letters
        ):  # options that are parts of the prompt, as Winogrande's, end alike
            letters = [f"{label}: {text}" for label, text in enumerate(letters, 1)]
        likelihoods = [float(likelihood) for likelihood, _ in answer[: len(letters)]]
        best, target = letters[likelihoods.index(max(likelihoods))], record["target"]
        sample |= {
            "target": letters[target] if isinstance(target, int) else target,
            "response": best,
            "extracted": best,
            "correct": right_or_wrong(
                scores.get(benchmark.metric), bool(benchmark.question_column)
            ),
            "loglikelihoods": dict(zip(letters, likelihoods, strict=True)),
        }
        if benchmark.group:
            sample[benchmark.group] = record["doc"][benchmark.group]
        if benchmark.passage:
            sample["group"] = passage_group(record["doc"][benchmark.passage])
    elif benchmark.kind == "text":
        scores = {
            name: score
            for name, score in scores.items()
            if not (benchmark.of_harness and isinstance(score, tuple))
        }
        sample |= {
            "target": str(record["target"]),
            "response": "",
            "extracted": "",
            "correct": None,
        }
    else:
        right, response = scores.get(benchmark.metric), record["resps"][0][0]
        sample |= {
            "target": str(record["target"]),
            "response": response,
            "extracted": str(answer[0]),
            "correct": right_or_wrong(right),
        }
        if benchmark.kind == "number":
            written_in = spec.answers_in
            number = metrics.last_number(response, written_in)
            scores["numeric_match"] = metrics.numeric_match(
                response, record["doc"]["answer_number"], written_in
            )
            if number is None:
                sample["number"] = None
            else:
                sample["number"] = str(number)
        elif benchmark.kind == "translation":
            sample |= {"extracted": answer[0].strip(), "correct": None}
            scores = {"chrf++": metrics.sentence_chrf(record["target"], answer[0])}
        if cut_off is not None:
            sample["cut_off"] = cut_off
    return sample | {
        "filter": record["filter"],
        "prompt_hash": record["prompt_hash"],
        "scores": scores,
    }


def passage_group(passage: str) -> str:
    """Return the name of the questions about a passage."""
    return hashlib.sha256(passage.strip().encode()).hexdigest()[:12]


def answers_of(sample: Sample) -> list[Sample]:
    """Return the answers to a question: several if it was sampled, else the sample itself."""
    answers: list[Sample] = sample.get("answers", [sample])
    return answers


def join_answers(spec: TaskSpec, results: Sequence[TaskResult]) -> TaskResult:
    """Several answers to each question as one result.

    A question's scores are means over its answers; further ones are `majority`, whether the most
    frequent extracted answer is right (the first of equally frequent ones), and `pass@k`
    (`metrics.pass_at_k`). Standard errors are over questions.
    """
    _, chief = spec.primary
    samples = []
    for answers in zip(*(result.samples for result in results), strict=True):
        right = [bool(answer["correct"]) for answer in answers]
        first = answers[0]
        numeric = []
        for name, score in first["scores"].items():
            if isinstance(score, int | float):
                numeric.append(name)
        scores = {name: fmean([answer["scores"][name] for answer in answers]) for name in numeric}
        if all(answer["correct"] is not None for answer in answers):
            scores |= {
                f"pass@{k}": metrics.pass_at_k(len(right), sum(right), k)
                for k in powers_of_two(len(right))
            }
            if spec.kind != "program":
                voted = metrics.majority([answer["extracted"] for answer in answers])
                first = max(
                    (answers[index] for index in voted), key=lambda answer: bool(answer["correct"])
                )
                scores["majority"] = float(first["correct"])
        varying = [{key: answer[key] for key in VARYING if key in answer} for answer in answers]
        samples.append({**first, "scores": scores, "answers": varying})
    rows = []
    for parts in zip(*(result.rows for result in results), strict=True):
        of_chief = parts[0].filter == chief
        each: list[Any] = [
            sample["scores"].get(parts[0].metric) if of_chief else None for sample in samples
        ]
        value = fmean([part.value for part in parts if part.value is not None])
        rows.append(
            replace(
                parts[0], value=value, stderr=None if None in each else mean_stderr(each, value)
            )
        )
    return replace(results[0], rows=rows, samples=samples)


# What differs between the answers to a question
VARYING = ("response", "extracted", "correct", "number", "cut_off", "thinking")


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 and so on, and `limit`."""
    return sorted({limit, *(2**power for power in range(limit.bit_length()) if 2**power <= limit)})


def right_or_wrong(score: Any, of_part: bool = False) -> bool | None:
    """Whether a score, of a part that of (question, score), is 1 or 0; None of any other."""
    value = score[1] if of_part else score
    if value in (0, 1):
        return bool(value)
    return None


def further_rows_of(
    specs: Sequence[TaskSpec], samples: Mapping[str, list[Sample]], spm_model: str | None
) -> list[ScoreRow]:
    """Rows that are ours alone: a numeric match for MGSM and the language of its answers, spBLEU
    where its model is.
    """
    rows = []
    for spec in specs:
        task_samples = samples[spec.name]
        if spec.kind == "number":
            right = [sample["scores"]["numeric_match"] for sample in task_samples]
            lost = [
                fmean([answer["number"] is None for answer in answers_of(sample)])
                for sample in task_samples
            ]
            rows.append(score_row(spec, "numeric_match", "last-number", right))
            rows.append(score_row(spec, "unparsed", "last-number", lost))
            rows += language_rows(spec, task_samples)
        if spec.kind == "translation" and spm_model:
            references, responses = (
                [sample[side] for sample in task_samples] for side in ("target", "extracted")
            )
            value = metrics.spbleu(references, responses, spm_model)
            rows.append(score_row(spec, "spbleu", "none", [None] * len(task_samples), value))
    return rows


def language_rows(spec: TaskSpec, samples: Sequence[Sample]) -> list[ScoreRow]:
    """Return the shares of answers, and of a model's thoughts, in another language, of those long
    enough to tell.

    They come from stored samples alone, of older evaluations too. `filter` names the detector of
    the language. A share of none has no row.
    """
    language = spec.answers_in
    answers = []
    for sample in samples:
        for answer in answers_of(sample):
            answers.append(answer)
    rows = []
    for part, metric in (("response", "other_language"), ("thinking", "thinking_other_language")):
        shares = in_another_language(
            [str(answer[part]) for answer in answers if part in answer], language
        )
        if shares:
            rows.append(score_row(spec, metric, told_by(language), shares))
    return rows


def missing_row(task: str, language: str, num_fewshot: int, reason: str) -> ScoreRow:
    """Return a score without a value, for a task that a bundle wants where possible and could not
    have.
    """
    metric, filter_name = primary_metric(task)
    return ScoreRow(
        task, language, None, None, num_fewshot, metric, filter_name, None, None, 0, reason
    )


# --- files ---


def write_evaluation(
    result: EvaluationResult, specs: Sequence[TaskSpec], work: Path
) -> dict[str, float]:
    """scores.json and samples/<task>.<language or pair>.jsonl; gives back the scores by name."""
    (work / "samples").mkdir(parents=True, exist_ok=True)
    for spec in specs:
        write_rows(work / "samples" / f"{spec.task}.{spec.where}.jsonl", result.samples[spec.name])
    return write_scores(result, work)


def write_scores(result: EvaluationResult, work: Path) -> dict[str, float]:
    """scores.json; gives back the scores by name, as manifests and W&B have them:
    mgsm/sw/exact_match -> its value.
    """
    rows, further = ([row.as_json() for row in side] for side in (result.rows, result.beside))
    report = {"rows": rows, "beside": further, "harness": result.harness}
    (work / "scores.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    scores = {}
    for row in [*result.rows, *result.beside]:
        name = "/".join(part for part in (row.task, row.where, row.subject, row.metric) if part)
        plain = row.filter in ("none", primary_metric(row.task)[1]) or row.metric in (
            "numeric_match",
            "other_language",
        )
        if row.value is not None:
            scores[name if plain else f"{name},{row.filter}"] = row.value
    return scores


def read_scores(file: Path) -> tuple[list[ScoreRow], dict[str, Any]]:
    """(rows, how they were scored) of a scores.json, the rows that are ours alone last; without
    values that are not finite. Raises PipelineError where it cannot be read.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = [
            ScoreRow(
                **row | {name: metrics.finite_or_none(row[name]) for name in ("value", "stderr")}
            )
            for row in [*content["rows"], *content.get("beside", [])]
        ]
        return rows, content.get("harness", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise PipelineError(
            f"scores.json of {file.parent.name} cannot be read: rerun it with redo=true"
        ) from None
