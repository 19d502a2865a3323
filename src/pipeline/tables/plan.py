"""The plan of a table: runs, scores, choices, and how each cell is reduced from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeline.benchmarks import difference_parts, lower_is_better, primary_metric
from pipeline.config.harness_tasks import task_of_option
from pipeline.tables.run_specs import At, Spec
from pipeline.tables.schema import Table
from pipeline.tables.words import Axes

ROWS_CHANGED = re.compile(
    r"rows_changed\.(attention|feed_forward|all)\.\d+-\d+(,\d+-\d+)*"
)  # a fact of analyses
Candidate = tuple[
    Any, ...
]  # a value of each axis that a choice is over; () where nothing is chosen
Published = tuple[str, str, str]  # where a number is published: table, row and column


class ScoreWords(dict[str, Any]):
    """What a score is of: eval, task, eval.KEY ..., sorted.

    Never changed, so that a score can be a key.
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


@dataclass(frozen=True)
class ScoreRef:
    """A scoring run: one model (a spec, or a Chosen), one task, one language."""

    model: str
    words: ScoreWords
    language: str


def task_of(score: ScoreRef) -> str:
    return str(score.words.get("task") or task_of_option(str(score.words["eval"])))


def difference_of(score: ScoreRef, metric: str | None) -> tuple[str, ScoreRef] | None:
    """(measure, the score whose measure is subtracted) if a metric is a difference, such as
    reading; else None.
    """
    parts = None
    if metric and "task" in score.words:
        parts = difference_parts(str(score.words["task"]), metric)
    if parts is None:
        return None
    measure, task = parts
    return measure, replace(score, words=ScoreWords({**score.words, "task": task}))


def another_number(score: ScoreRef, metric: str | None, pair: str | None) -> str:
    """Return the setting by which a cell shows another number than a choice compares, or "".

    That is a metric other than the primary one, or one direction of a translation. It is refused:
    the report repeats a choice by what the cell shows, and could show a candidate that was not
    chosen.
    """
    if metric is not None and metric != primary_metric(task_of(score))[0]:
        return f"metric: {metric}"
    if pair is None:
        return ""
    return f"pair: {pair}"


@dataclass
class Choice:
    """The best value of some axes of a run: the one with the largest mean over its scores, the
    first of equal ones; the least one of scores of which less is better.
    """

    key: str
    run: str
    axes: Axes
    at: At
    candidates: dict[Candidate, tuple[ScoreRef, ...]]

    @cached_property
    def sign(self) -> int:
        """What makes the best mean the largest: -1 where less is better."""
        if any(
            lower_is_better(task_of(score))
            for scores in self.candidates.values()
            for score in scores
        ):
            return -1
        return 1


@dataclass
class Chosen:
    """A model that is known once its choice is made: candidate -> spec.

    A spec that nothing else names is computed only if it wins.
    """

    key: str
    choice: str
    models: dict[Candidate, str]


@dataclass
class Item:
    """One number under a cell: the mean over `readings`, one per language.

    A reading has a score for each candidate of `choice`, of which the winner's counts and the
    others are shown next to it; or one score under (), where nothing is chosen or only the Chosen
    model is scored.
    """

    at: At
    readings: tuple[dict[Candidate, ScoreRef], ...] = ()
    choice: str | None = None
    model: str | None = None  # for a fact or a figure, which is not scored: the spec that holds it


@dataclass
class Cell:
    """Items, reduced step by step: mean, max or min over these axes.

    `of`: the rows that it is reduced over instead.
    """

    row: str
    column: str
    items: list[Item] = field(default_factory=list)
    reduce: tuple[tuple[str, Axes], ...] = ()
    of: tuple[str, ...] = ()
    metric: str | None = None
    pair: str | None = None
    fact: str | None = None
    published: Published | None = None


@dataclass
class TablePlan:
    """A table's specs, choices, scores and cells. specs: parents first.

    Empty places are not in `cells`.
    """

    table: Table
    specs: dict[str, Spec]
    choices: dict[str, Choice] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    scores: list[ScoreRef] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    compare: list[tuple[str, str]] = field(default_factory=list)  # of columns, or of rows
    controls: list[tuple[str, str]] = field(
        default_factory=list
    )  # (merge, its control), as in compare
    unprinted: list[Published] = field(
        default_factory=list
    )  # rows and columns that a published table lacks
    notes: list[str] = field(default_factory=list)  # what is to be known of `every`
    trainings: dict[str, frozenset[str]] = field(
        default_factory=dict
    )  # model -> the trainings in it, once asked for
