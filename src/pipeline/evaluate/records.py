"""Score rows, and one sample per question, made from the harness' records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.benchmarks.local_files import write_rows
from pipeline.errors import PipelineError
from pipeline.evaluate import metrics
from pipeline.evaluate.answer_language import in_language, told_by
from pipeline.stats.statistics import mean_stderr, value_per_question

Sample = dict[str, Any]  # one question in samples/; the keys depend on the task


@dataclass(frozen=True)
class ScoreRow:
    """One score of scores.json.

    Attributes:
        language: The language. For a translation pair, the language that is not English.
        subject: None for the whole task.
        value: As in the harness: a fraction of 1, or 0-100 for BLEU and chrF++.
        stderr: The standard error, in the unit of `value`.
        n: The number of questions.
        reason: Why a requested task has no value.
    """

    task: str
    language: str
    pair: str | None
    subject: str | None
    num_fewshot: int
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
        content = dict(vars(self))
        if not self.reason:
            del content["reason"]
        return content


@dataclass(frozen=True)
class TaskResult:
    """The scores of one task of one model, and one sample per question."""

    rows: list[ScoreRow]
    samples: list[Sample]
    task_hash: str
    version: Any


@dataclass(frozen=True)
class EvaluationResult:
    """All tasks of one evaluation.

    Attributes:
        rows: The harness' scores.
        samples: The questions, by the name of their TaskSpec.
        harness: The versions and settings that the scores depend on.
        beside: Scores that this program adds.
    """

    rows: list[ScoreRow]
    samples: dict[str, list[Sample]]
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
    """Return one score.

    Args:
        spec: The task.
        metric: The metric's name.
        filter_name: The filter's name.
        item_values: Numbers for the standard error: one per question, or (question, number) for
            each part of a question. If they are no numbers, the score has no standard error, as for
            corpus scores.
        value: The score. None: the mean of `item_values`.
        subject: The subject of the questions.
    """
    value = fmean(item_values) if value is None else float(value)
    benchmark = spec.benchmark
    if benchmark.question_column:
        by_question = value_per_question(item_values, metric in benchmark.measures)
        item_values = list(by_question.values())
    stderr = None
    if all(isinstance(item, int | float) for item in item_values):
        stderr = mean_stderr(item_values, value)
    return ScoreRow(
        task=spec.task,
        language=spec.language,
        pair=spec.pair,
        subject=subject or spec.part or None,
        num_fewshot=spec.num_fewshot,
        metric=metric,
        filter=filter_name,
        value=value,
        stderr=stderr,
        n=len(item_values),
    )


def rows_of(
    spec: TaskSpec, results: Mapping[str, Any], records: list[dict[str, Any]]
) -> list[ScoreRow]:
    """Return the harness' scores of one task, the primary score first."""
    rows = []
    for name, value in results.items():
        metric, _, filter_name = name.partition(",")
        if not filter_name or metric.endswith("_stderr"):
            continue
        if not isinstance(value, Real):
            raise PipelineError(
                f"{spec.name}: its metric {metric} is {value!r}, which is not a number. Leave the"
                " metric out of metric_list, or give it an aggregation that returns a number. The"
                " answers are stored."
            )
        # the metric may be missing for some questions
        of_filter = [record for record in records if record["filter"] == filter_name]
        item_values = [record[metric] for record in of_filter if metric in record]
        rows.append(score_row(spec, metric, filter_name, item_values, float(value)))
    return sorted(rows, key=lambda row: (row.metric, row.filter) != spec.primary)


def share_rows(spec: TaskSpec, samples: list[Sample]) -> list[ScoreRow]:
    """Return the scores that this program computes from the samples of a task.

    They are the shares of answers without a number and of answers that ran out of tokens, the
    scores of sampled answers (majority and pass@k), and the scores by group.
    """
    if not samples:
        return []
    first = samples[0]
    metric, chief = spec.primary
    shares: dict[str, list[Any]] = {}
    if spec.kind == "number":
        shares["unparsed"] = share_of(samples, "extracted", metrics.INVALID)
    if "cut_off" in first:
        shares["cut_off"] = share_of(samples, "cut_off", True)
    for name in first["scores"]:
        if name == "majority" or name.startswith("pass@"):
            shares[name] = [sample["scores"][name] for sample in samples]
    rows = [score_row(spec, name, chief, values) for name, values in shares.items()]
    column = spec.benchmark.group
    by_group: dict[str, list[Any]] = {}
    for sample in samples:
        if column:
            by_group.setdefault(sample[column], []).append(sample["scores"][metric])
    for group, values in sorted(by_group.items()):
        rows.append(score_row(spec, metric, chief, values, subject=group))
    return rows


def share_of(samples: Sequence[Sample], key: str, value: Any) -> list[float]:
    """Return for each question the share of its answers that have a value under a key."""
    return [fmean(answer[key] == value for answer in answers_of(sample)) for sample in samples]


def sample_of(spec: TaskSpec, record: Mapping[str, Any], cut_off: bool | None) -> Sample:
    """Return a question in the form of samples/.

    Args:
        spec: The task.
        record: The harness' record of the question.
        cut_off: Whether the answer ran out of tokens. None if it was not generated or this is
            unknown.
    """
    benchmark = spec.benchmark
    scores = {name: record[name] for name in record["metrics"]}
    score = scores.get(benchmark.metric)
    if benchmark.kind == "choice":
        part = _choice_sample(spec, record, score)
    elif benchmark.kind == "text":
        part = {"target": str(record["target"]), "response": "", "extracted": "", "correct": None}
        if benchmark.of_harness:
            scores = {name: value for name, value in scores.items() if not isinstance(value, tuple)}
    else:
        response = record["resps"][0][0]
        extracted = record["filtered_resps"][0]
        part = {
            "target": str(record["target"]),
            "response": response,
            "extracted": str(extracted),
            "correct": right_or_wrong(score),
        }
        if benchmark.kind == "number":
            number = metrics.last_number(response, spec.answers_in)
            gold = metrics.last_number(str(record["doc"]["answer_number"]))
            part["number"] = None if number is None else str(number)
            scores["numeric_match"] = float(number == gold)
        elif benchmark.kind == "translation":
            part |= {"extracted": extracted.strip(), "correct": None}
            scores = {"chrf++": metrics.sentence_chrf(record["target"], extracted)}
        if cut_off is not None:
            part["cut_off"] = cut_off
    return {
        "doc_id": record["doc_id"],
        "prompt": record["arguments"][0][0],
        **part,
        "filter": record["filter"],
        "prompt_hash": record["prompt_hash"],
        "scores": scores,
    }


def _choice_sample(spec: TaskSpec, record: Mapping[str, Any], score: Any) -> Sample:
    benchmark = spec.benchmark
    arguments = record["arguments"]
    if "acc_mutual_info" in record["metrics"]:
        # the second half repeats the options without the question
        arguments = arguments[: len(arguments) // 2]
    options = [continuation.strip() for _, continuation in arguments]
    if len({*options}) < len(options):
        # options that are parts of the prompt, as in Winogrande, have the same continuation
        options = [f"{label}: {text}" for label, text in enumerate(options, 1)]
    likelihoods = {}
    for option, (likelihood, _) in zip(options, record["filtered_resps"], strict=False):
        likelihoods[option] = float(likelihood)
    best = max(options, key=lambda option: likelihoods[option])
    target = record["target"]
    sample: Sample = {
        "target": options[target] if isinstance(target, int) else target,
        "response": best,
        "extracted": best,
        "correct": right_or_wrong(score, bool(benchmark.question_column)),
        "loglikelihoods": likelihoods,
    }
    if benchmark.group:
        sample[benchmark.group] = record["doc"][benchmark.group]
    if benchmark.passage:
        sample["group"] = passage_group(record["doc"][benchmark.passage])
    return sample


def passage_group(passage: str) -> str:
    """Return the name of the questions about a passage."""
    return hashlib.sha256(passage.strip().encode()).hexdigest()[:12]


def answers_of(sample: Sample) -> list[Sample]:
    """Return the answers to a question, or the sample itself if it has only one answer."""
    answers: list[Sample] = sample.get("answers", [sample])
    return answers


def join_answers(spec: TaskSpec, results: Sequence[TaskResult]) -> TaskResult:
    """Join the results of several sampled answers to each question.

    A question's scores are means over its answers. `majority` is 1 if the most frequent extracted
    answer is right (the first of equally frequent answers). `pass@k` is `metrics.pass_at_k`.
    Standard errors are over questions.
    """
    _, primary_filter = spec.primary
    by_question = zip(*(result.samples for result in results), strict=True)
    samples = [_joined_sample(spec, answers) for answers in by_question]
    rows = []
    for parts in zip(*(result.rows for result in results), strict=True):
        first = parts[0]
        value = fmean([part.value for part in parts if part.value is not None])
        means = [sample["scores"].get(first.metric) for sample in samples]
        stderr = None
        if first.filter == primary_filter and None not in means:
            stderr = mean_stderr(means, value)
        rows.append(replace(first, value=value, stderr=stderr))
    return replace(results[0], rows=rows, samples=samples)


def _joined_sample(spec: TaskSpec, answers: Sequence[Sample]) -> Sample:
    first = answers[0]
    scores = {}
    for name, score in first["scores"].items():
        if isinstance(score, int | float):
            scores[name] = fmean([answer["scores"][name] for answer in answers])
    if all(answer["correct"] is not None for answer in answers):
        count = len(answers)
        right = sum(answer["correct"] for answer in answers)
        for k in powers_of_two(count):
            scores[f"pass@{k}"] = metrics.pass_at_k(count, right, k)
        if spec.kind != "program":
            voted = metrics.majority([answer["extracted"] for answer in answers])
            candidates = [answers[place] for place in voted]
            first = max(candidates, key=lambda answer: bool(answer["correct"]))
            scores["majority"] = float(first["correct"])
    varying = [{key: answer[key] for key in VARYING if key in answer} for answer in answers]
    return {**first, "scores": scores, "answers": varying}


# keys of a sample that differ between the answers to a question
VARYING = ("response", "extracted", "correct", "number", "cut_off", "thinking")


def powers_of_two(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    exponents = range((limit - 1).bit_length())
    return [*(2**exponent for exponent in exponents), limit]


def right_or_wrong(score: Any, of_part: bool = False) -> bool | None:
    """Return True for a score of 1, False for 0, and None for other scores.

    The score of a part of a question is (question, score).
    """
    value = score[1] if of_part else score
    if value in (0, 1):
        return bool(value)
    return None


def further_rows_of(
    specs: Sequence[TaskSpec], samples: Mapping[str, list[Sample]], spm_model: str | None
) -> list[ScoreRow]:
    """Return scores that the harness does not compute.

    They are the numeric match and the answer language of MGSM, and spBLEU if its model is
    configured.
    """
    rows = []
    for spec in specs:
        of_task = samples[spec.name]
        if spec.kind == "number":
            right = [sample["scores"]["numeric_match"] for sample in of_task]
            unparsed = share_of(of_task, "number", None)
            rows.append(score_row(spec, "numeric_match", "last-number", right))
            rows.append(score_row(spec, "unparsed", "last-number", unparsed))
            rows += language_rows(spec, of_task)
        if spec.kind == "translation" and spm_model:
            references = [sample["target"] for sample in of_task]
            responses = [sample["extracted"] for sample in of_task]
            value = metrics.spbleu(references, responses, spm_model)
            rows.append(score_row(spec, "spbleu", "none", [None] * len(of_task), value))
    return rows


def language_rows(spec: TaskSpec, samples: Sequence[Sample]) -> list[ScoreRow]:
    """Return the shares of answers, and of a model's thoughts, in another language.

    Only texts that are long enough to detect their language are counted. If no text is long enough,
    there is no row. The shares come from stored samples, so older evaluations have them too. The
    row's `filter` is the name of the language detector.
    """
    language = spec.answers_in
    answers = list(chain.from_iterable(map(answers_of, samples)))
    rows = []
    for part, metric in (("response", "other_language"), ("thinking", "thinking_other_language")):
        told = [in_language(str(answer[part]), language) for answer in answers if part in answer]
        in_other = [not same for same in told if same is not None]
        if in_other:
            rows.append(score_row(spec, metric, told_by(language), in_other))
    return rows


def missing_row(task: str, language: str, num_fewshot: int, reason: str) -> ScoreRow:
    """Return a score without a value, for a `where_possible` task that could not be defined."""
    metric, filter_name = primary_metric(task)
    return ScoreRow(
        task=task,
        language=language,
        pair=None,
        subject=None,
        num_fewshot=num_fewshot,
        metric=metric,
        filter=filter_name,
        value=None,
        stderr=None,
        n=0,
        reason=reason,
    )


# --- files ---


def write_evaluation(
    result: EvaluationResult, specs: Sequence[TaskSpec], work: Path
) -> dict[str, float]:
    """Write scores.json and samples/<task>.<language or pair>.jsonl; return the scores by name."""
    folder = work / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        write_rows(folder / f"{spec.task}.{spec.where}.jsonl", result.samples[spec.name])
    return write_scores(result, work)


def write_scores(result: EvaluationResult, work: Path) -> dict[str, float]:
    """Write scores.json and return the scores by the names of manifests and W&B.

    An example of a name is mgsm/sw/exact_match.
    """
    report = {
        "rows": [row.as_json() for row in result.rows],
        "beside": [row.as_json() for row in result.beside],
        "harness": result.harness,
    }
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    (work / "scores.json").write_text(text, encoding="utf-8")
    rows = [*result.rows, *result.beside]
    return {_name_of(row): row.value for row in rows if row.value is not None}


def _name_of(row: ScoreRow) -> str:
    """Return the name of a score, with its filter unless the filter is the usual one."""
    name = "/".join(filter(None, (row.task, row.where, row.subject, row.metric)))
    _, primary_filter = primary_metric(row.task)
    if row.filter in ("none", primary_filter) or row.metric in ("numeric_match", "other_language"):
        return name
    return f"{name},{row.filter}"


def read_scores(file: Path) -> tuple[list[ScoreRow], dict[str, Any]]:
    """Read a scores.json.

    Values that are not finite are None.

    Returns:
        The rows, the harness' first, and the versions and settings that they depend on.

    Raises:
        PipelineError: The file cannot be read.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = []
        for row in [*content["rows"], *content.get("beside", [])]:
            finite = {name: metrics.finite_or_none(row[name]) for name in ("value", "stderr")}
            rows.append(ScoreRow(**row | finite))
        return rows, content.get("harness", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise PipelineError(
            f"scores.json of {file.parent.name} cannot be read. Rerun it with redo=true."
        ) from None
