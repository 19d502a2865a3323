"""A table's cells as plain data, each with its interval, and the table's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.benchmarks.harness import NO_SHARES
from pipeline.evaluate.records import ScoreRow
from pipeline.papers import published as papers
from pipeline.report.expression import ScoreLine, is_plain_mean, lines_of
from pipeline.report.frame import NoScore
from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.metrics import stored_metric, tasks_of
from pipeline.report.stored import VALIDATIONS, StoredAnswers, page_text
from pipeline.tables.plan import Candidate, Cell, Choice, ScoreRef, difference_of
from pipeline.tables.planned_runs import Planning


def describe_cell(stored: StoredAnswers, cell: Cell) -> CellResult:
    """Return a cell without its number, with its tasks and the evaluations behind it."""
    table, plan = stored.table, stored.table.plan
    lines = lines_of([cell])
    tasks = tasks_of(plan, [cell])
    task = ""
    if len(tasks) == 1:
        task = "".join(map(str, tasks - {None}))
    shown = [line for line in lines if is_shown(table, line)]
    digits = 1
    if cell.fact in VALIDATIONS or (cell.metric or primary_metric(task)[0]) in NO_SHARES:
        digits = 3
    published = suspect = None
    if cell.published:
        published = papers.published_value(*cell.published)
        suspect = papers.reason_for_doubt(*cell.published)
    return CellResult(
        cell.row,
        cell.column,
        digits=digits,
        n=len({(id(line.item), line.place) for line in lines}),
        published=published,
        suspect=suspect,
        scores=scores_behind(stored, cell, shown),
        runs=runs_behind(table, lines),
        task=task,
        pair=cell.pair,
    )


def runs_behind(table: Planning, lines: Sequence[ScoreLine]) -> list[str]:
    """Return the names of the runs that provide a cell's numbers."""
    names: dict[str, None] = {}
    for line in lines:
        scores = [line.score]
        if isinstance(line.score, ScoreRef):
            difference = difference_of(line.score, line.cell.metric)
            if difference:
                scores.append(difference[1])
        for score in scores:
            run = table.run_of(score)
            if run:
                names[run.name] = None
    return list(names)


def scores_behind(stored: StoredAnswers, cell: Cell, shown: Sequence[ScoreLine]) -> list[CellScore]:
    """Return the evaluations of the shown lines, with the scores that the cell shows."""
    scores = []
    for line in shown:
        run = stored.table.run_of(line.score)
        if run is None:
            continue
        at = {axis: str(value) for axis, value in line.item.at.items()}
        rows: Sequence[ScoreRow] = ()
        if not cell.fact:
            rows = stored.rows_of(line.score, cell)
        scores.append(CellScore(run.name, at, rows))
    return scores


def cell_result(stored: StoredAnswers, cell: Cell) -> CellResult:
    """Return a cell with its number and 95 % interval, or with the reason why it has none."""
    result = describe_cell(stored, cell)
    if cell.fact is None and any(item.model is not None for item in cell.items):
        return replace(result, n=len(result.runs), missing="a figure, in its run's folder")
    try:
        value = float(stored.value(cell))
    except NoScore as error:
        return replace(result, n=0, missing=page_text(str(error), stored.table.config.runs_dir))
    if cell.fact is None and not is_plain_mean(cell):
        result = replace(result, maximum=value)
    estimate = estimate_interval(stored, cell)
    if estimate is None:
        return replace(result, value=value)
    split_half, low, high = estimate
    if result.maximum is not None:
        value = split_half
    return replace(result, value=value, low=low, high=high)


def estimate_interval(stored: StoredAnswers, cell: Cell) -> tuple[float, float, float] | None:
    """Return a cell and its 95 % interval over draws of questions, in percent or bits.

    None for facts, figures and spBLEU, and if answers were not stored.
    """
    plan = stored.table.plan
    metric = stored_metric(plan, [cell])
    if metric is None:
        return None
    try:
        value, low, high = stored.frame(plan, [cell], metric).estimate(cell)
    except NoScore:
        return None
    return 100 * value, 100 * low, 100 * high


def is_shown(table: Planning, line: ScoreLine) -> bool:
    """Return True if a cell shows this score.

    If there is a choice, a cell shows the winner's score. It shows no score while the choice is
    open.
    """
    if line.item.model is not None:
        return False
    if line.candidate == ():
        return True
    return line.candidate == table.chosen_candidate(str(line.item.choice))


def choices_of(table: Planning) -> dict[str, Any]:
    """Return each choice: its winner, and its candidates with their mean scores.

    The means are None while a score is missing.
    """
    choices = {}
    for key, choice in table.plan.choices.items():
        means = table.candidate_values(choice) or {}
        candidates = []
        for candidate in choice.candidates:
            candidates.append({**at_of(choice, candidate), "mean": means.get(candidate)})
        chosen = table.chosen_candidate(key)
        choices[key] = {
            "run": choice.run,
            "at": choice.at,
            "chosen": at_of(choice, chosen) if chosen else None,
            "candidates": candidates,
        }
    return choices


def at_of(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, candidate, strict=True))
