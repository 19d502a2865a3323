"""Rates of right answers for which a table's published numbers are exactly true."""

import statistics
from collections import Counter
from dataclasses import replace

import numpy as np

from pipeline.papers.published import published_value
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan

RATE = 0.5  # share of right answers, where nothing is published


def settle_choices(plan: TablePlan) -> tuple[TablePlan, dict[ScoreRef, ScoreRef]]:
    """Return a plan with one model in place of each choice, and that model's candidate.

    Only choices among shown candidates are replaced.
    """
    candidates: dict[ScoreRef, ScoreRef] = {}

    def settle_item(item: Item) -> Item:
        readings = []
        for reading in item.readings:
            score = next(iter(reading.values()))
            settled_score = (
                score if () in reading else replace(score, model=f"{item.choice} at {item.at}")
            )
            candidates[settled_score] = score
            readings.append({(): settled_score})
        return replace(item, readings=tuple(readings), choice=None)

    cells = {
        key: replace(cell, items=list(map(settle_item, cell.items)))
        for key, cell in plan.cells.items()
    }
    return replace(plan, cells=cells), candidates


def published_equations(plan: TablePlan, cell: Cell) -> list[tuple[list[ScoreRef], float]]:
    """Return (scores, their published mean as a share) of a cell of a settled plan.

    Empty without a published number. A maximum is the first item's, and a minimum the last item's,
    in all cells.
    """
    if cell.published is None or cell.metric or cell.fact:
        return []
    printed = published_value(*cell.published)
    items = cell.items
    steps = {how for how, _ in cell.reduce}
    if printed is None or not all(item.readings for item in items) or len(steps) > 1:
        return []
    part = {"max": slice(0, 1), "min": slice(-1, None)}.get(next(iter(steps), "mean"), slice(None))
    return [
        (
            [
                score
                for item in items[part]
                for reading in item.readings
                for score in reading.values()
            ],
            printed / 100,
        )
    ]


def published_rates(plan: TablePlan) -> dict[ScoreRef, float]:
    """Return the share of right answers of each score that makes all published cells true.

    Remaining degrees of freedom are settled by least squares, as near as possible to the cells'
    numbers.
    """
    cell_means = [
        equation for cell in plan.cells.values() for equation in published_equations(plan, cell)
    ]
    cell_values: dict[ScoreRef, list[float]] = {}
    for scores, value in cell_means:
        for score in scores:
            cell_values.setdefault(score, []).append(value)
    if not cell_means:
        return {}
    start = {score: statistics.fmean(values) for score, values in cell_values.items()}
    columns = {score: column for column, score in enumerate(start)}
    matrix = np.zeros((len(cell_means), len(columns)))
    for row, (scores, _) in enumerate(cell_means):
        for score, count in Counter(scores).items():
            matrix[row, columns[score]] = count / len(scores)
    residual = np.array([value for _, value in cell_means]) - matrix @ np.array(
        list(start.values())
    )
    shifts = np.linalg.lstsq(matrix, residual, rcond=None)[0]
    return {
        score: float(np.clip(start[score] + shifts[column], 0, 1))
        for score, column in columns.items()
    }
