"""The place of a cell: a row and a column at one value of each axis, and their settings."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from pipeline.tables.run_specs import At
from pipeline.tables.schema import Side, Table
from pipeline.tables.words import Axes, Words


class Entry(NamedTuple):
    """A row or column at one value of each axis in its name."""

    side: Side
    name: str
    at: At


class Place:
    """The settings of one cell.

    The row's words override the column's, and these override `score`.
    """

    def __init__(self, table: Table, row: Entry, column: Entry) -> None:
        self.key = (row.name, column.name)
        self.row = row.side
        self.sides = (row.side, column.side, table.score)
        self.where = f"row {row.name!r}, column {column.name!r}"
        self.refuse = partial(table.refuse, self.where)
        shared = row.at.keys() & column.at.keys()
        self.meet = all(row.at[axis] == column.at[axis] for axis in shared)
        self.at = {**table.score.at, **column.at, **row.at}
        self.words: Words = {**table.score.words, **column.side.words, **row.side.words}
        self.reduce: list[tuple[str, Axes]] = []
        chooser = Side("")
        for side in reversed(self.sides):
            if side.reduce:
                self.reduce = side.reduce
            if side.best:
                chooser = side
        self.best, self.each = chooser.best, chooser.each
        self.by = chooser.by or Side("")
        self.choosing: Words = scoring_words({**table.score.words, **self.by.words})
        self.control: Side | None = None
        for side in (column.side, row.side):
            if side.control_of:
                self.control = side


class Reduction(NamedTuple):
    """The open axes of a cell: its items' axes, the axes of a choice, and the steps of means."""

    free: list[str]
    best: Axes
    steps: tuple[tuple[str, Axes], ...]


def scoring_words(words: Words) -> Words:
    """Return the words of a cell that set its task, its evaluation and its language."""
    names = ("eval", "task", "in", "data_root", "where_possible")
    scoring = {}
    for key, value in words.items():
        if key in names or key.startswith("eval."):
            scoring[key] = value
    return scoring
