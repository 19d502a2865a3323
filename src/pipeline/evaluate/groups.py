"""Groups of the evaluation harness: joins the scores and questions of a group's parts.

The harness' own functions aggregate the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.benchmarks.harness import group_metrics
from pipeline.benchmarks.local_files import Row
from pipeline.errors import PipelineError
from pipeline.evaluate.records import EvaluationResult, Sample, ScoreRow

MOST_QUESTIONS = 1_000_000  # in a part; a question's id is its number plus its part's offset


def join_group(
    specs: list[TaskSpec], result: EvaluationResult
) -> tuple[list[TaskSpec], EvaluationResult]:
    """Join the parts of a group as one task, with the parts' scores as subjects.

    A scoring run has one task or one group; a single task is returned unchanged. The mean of the
    questions' scores is the group's score. If each part has the same weight, a question's score is
    multiplied by questions / (parts * questions of its part).
    """
    first = specs[0]
    if not first.part:
        return specs, result
    name = f"{first.task}_{first.where}_{first.num_fewshot}shot"
    metrics = group_metrics(first.task)
    rows = [*_group_rows(first.task, metrics, result.rows), *result.rows]
    samples = _samples_of(specs, metrics, result)
    group = replace(first, name=name, part="")
    return [group], replace(result, rows=rows, samples={name: samples})


def _group_rows(group: str, metrics: Sequence[Row], parts: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the harness' score of a group in each metric and filter that it aggregates."""
    group_rows = []
    for metric in metrics:
        by_filter: dict[str, list[ScoreRow]] = {}
        for row in parts:
            if row.metric == metric["metric"]:
                by_filter.setdefault(row.filter, []).append(row)
        filters = metric["filter_list"]
        if filters is None:
            filters = list(by_filter)
        for name in filters:
            if name in by_filter:
                group_rows.append(_group_row(by_filter[name], metric["weight_by_size"]))
    if not group_rows:
        raise PipelineError(
            f"The tasks of the group {group} lack its metrics. List the tasks in eval.tasks=[...]."
        )
    return group_rows


def _group_row(rows: Sequence[ScoreRow], by_size: bool) -> ScoreRow:
    from lm_eval.api.metrics import (
        aggregate_subtask_metrics,
        pooled_sample_stderr,
        unweighted_mean_stderr,
    )

    sizes = [row.n for row in rows]
    errors = [row.stderr for row in rows]
    stderr = None
    if None not in errors:
        if by_size:
            stderr = pooled_sample_stderr(errors, sizes)
        else:
            stderr = unweighted_mean_stderr(errors)
    value = aggregate_subtask_metrics([row.value for row in rows], sizes, by_size)
    return replace(rows[0], subject=None, value=value, stderr=stderr, n=sum(sizes))


def _samples_of(
    parts: Sequence[TaskSpec], metrics: Sequence[Row], result: EvaluationResult
) -> list[Sample]:
    by_part = [result.samples[part.name] for part in parts]
    total = sum(map(len, by_part))
    # metrics that give each part the same weight
    weighted = {metric["metric"] for metric in metrics if not metric["weight_by_size"]}
    joined: list[Sample] = []
    for part_index, (part, questions) in enumerate(zip(parts, by_part, strict=True)):
        weight = total / (len(parts) * len(questions))
        for sample in questions:
            scores = dict(sample["scores"])
            for name in weighted & scores.keys():
                if isinstance(scores[name], int | float):
                    scores[name] = weight * scores[name]
            joint = sample | {"part": part.part, "scores": scores}
            joint["doc_id"] = MOST_QUESTIONS * part_index + sample["doc_id"]
            if weighted:
                joint["correct"] = None
            joined.append(joint)
    return joined
