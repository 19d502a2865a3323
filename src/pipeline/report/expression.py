"""A cell as one expression over scores: its number, its answers question by question, or its bootstrap draws."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from pipeline.stats.statistics import largest
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan, reduce_items

# the value of a score (or of the spec that holds a fact) in a cell: a number, (N,) answers or (draws,) means
Source = Callable[[Cell, Any], Any]
Sided = tuple[Any, Any]  # (what choices use, what is shown)


def evaluate(plan: TablePlan, cell: Cell, choose: Source, show: Source, axes: Sequence[str] = ()) -> Sided:
    """A cell as `choose` has it and as `show` has it, both with the choices, maxima and minima that `choose` makes: in
    numbers one for all, in draws one for each draw. It is reduced over all of its axes except `axes`, the first
    dimensions of the result; an axis that it does not have, or has one value of, is of length 1.

    Numbers twice give the cell's value; numbers and answers its answers by question; the same draws twice a bootstrap
    that repeats choices in each draw; two halves of the problems a split-half. Ties choose the first candidate.
    """
    import numpy as np

    if cell.of:
        rows = [plan.cells[row, cell.column] for row in cell.of]
        return reduce_sides(cell.reduce[0][0], [evaluate(plan, row, choose, show, axes) for row in rows])

    @cache  # many items share a choice
    def winner_of(choice: str) -> Any:
        scored, sign = plan.choices[choice].candidates.values(), plan.choices[choice].sign
        return largest([sign * average([choose(cell, score) for score in scores]) for scores in scored])

    def item_sides(_: Cell, item: Item) -> Sided:
        if item.model is not None:
            return choose(cell, item.model), show(cell, item.model)
        is_open = is_open_choice(item)
        best = winner_of(str(item.choice)) if is_open else 0

        def of_winner(source: Source) -> Any:
            numbers = []
            for reading in item.readings:
                scores = list(reading.values())
                if is_open and () not in reading:
                    scores = [reading[candidate] for candidate in plan.choices[str(item.choice)].candidates]
                at = best if len(scores) > 1 else 0
                if np.ndim(at) == 0:
                    numbers.append(source(cell, scores[at]))
                else:
                    numbers.append(picked([source(cell, score) for score in scores], at))
            return average(numbers)

        return of_winner(choose), of_winner(show)

    reduced = reduce_items(cell, item_sides, reduce_sides, axes)
    if not axes:
        ((_, sides),) = reduced
        return sides
    choosing, shown = ([(at, sides[number]) for at, sides in reduced] for number in (0, 1))
    return by_level(choosing, axes), by_level(shown, axes)


def average(parts: Sequence[Any]) -> Any:
    """The mean of several numbers, exactly rounded, or of several arrays."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], float):
        return statistics.fmean(parts)
    return np.mean(np.broadcast_arrays(*parts), axis=0)


def picked(parts: Sequence[Any], best: Any) -> Any:
    """The part of this place; in each draw, where there is a place for each."""
    import numpy as np

    return parts[best] if np.ndim(best) == 0 else np.stack(parts, axis=1)[np.arange(len(best)), best]


def reduce_sides(how: str, parts: Sequence[Sided]) -> Sided:
    """The mean; or the largest (max) or least (min) by what choices use, of levels by their mean."""
    import numpy as np

    choosing, shown = zip(*parts, strict=True)
    if how == "mean" or len(parts) == 1:
        return average(choosing), average(shown)
    sign = 1 if how == "max" else -1
    is_by_level = np.shape(choosing[0]) != () and np.shape(choosing[0]) != np.shape(shown[0])
    best = largest([sign * (np.mean(part) if is_by_level else part) for part in choosing])
    return picked(choosing, best), picked(shown, best)


def by_level(numbers: Sequence[tuple[Any, Any]], axes: Sequence[str]) -> Any:
    """(levels of each axis ..., values) of (values of the axes, value)."""
    import numpy as np

    levels = [
        list(dict.fromkeys(levels_at[axis] for levels_at, _ in numbers if axis in levels_at)) or [None] for axis in axes
    ]
    array = np.full((*map(len, levels), *np.shape(numbers[0][1])), np.nan)
    for levels_at, value in numbers:
        array[tuple(values.index(levels_at.get(axis)) for axis, values in zip(axes, levels, strict=True))] = value
    return array


def leaf_cells(plan: TablePlan, cell: Cell) -> Iterator[Cell]:
    """The cells that hold items: for a row that averages rows, those of the averaged rows."""
    if not cell.of:
        yield cell
    for row in cell.of:
        yield from leaf_cells(plan, plan.cells[row, cell.column])


def scores_under(plan: TablePlan, cell: Cell) -> Iterator[tuple[Cell, ScoreRef]]:
    """Each score that a cell reads, of all candidates of a choice, with the cell that holds it."""
    for leaf in leaf_cells(plan, cell):
        for item in leaf.items:
            for reading in item.readings:
                yield from ((leaf, score) for score in reading.values())


def is_open_choice(item: Item) -> bool:
    """Whether all candidates were scored here, so that the choice can be repeated in each draw."""
    return item.choice is not None and any(() not in reading for reading in item.readings)


def is_plain_mean(plan: TablePlan, cell: Cell) -> bool:
    """Whether a cell is a plain mean of its answers."""
    leaves = list(leaf_cells(plan, cell))
    is_mean = all(how == "mean" for part in (cell, *leaves) for how, _ in part.reduce)
    return is_mean and not any(is_open_choice(item) for leaf in leaves for item in leaf.items)
