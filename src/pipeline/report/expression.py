"""A cell as an expression over its lines, each a score behind it.

`evaluate` computes a cell from a row of numbers for each line's score. Rows of one mean give its
value, rows of answers its answers by question, rows of halves and of draws its bootstrap, in which
each choice is repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeline.stats.statistics import largest
from pipeline.tables.plan import Candidate, Cell, Choice, Item

if TYPE_CHECKING:
    import numpy as np

Key = tuple[
    Any, str | None
]  # a score (or the spec that holds a fact), and the pair of languages that a cell shows
Values = Callable[[Cell, Any], "np.ndarray"]  # (the cell of a line, its score) -> its row


class Plan(Protocol):
    """The part of a table's plan that its numbers depend on."""

    cells: dict[tuple[str, str], Cell]
    choices: dict[str, Choice]


@dataclass
class PlainPlan:
    """The plan of cells that are not those of a table file."""

    cells: dict[tuple[str, str], Cell]
    choices: dict[str, Choice] = field(default_factory=dict)


# --- lines ---


class ScoreLine(NamedTuple):
    """A score behind a cell.

    leaf: the cell that holds its item, if the cell averages rows; score: a ScoreRef, or the spec
    that holds a fact; candidate: of an open choice, otherwise empty.
    """

    leaf: Cell
    item: Item
    place: int
    candidate: Candidate
    score: Any


def leaf_cells(plan: Plan, cell: Cell) -> Iterator[Cell]:
    """Yield the cells that hold items: for a row that averages rows, those of the averaged rows."""
    if not cell.of:
        yield cell
    for row in cell.of:
        yield from leaf_cells(plan, plan.cells[row, cell.column])


def lines_of(plan: Plan, cells: Iterable[Cell]) -> list[ScoreLine]:
    """Return the lines behind some cells, of all candidates of a choice."""
    lines = []
    for cell in cells:
        for leaf in leaf_cells(plan, cell):
            for item in leaf.items:
                if item.model is not None:
                    lines.append(ScoreLine(leaf, item, 0, (), item.model))
                for place, reading in enumerate(item.readings):
                    lines += [
                        ScoreLine(leaf, item, place, candidate, score)
                        for candidate, score in reading.items()
                    ]
    return lines


def scores_of(plan: Plan, cells: Iterable[Cell]) -> list[Key]:
    """Return the scores that cells show, and those by which shown candidates are chosen, each with
    its pair.
    """
    keys: dict[Key, None] = {}
    for line in lines_of(plan, cells):
        keys[line.score, line.leaf.pair] = None
        if line.item.choice is not None and is_open_choice(line.item):
            for scores in plan.choices[line.item.choice].candidates.values():
                keys |= {(score, line.leaf.pair): None for score in scores}
    return list(keys)


def is_open_choice(item: Item) -> bool:
    """Return True if all candidates were scored here, so that the choice can be repeated in each
    draw.
    """
    return item.choice is not None and any(() not in reading for reading in item.readings)


def is_plain_mean(plan: Plan, cell: Cell) -> bool:
    """Return True if a cell is a plain mean of its answers."""
    leaves = list(leaf_cells(plan, cell))
    steps = []
    for part in (cell, *leaves):
        for how, _ in part.reduce:
            steps.append(how)
    is_chosen = any(is_open_choice(item) for leaf in leaves for item in leaf.items)
    return not is_chosen and all(how == "mean" for how in steps)


# --- expressions ---


class Sides(NamedTuple):
    """A part of a cell in the rows that choices use, and in those that are shown."""

    choosing: np.ndarray
    shown: np.ndarray


def evaluate(
    plan: Plan, cell: Cell, choose: Values, show: Values, keep: Sequence[str] = ()
) -> np.ndarray:
    """Return a cell in the rows of `show`, with the choices, maxima and minima that the rows of
    `choose` make.

    If `choose` has one column, its choice holds for all columns of `show`. Otherwise each column
    has its own. Ties choose the first candidate. keep: axes over which the cell is not reduced.
    They are the first dimensions of the result; an axis that the cell does not have is of length 1.
    """
    return Evaluation(plan, choose, show, keep).of(cell).shown


@dataclass
class Evaluation:
    plan: Plan
    choose: Values
    show: Values
    keep: Sequence[str]
    winners: dict[tuple[str, str, str], Any] = field(
        default_factory=dict
    )  # many items share a choice

    def of(self, cell: Cell) -> Sides:
        if cell.of:
            rows = [self.of(self.plan.cells[row, cell.column]) for row in cell.of]
            return reduce_sides(cell.reduce[0][0], rows)
        parts = [(item.at, self.of_item(cell, item)) for item in cell.items]
        for how, axes in cell.reduce:
            groups: dict[tuple[tuple[str, Any], ...], list[Sides]] = {}
            for at, sides in parts:
                rest = tuple(
                    (axis, value)
                    for axis, value in at.items()
                    if axis not in axes or axis in self.keep
                )
                groups.setdefault(rest, []).append(sides)
            parts = [(dict(rest), reduce_sides(how, group)) for rest, group in groups.items()]
        levels = [at for at, _ in parts]
        choosing = by_level(levels, [sides.choosing for _, sides in parts], self.keep)
        return Sides(choosing, by_level(levels, [sides.shown for _, sides in parts], self.keep))

    def of_item(self, cell: Cell, item: Item) -> Sides:
        """Return the mean over the readings of an item, each of the chosen candidate."""
        if item.model is not None:
            return Sides(self.choose(cell, item.model), self.show(cell, item.model))
        readings = []
        for reading in item.readings:
            if item.choice is None or () in reading:
                (score,) = reading.values()
                readings.append(Sides(self.choose(cell, score), self.show(cell, score)))
            else:
                best = self.winner(cell, item.choice)
                scores = [
                    reading[candidate] for candidate in self.plan.choices[item.choice].candidates
                ]
                choosing = picked([self.choose(cell, score) for score in scores], best)
                readings.append(
                    Sides(choosing, picked([self.show(cell, score) for score in scores], best))
                )
        return reduce_sides("mean", readings)

    def winner(self, cell: Cell, name: str) -> Any:
        """Return the number of the best candidate of a choice, in each column."""
        key = cell.row, cell.column, name
        if key not in self.winners:
            choice = self.plan.choices[name]
            means = []
            for scores in choice.candidates.values():
                means.append(choice.sign * average([self.choose(cell, score) for score in scores]))
            self.winners[key] = largest(means)
        return self.winners[key]


def reduce_sides(how: str, parts: Sequence[Sides]) -> Sides:
    """Return the mean of some parts, or the largest (max) or least (min) of them by what choices
    use.
    """
    choosing, shown = [part.choosing for part in parts], [part.shown for part in parts]
    if how == "mean" or len(parts) == 1:
        return Sides(average(choosing), average(shown))
    sign = 1 if how == "max" else -1
    columns = choosing[0].shape[-1]
    best = largest([sign * part.reshape(-1, columns).mean(axis=0) for part in choosing])
    return Sides(picked(choosing, best), picked(shown, best))


def average(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of several rows; of single numbers exactly rounded."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    if all(part.size == 1 for part in parts):
        return np.full_like(parts[0], statistics.fmean(part.item() for part in parts))
    mean: np.ndarray = np.mean(np.broadcast_arrays(*parts), axis=0)
    return mean


def picked(parts: Sequence[np.ndarray], best: np.ndarray) -> np.ndarray:
    """Return the part that is best, in each column if there is a choice for each."""
    import numpy as np

    if len(best) == 1:
        return parts[best[0]]
    return np.stack(parts)[best, np.arange(len(best))]


def by_level(
    levels_at: Sequence[Mapping[str, Any]], rows: Sequence[np.ndarray], axes: Sequence[str]
) -> np.ndarray:
    """Return (levels of each axis ..., columns) of rows at values of the axes."""
    import numpy as np

    if not axes:
        (row,) = rows
        return row
    levels = [
        list(dict.fromkeys(at[axis] for at in levels_at if axis in at)) or [None] for axis in axes
    ]
    array = np.full((*map(len, levels), len(rows[0])), np.nan)
    for at, row in zip(levels_at, rows, strict=True):
        place = [values.index(at.get(axis)) for axis, values in zip(axes, levels, strict=True)]
        array[tuple(place)] = row
    return array
