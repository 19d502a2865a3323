"""A cell as an expression over its lines, each a score behind the cell.

`evaluate` computes a cell from a row of numbers for each line's score. If each row is one mean, the
result is the cell's value. If each row has the answers, the result is by question. If each row has
means of halves or of draws, the result is the bootstrap of the cell, which repeats each choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.stats.statistics import largest
from pipeline.tables.plan import Candidate, Cell, Item, TablePlan

if TYPE_CHECKING:
    import numpy as np

# a score (or the spec that recorded a fact), and the pair of languages that a cell shows
Key = tuple[Any, str | None]
Values = Callable[[Cell, Any], "np.ndarray"]  # (the cell of a line, its score) -> its row
Axes = tuple[tuple[str, Any], ...]  # the values of some axes


# --- lines ---


class ScoreLine(NamedTuple):
    """A score behind a cell.

    Attributes:
        leaf: The cell that has the item, if the cell averages rows.
        candidate: Of an open choice, otherwise empty.
        score: A ScoreRef, or the spec that recorded a fact.
    """

    leaf: Cell
    item: Item
    place: int
    candidate: Candidate
    score: Any


def leaf_cells(plan: TablePlan, cell: Cell) -> Iterator[Cell]:
    """Yield the cells that have items.

    For a row that averages rows, these are the cells of the averaged rows.
    """
    if not cell.of:
        yield cell
    for row in cell.of:
        yield from leaf_cells(plan, plan.cells[row, cell.column])


def lines_of(plan: TablePlan, cells: Iterable[Cell]) -> list[ScoreLine]:
    """Return the lines behind some cells, for all candidates of a choice."""
    lines = []
    for cell in cells:
        for leaf in leaf_cells(plan, cell):
            for item in leaf.items:
                lines += lines_of_item(leaf, item)
    return lines


def lines_of_item(leaf: Cell, item: Item) -> list[ScoreLine]:
    lines = []
    if item.model is not None:
        lines.append(ScoreLine(leaf, item, 0, (), item.model))
    for place, reading in enumerate(item.readings):
        for candidate, score in reading.items():
            lines.append(ScoreLine(leaf, item, place, candidate, score))
    return lines


def scores_of(plan: TablePlan, cells: Iterable[Cell]) -> list[Key]:
    """Return the scores that cells show, and the scores that choose them, each with its pair."""
    keys: dict[Key, None] = {}
    for line in lines_of(plan, cells):
        pair = line.leaf.pair
        keys[line.score, pair] = None
        if line.item.choice is not None and is_open_choice(line.item):
            for scores in plan.choices[line.item.choice].candidates.values():
                for score in scores:
                    keys[score, pair] = None
    return list(keys)


def is_open_choice(item: Item) -> bool:
    """Return True if all candidates were scored here.

    The choice can then be repeated in each draw.
    """
    return item.choice is not None and any(() not in reading for reading in item.readings)


def is_plain_mean(plan: TablePlan, cell: Cell) -> bool:
    """Return True if a cell is a plain mean of its answers."""
    leaves = list(leaf_cells(plan, cell))
    for part in (cell, *leaves):
        if any(how != "mean" for how, _ in part.reduce):
            return False
    return not any(map(is_open_choice, chain.from_iterable(leaf.items for leaf in leaves)))


# --- expressions ---


class Sides(NamedTuple):
    """The value of a part of a cell, from the rows that choices use and from the rows shown."""

    choosing: np.ndarray
    shown: np.ndarray


def evaluate(
    plan: TablePlan, cell: Cell, choose: Values, show: Values, keep: Sequence[str] = ()
) -> np.ndarray:
    """Return a cell computed from the rows of `show`, with choices made on the rows of `choose`.

    Choices, maxima and minima use `choose`. If it has one column, that choice is used for all
    columns of `show`. Otherwise each column has its own choice. Ties choose the first candidate.

    Args:
        plan: The plan of the cell.
        cell: The cell.
        choose: Returns the rows that choices use.
        show: Returns the rows that are shown.
        keep: Axes over which the cell is not reduced. They are the first dimensions of the result.
            An axis that the cell does not have has length 1.
    """
    return Evaluation(plan, choose, show, keep).of(cell).shown


@dataclass
class Evaluation:
    """One evaluation of a cell, as in `evaluate`."""

    plan: TablePlan
    choose: Values
    show: Values
    keep: Sequence[str]
    # many items share a choice
    winners: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def of(self, cell: Cell) -> Sides:
        if cell.of:
            averaged = [self.plan.cells[row, cell.column] for row in cell.of]
            return reduce_sides(cell.reduce[0][0], [self.of(part) for part in averaged])
        parts = [(item.at, self.of_item(cell, item)) for item in cell.items]
        for how, axes in cell.reduce:
            reduced = [axis for axis in axes if axis not in self.keep]
            groups: dict[Axes, list[Sides]] = {}
            for at, sides in parts:
                others = [(axis, value) for axis, value in at.items() if axis not in reduced]
                groups.setdefault((*others,), []).append(sides)
            parts = [(dict(at), reduce_sides(how, group)) for at, group in groups.items()]
        levels = [at for at, _ in parts]
        choosing = by_level(levels, [sides.choosing for _, sides in parts], self.keep)
        shown = by_level(levels, [sides.shown for _, sides in parts], self.keep)
        return Sides(choosing, shown)

    def of_item(self, cell: Cell, item: Item) -> Sides:
        """Return the mean over the readings of an item, each for the chosen candidate."""
        if item.model is not None:
            return self.sides(cell, item.model)
        readings = []
        for reading in item.readings:
            if item.choice is None or () in reading:
                (score,) = reading.values()
                readings.append(self.sides(cell, score))
                continue
            best = self.winner(cell, item.choice)
            candidates = self.plan.choices[item.choice].candidates
            parts = [self.sides(cell, reading[candidate]) for candidate in candidates]
            readings.append(pick_sides(parts, best))
        return reduce_sides("mean", readings)

    def sides(self, cell: Cell, score: Any) -> Sides:
        return Sides(self.choose(cell, score), self.show(cell, score))

    def winner(self, cell: Cell, name: str) -> Any:
        """Return the number of the best candidate of a choice, in each column."""
        key = cell.row, cell.column, name
        if key not in self.winners:
            choice = self.plan.choices[name]
            means = []
            for scores in choice.candidates.values():
                rows = [self.choose(cell, score) for score in scores]
                means.append(choice.sign * average(rows))
            self.winners[key] = largest(means)
        return self.winners[key]


def reduce_sides(how: str, parts: Sequence[Sides]) -> Sides:
    """Return the mean of some parts, or the part with the largest (max) or smallest (min) value.

    The value is the mean in the rows that choices use.
    """
    choosing = [part.choosing for part in parts]
    if how == "mean" or len(parts) == 1:
        return Sides(average(choosing), average([part.shown for part in parts]))
    sign = 1 if how == "max" else -1
    columns = choosing[0].shape[-1]
    means = [part.reshape(-1, columns).mean(axis=0) for part in choosing]
    return pick_sides(parts, largest([sign * mean for mean in means]))


def pick_sides(parts: Sequence[Sides], best: np.ndarray) -> Sides:
    choosing = picked([part.choosing for part in parts], best)
    return Sides(choosing, picked([part.shown for part in parts], best))


def average(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of several rows. The mean of single numbers is correctly rounded."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    if all(part.size == 1 for part in parts):
        return np.full_like(parts[0], statistics.fmean(part.item() for part in parts))
    mean: np.ndarray = np.mean(np.broadcast_arrays(*parts), axis=0)
    return mean


def picked(parts: Sequence[np.ndarray], best: np.ndarray) -> np.ndarray:
    """Return the best part, in each column if each has a choice."""
    import numpy as np

    if len(best) == 1:
        return parts[best[0]]
    return np.stack(parts)[best, np.arange(len(best))]


def by_level(
    levels_at: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], axes: Sequence[str]
) -> np.ndarray:
    """Return rows at values of the axes as one array (levels of each axis ..., columns)."""
    import numpy as np

    if not axes:
        (row,) = rows
        return row
    levels = []
    for axis in axes:
        distinct = dict.fromkeys(at[axis] for at in levels_at if axis in at)
        levels.append(list(distinct) or [None])
    shape = [len(values) for values in levels]
    array = np.full((*shape, len(rows[0])), np.nan)
    for at, row in zip(levels_at, rows, strict=True):
        place = []
        for axis, values in zip(axes, levels, strict=True):
            place.append(values.index(at.get(axis)))
        array[tuple(place)] = row
    return array
