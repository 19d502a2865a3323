"""The tasks and metrics of cells: which numbers are stored for each answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.benchmarks import kind_of, measures_of, primary_metric
from pipeline.report.expression import lines_of
from pipeline.stats.translations import CORPUS_METRICS
from pipeline.tables.plan import Cell, TablePlan, task_of


def tasks_of(plan: TablePlan, cells: Iterable[Cell]) -> set[str | None]:
    """Return the tasks whose answers are under cells; None stands for a fact or a figure."""
    tasks: set[str | None] = set()
    for line in lines_of(cells):
        if line.cell.fact or line.item.model is not None:
            tasks.add(None)
        if line.item.model is None:
            tasks.add(task_of(line.score))
    return tasks


def metrics_of(task: str) -> list[str]:
    """Return the metrics that are stored for each answer of a task, the primary one first."""
    kind = kind_of(task)
    if kind is None:
        return []
    if kind == "translation":
        return list(CORPUS_METRICS)
    further = ["numeric_match"] if kind == "number" else []
    return [primary_metric(task)[0], *further, *measures_of(task)]


def stored_metric(plan: TablePlan, cells: Sequence[Cell]) -> str | None:
    """Return the metric that all cells show, if it is stored for each answer.

    Translations store it for each set. None for different metrics, for facts and figures, and for
    spBLEU.
    """
    tasks = tasks_of(plan, cells)
    task = next(iter(tasks), None)
    if len(tasks) != 1 or task is None:
        return None
    metrics = {cell.metric or primary_metric(task)[0] for cell in cells}
    metric = metrics.pop()
    if not metrics and metric in metrics_of(task):
        return metric
    return None
