"""The comparisons of stage=compare: each model with the first, on the questions of both logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.errors import PipelineError
from pipeline.extras.log import Log
from pipeline.stats.contrast import contrast
from pipeline.stats.ranks import holm
from pipeline.text import align_columns, printable

Logs = Mapping[str, Log]  # a model's logs by task
Line = dict[str, Any]


def compare_logs(models: Mapping[str, Logs]) -> tuple[list[Line], list[str]]:
    """Return a line for each model, task and metric, and notes about what differs.

    Raises:
        PipelineError: no model shares a metric with the first one.
    """
    (baseline, base_logs), *others = models.items()
    lines: list[Line] = []
    differing: dict[str, None] = {}
    omitted: dict[str, None] = {}
    for model, logs in others:
        for task in [task for task in base_logs if task in logs]:
            left, right = logs[task], base_logs[task]
            shared = [question for question in right.prompts if question in left.prompts]
            differing |= dict.fromkeys(differing_settings(left, right, shared))
            omitted |= dict.fromkeys(f"{task} {metric}" for metric in left.others + right.others)
            place = {"model": model, "baseline": baseline, "task": task}
            for result in compare_task(left, right, shared):
                lines.append(place | result)
    notes = []
    if differing:
        notes.append(f"These settings differ: {', '.join(differing)}.")
    if omitted:
        names = ", ".join(omitted)
        notes.append(f"Not compared, because they are not means over questions: {names}.")
    if not lines:
        raise PipelineError(
            f"results=[{','.join(models)}] cannot be compared: the models share no task and metric"
            f" with questions that vary. Give logs of the same tasks. {' '.join(notes)}"
        )
    corrected = holm([line["p"] for line in lines])
    for line, p in zip(lines, corrected, strict=True):
        line["p_holm"] = p
    return lines, [printable(note) for note in notes]


def differing_settings(left: Log, right: Log, shared: Sequence[str]) -> Iterator[str]:
    """Yield the names of settings that differ, and "prompts" if those of shared questions do."""
    for name in dict.fromkeys([*left.settings, *right.settings]):
        if left.settings.get(name) != right.settings.get(name):
            yield name
    if any(left.prompts[question] != right.prompts[question] for question in shared):
        yield "prompts"


def compare_task(left: Log, right: Log, shared: Sequence[str]) -> Iterator[Line]:
    """Yield the comparison of each metric that both logs of a task hold.

    Shares are in points and compared by the report's own test. Other numbers are compared by
    Student's t. Metrics whose numbers do not vary are omitted.
    """
    for metric in left.scores:
        if metric not in right.scores or not shared:
            continue
        own = [left.scores[metric][question] for question in shared]
        base = [right.scores[metric][question] for question in shared]
        is_share = all(0 <= value <= 1 for value in [*own, *base])
        differences = [one - other for one, other in zip(own, base, strict=True)]
        try:
            result = contrast(differences, bound=1.0 if is_share else math.inf)
        except ValueError:  # no variance
            continue
        scale = 100 if is_share else 1
        yield {
            "metric": metric,
            "questions": len(shared),
            "value": scale * fmean(own),
            "baseline_value": scale * fmean(base),
            "difference": scale * result.difference,
            "difference_low": scale * result.low,
            "difference_high": scale * result.high,
            "p": result.p,
        }


def comparison_text(lines: Sequence[Line]) -> str:
    """Return the comparisons as aligned columns."""
    rows = [["model", "task", "metric", "questions", "value", "baseline", "difference", "p (Holm)"]]
    for line in lines:
        row = [line["model"], line["task"], line["metric"], str(line["questions"])]
        row += [f"{line['value']:.1f}", f"{line['baseline_value']:.1f}"]
        low, high = line["difference_low"], line["difference_high"]
        row.append(f"{line['difference']:.1f} [{low:.1f}, {high:.1f}]")
        row.append(f"{line['p_holm']:.3f}")
        rows.append([printable(cell) for cell in row])
    return "\n".join(align_columns(rows, right=[3]))
