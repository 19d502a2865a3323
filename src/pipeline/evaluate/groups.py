"""Groups of the evaluation harness: scores and questions of the parts joined, aggregated by its own
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.errors import PipelineError
from pipeline.evaluate.records import EvaluationResult, Sample, ScoreRow

MOST_QUESTIONS = 1_000_000  # of a part: a question is known by its number and that of its part


def join_group(
    specs: list[TaskSpec], result: EvaluationResult
) -> tuple[list[TaskSpec], EvaluationResult]:
    """Join the parts of a group as one task: the group's scores, then those of its parts as
    subjects, and all questions.

    A scoring run has one task or group; what is no group stays. The mean of a question's scores
    over the questions is the group's score. Where each part has the same weight, a question's score
    is multiplied by questions / (parts * questions of its part).
    """
    first = specs[0]
    if not first.group:
        return specs, result
    group_result = replace(
        first, name=f"{first.group}_{first.where}_{first.num_fewshot}shot", group="", part=""
    )
    rows = [*_group_rows(first, result.rows), *result.rows]
    return [group_result], replace(
        result, rows=rows, samples={group_result.name: _samples_of(specs, result)}
    )


def _group_rows(first: TaskSpec, parts: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the harness' score of a group in each metric and filter that it aggregates."""
    from lm_eval.api.metrics import (
        aggregate_subtask_metrics,
        pooled_sample_stderr,
        unweighted_mean_stderr,
    )

    group_rows = []
    for metric in first.aggregates:
        rows = []
        for row in parts:
            if row.metric == metric["metric"]:
                rows.append(row)
        for name in (
            dict.fromkeys(row.filter for row in rows)
            if metric["filter_list"] is None
            else metric["filter_list"]
        ):
            same = [row for row in rows if row.filter == name]
            if not same:
                continue
            by_size, sizes, stderr = metric["weight_by_size"], [row.n for row in same], None
            errors = []
            for row in same:
                if row.stderr is not None:
                    errors.append(row.stderr)
            if len(errors) == len(same):
                if by_size:
                    stderr = pooled_sample_stderr(errors, sizes)
                else:
                    stderr = unweighted_mean_stderr(errors)
            value = aggregate_subtask_metrics([row.value for row in same], sizes, by_size)
            group_rows.append(
                replace(same[0], subject=None, value=value, stderr=stderr, n=sum(sizes))
            )
    if not group_rows:
        raise PipelineError(
            f"the tasks of the group {first.group} have none of its metrics: list them in"
            " eval.tasks=[...]"
        )
    return group_rows


def _samples_of(parts: Sequence[TaskSpec], result: EvaluationResult) -> list[Sample]:
    by_part = [result.samples[part.name] for part in parts]
    total = sum(map(len, by_part))
    same_weight = set()
    for metric in parts[0].aggregates:
        if not metric["weight_by_size"]:
            same_weight.add(metric["metric"])
    joined: list[Sample] = []
    for part_index, (part, questions) in enumerate(zip(parts, by_part, strict=True)):
        weight = total / (len(parts) * len(questions))
        for sample in questions:
            scores = {
                name: (
                    weight * score
                    if name in same_weight and isinstance(score, int | float)
                    else score
                )
                for name, score in sample["scores"].items()
            }
            place = MOST_QUESTIONS * part_index + sample["doc_id"]
            correct = None if same_weight else sample["correct"]
            joined.append(
                {**sample, "doc_id": place, "part": part.part, "scores": scores, "correct": correct}
            )
    return joined
