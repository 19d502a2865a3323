"""What a table comes to: runs, scores, choices, and how each cell is reduced from them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.tables.run_specs import At, Ref, Spec
from pipeline.tables.schema import Table

ROWS_CHANGED = re.compile(r"rows_changed\.(attention|feed_forward|all)\.\d+-\d+(,\d+-\d+)*")  # a fact of analyses
Candidate = tuple[Any, ...]  # a value of each axis that a choice is over; () where nothing is chosen
Published = tuple[str, str, str]  # where a published number stands: table, row and column


class Pairs(tuple[tuple[str, Any], ...]):
    """A mapping as the words of a score hold it, which are compared and hashed."""


@dataclass(frozen=True)
class ScoreRef:
    """A scoring run: one model (a spec, or what is Chosen), one task, one language. words: eval, task, eval.KEY ..."""

    model: str
    words: tuple[tuple[str, Any], ...]
    language: str

    def refs(self) -> Iterator[Ref]:
        yield from (value for _, value in self.words if isinstance(value, Ref))


@dataclass
class Choice:
    """The best value of some axes of a run: that of the largest mean over its scores, the first of equals."""

    key: str
    run: str
    axes: tuple[str, ...]
    at: At
    candidates: dict[Candidate, tuple[ScoreRef, ...]]


@dataclass
class Chosen:
    """A model that is known once its choice is made: candidate -> spec.

    A spec that nothing else names need not be made before, and only if it wins.
    """

    key: str
    choice: str
    models: dict[Candidate, str]


@dataclass
class Item:
    """One number under a cell: the mean over `readings`, one a language.

    A reading has a score for each candidate of `choice`, of which the winner's counts and the others stand beside it;
    or one score under (), where nothing is chosen or only what is Chosen is scored.
    """

    at: At
    readings: tuple[dict[Candidate, ScoreRef], ...] = ()
    choice: str | None = None
    model: str | None = None  # of a fact or a figure, which nothing scores: the spec that holds it


@dataclass
class Cell:
    """Items, reduced step by step: mean, max or min over these axes. `of`: the rows that it is reduced over instead."""

    row: str
    column: str
    items: list[Item] = field(default_factory=list)
    reduce: tuple[tuple[str, tuple[str, ...]], ...] = ()
    of: tuple[str, ...] = ()
    metric: str | None = None
    pair: str | None = None
    fact: str | None = None
    published: Published | None = None

    @property
    def reduced(self) -> set[str]:
        """The axes that it is reduced over."""
        return {axis for _, axes in self.reduce for axis in axes}


@dataclass
class TablePlan:
    """specs: parents first. A place of rows x columns that has no cell is not in `cells`."""

    table: Table
    specs: dict[str, Spec]
    choices: dict[str, Choice] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    scores: list[ScoreRef] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    compare: list[tuple[str, str]] = field(default_factory=list)  # of columns, or of rows
    unprinted: list[Published] = field(default_factory=list)  # rows and columns that a published table lacks
    own: dict[str, list[str]] = field(default_factory=dict)  # key of every on the command line -> what says its own


def winner(choice: Choice, values: Callable[[ScoreRef], float]) -> Candidate:
    means = {candidate: statistics.fmean(map(values, scores)) for candidate, scores in choice.candidates.items()}
    return max(means, key=means.__getitem__)


# ---------------------------------------------------------------------------------------------------- reducing

T = TypeVar("T")  # what stands for a number: one, its draws of a bootstrap, its answers question by question
Values = Callable[[Any], float]  # the number of a ScoreRef; of a spec's key, where a cell shows a fact of it
REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "max": max, "min": min}


def fold(plan: TablePlan, cell: Cell, number: Callable[[Cell, Item], T], reduce: Callable[[str, Sequence[T]], T]) -> T:
    """The number of a cell: that of each item, reduced step by step. reduce: by mean, max or min, several to one."""
    if cell.of:
        return reduce(cell.reduce[0][0], [fold(plan, plan.cells[row, cell.column], number, reduce) for row in cell.of])
    ((_, result),) = levels(cell, number, reduce)
    return result


def levels(
    cell: Cell, number: Callable[[Cell, Item], T], reduce: Callable[[str, Sequence[T]], T], keep: Sequence[str] = ()
) -> list[tuple[At, T]]:
    """What is left of a cell's items when all axes but `keep` are reduced: (values of the axes left, number)."""
    remaining = [(item.at, number(cell, item)) for item in cell.items]
    for how, axes in cell.reduce:
        groups = grouped(remaining, [axis for axis in axes if axis not in keep])
        remaining = [(at, reduce(how, numbers)) for at, numbers in groups]
    return remaining


def value(plan: TablePlan, cell: Cell, values: Values) -> float:
    """The number of a cell, given that of each score. Choices are made by `values` too, so that one draw of questions
    (a bootstrap's, the odd ones) goes through the whole table."""
    return fold(plan, cell, lambda _, item: item_value(plan, item, values), lambda how, numbers: REDUCERS[how](numbers))


def grouped(items: Sequence[tuple[Any, Any]], axes: Sequence[str]) -> list[tuple[dict[str, Any], list[Any]]]:
    """What is alike but for some axes, together: (the other axes' values, numbers)."""
    groups: dict[tuple[tuple[str, Any], ...], list[Any]] = {}
    for at, number in items:
        groups.setdefault(tuple(pair for pair in at.items() if pair[0] not in axes), []).append(number)
    return [(dict(at), numbers) for at, numbers in groups.items()]


def item_value(plan: TablePlan, item: Item, values: Values) -> float:
    """The mean over the item's readings, of what was chosen where there was a choice; or a fact."""
    if item.model is not None:
        return values(item.model)
    candidate = winner(plan.choices[item.choice], values) if item.choice else ()
    return statistics.fmean(values(reading[() if () in reading else candidate]) for reading in item.readings)
