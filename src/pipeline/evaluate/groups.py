"""Groups of the evaluation harness: scores and questions of the parts joined, aggregated by its own functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.benchmarks.harness import group_metrics
from pipeline.benchmarks.task_files import Definition
from pipeline.errors import PipelineError
from pipeline.evaluate.records import EvaluationResult, Sample, ScoreRow

MOST_QUESTIONS = 1_000_000  # of a part: a question is known by its number and that of its part


def join_groups(
    definitions: Sequence[Definition], result: EvaluationResult
) -> tuple[list[Definition], EvaluationResult]:
    """The parts of each group as one task: the group's scores, then those of its parts as subjects, and all questions.

    The mean of a question's scores over the questions is the group's score, also where each part has the same weight:
    there a question's score is multiplied by questions / (parts * questions of its part).
    """
    joined: list[Definition] = []
    rows, samples = list(result.rows), {}
    by_group: dict[tuple[str, str], list[Definition]] = {}
    for definition in definitions:
        by_group.setdefault((definition.group or definition.name, definition.where), []).append(definition)
    for (group, _), parts in by_group.items():
        if not parts[0].group:
            joined.append(parts[0])
            samples[parts[0].name] = result.samples[parts[0].name]
            continue
        whole = replace(parts[0], name=f"{group}_{parts[0].where}_{parts[0].num_fewshot}shot", group="", part="")
        own = [row for row in rows if (row.task, row.where) == (whole.task, whole.where) and row.subject]
        place = rows.index(own[0])
        rows[place:place] = _group_rows(group, own, len(parts))
        joined.append(whole)
        samples[whole.name] = _samples_of(group, parts, result)
    return joined, replace(result, rows=rows, samples=samples)


def _group_rows(group: str, parts: Sequence[ScoreRow], count: int) -> list[ScoreRow]:
    """The harness' score of a group in each metric and filter that it aggregates."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr, unweighted_mean_stderr

    found = []
    for one in group_metrics(group):
        by_filter: dict[str, list[ScoreRow]] = {}
        for row in parts:
            if row.metric == one["metric"] and (one["filter_list"] is None or row.filter in one["filter_list"]):
                by_filter.setdefault(row.filter, []).append(row)
        for same in by_filter.values():
            values, sizes = [row.value for row in same], [row.n for row in same]
            errors = [row.stderr for row in same if row.stderr is not None]
            stderr = None
            if len(errors) == len(same):
                of_means = unweighted_mean_stderr(errors)
                stderr = pooled_sample_stderr(errors, sizes) if one["weight_by_size"] else of_means
            value = aggregate_subtask_metrics(values, sizes, one["weight_by_size"])
            found.append(replace(same[0], subject=None, value=value, stderr=stderr, n=sum(sizes)))
    if not found:
        raise PipelineError(f"the tasks of the group {group} have none of its metrics: list them in eval.tasks=[...]")
    return found


def _samples_of(group: str, parts: Sequence[Definition], result: EvaluationResult) -> list[Sample]:
    by_part = [result.samples[part.name] for part in parts]
    total = sum(map(len, by_part))
    same_weight = {one["metric"] for one in group_metrics(group) if not one["weight_by_size"]}
    joined: list[Sample] = []
    for place, (part, questions) in enumerate(zip(parts, by_part, strict=True)):
        for sample in questions:
            one: dict[str, Any] = {"doc_id": MOST_QUESTIONS * place + sample["doc_id"]}
            one |= {key: value for key, value in sample.items() if key not in ("doc_id", "scores")} | {
                "part": part.part
            }
            weight = total / (len(parts) * len(questions))
            scores = {
                name: weight * score if name in same_weight and isinstance(score, int | float) else score
                for name, score in sample["scores"].items()
            }
            joined.append(one | ({"correct": None} if same_weight else {}) | {"scores": scores})
    return joined
