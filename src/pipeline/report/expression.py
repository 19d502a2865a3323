"""A cell as an expression over its lines, each a score behind the cell.

`evaluate` computes a cell from a row of numbers for each line's score. If each row is one mean, the
result is the cell's value. If each row has the answers, the result is by question. If each row has
means of halves or of draws, the result is the bootstrap of the cell, which repeats each choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.stats.statistics import largest
from pipeline.tables.plan import Candidate, Cell, Item, TablePlan

if TYPE_CHECKING:
    import numpy as np

# a score (or the spec that recorded a fact), and the pair of languages that a cell shows
Key = tuple[Any, str | None]
Values = Callable[[Any], "np.ndarray"]  # the score of a line -> its row
Axes = tuple[tuple[str, Any], ...]  # the values of some axes
Part = tuple[Mapping[str, Any], "np.ndarray"]  # a row at values of axes


# --- lines ---


class ScoreLine(NamedTuple):
    """A score behind a cell.

    Attributes:
        cell: The cell that shows it.
        candidate: Of an open choice, otherwise empty.
        score: A ScoreRef, or the spec that recorded a fact.
    """

    cell: Cell
    item: Item
    place: int
    candidate: Candidate
    score: Any


def lines_of(cells: Iterable[Cell]) -> list[ScoreLine]:
    """Return the lines behind some cells, for all candidates of a choice."""
    lines = []
    for cell in cells:
        for item in cell.items:
            if item.model is not None:
                lines.append(ScoreLine(cell, item, 0, (), item.model))
            for place, reading in enumerate(item.readings):
                for candidate, score in reading.items():
                    lines.append(ScoreLine(cell, item, place, candidate, score))
    return lines


def scores_of(plan: TablePlan, cells: Iterable[Cell]) -> list[Key]:
    """Return the scores that cells show, and the scores that choose them, each with its pair."""
    keys: dict[Key, None] = {}
    for line in lines_of(cells):
        pair = line.cell.pair
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


def is_plain_mean(cell: Cell) -> bool:
    """Return True if a cell is a plain mean of its answers."""
    if any(how != "mean" for how, _ in cell.reduce):
        return False
    return not any(map(is_open_choice, cell.items))


# --- expressions ---


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
    evaluation = Evaluation(plan, choose, show, keep)
    return evaluation.of(cell)[..., evaluation.columns :]


@dataclass
class Evaluation:
    """One evaluation of a cell, as in `evaluate`.

    A row has the columns that choices use, and then the columns that are shown.

    Attributes:
        columns: The number of columns that choices use.
        winners: The best candidate of each choice, because many items share a choice.
    """

    plan: TablePlan
    choose: Values
    show: Values
    keep: Sequence[str]
    columns: int = 0
    winners: dict[str, Any] = field(default_factory=dict)

    def of(self, cell: Cell) -> np.ndarray:
        parts: list[Part] = [(item.at, self.of_item(item)) for item in cell.items]
        for how, axes in cell.reduce:
            groups: dict[Axes, list[np.ndarray]] = {}
            for at, row in parts:
                others = []
                for axis, value in at.items():
                    if axis not in axes or axis in self.keep:
                        others.append((axis, value))
                groups.setdefault((*others,), []).append(row)
            parts = []
            for group, rows in groups.items():
                parts.append((dict(group), reduce_rows(how, rows, self.columns)))
        return by_level(parts, self.keep)

    def of_item(self, item: Item) -> np.ndarray:
        """Return the mean over the readings of an item, each for the chosen candidate."""
        if item.model is not None:
            return self.row(item.model)
        readings = []
        for reading in item.readings:
            if item.choice is None or () in reading:
                (score,) = reading.values()
                readings.append(self.row(score))
                continue
            candidates = self.plan.choices[item.choice].candidates
            rows = [self.row(reading[candidate]) for candidate in candidates]
            readings.append(picked(rows, self.winner(item.choice), self.columns))
        return average(readings)

    def row(self, score: Any) -> np.ndarray:
        import numpy as np

        choosing = self.choose(score)
        self.columns = len(choosing)
        return np.concatenate([choosing, self.show(score)])

    def winner(self, name: str) -> Any:
        """Return the number of the best candidate of a choice, in each column."""
        if name not in self.winners:
            choice = self.plan.choices[name]
            means = []
            for scores in choice.candidates.values():
                rows = [self.choose(score) for score in scores]
                means.append(choice.sign * average(rows))
            self.winners[name] = largest(means)
        return self.winners[name]


def reduce_rows(how: str, rows: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Return the mean of some rows, or the row with the largest (max) or smallest (min) value.

    The value is the mean of the first `columns`, in each of them if there are several.
    """
    if how == "mean" or len(rows) == 1:
        return average(rows)
    sign = 1 if how == "max" else -1
    means = []
    for row in rows:
        means.append(sign * row[..., :columns].reshape(-1, columns).mean(axis=0))
    return picked(rows, largest(means), columns)


def average(rows: Sequence[np.ndarray]) -> np.ndarray:
    import numpy as np

    if len(rows) == 1:
        return rows[0]
    mean: np.ndarray = np.mean(np.broadcast_arrays(*rows), axis=0)
    return mean


def picked(rows: Sequence[np.ndarray], best: np.ndarray, columns: int) -> np.ndarray:
    """Return the best row, in each of `columns` if each has a choice."""
    import numpy as np

    if columns == 1:
        return rows[best[0]]
    chosen = np.tile(best, 2)  # for the columns that choices use, and those that are shown
    return np.stack(rows)[chosen, np.arange(2 * columns)]


def by_level(parts: Sequence[Part], axes: Sequence[str]) -> np.ndarray:
    """Return rows at values of the axes as one array (levels of each axis ..., columns)."""
    import numpy as np

    if not axes:
        ((_, row),) = parts
        return row
    levels = []
    for axis in axes:
        distinct = dict.fromkeys(at[axis] for at, _ in parts if axis in at)
        levels.append(list(distinct) or [None])
    array = np.full((*map(len, levels), len(parts[0][1])), np.nan)
    for at, row in parts:
        place = []
        for axis, values in zip(axes, levels, strict=True):
            place.append(values.index(at.get(axis)))
        array[tuple(place)] = row
    return array
