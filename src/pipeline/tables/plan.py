"""The plan of a table: its runs, scores and choices, and how cells are reduced from them."""

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

# a fact of analyses
ROWS_CHANGED = re.compile(r"rows_changed\.(attention|feed_forward|all)\.\d+-\d+(,\d+-\d+)*")
Candidate = tuple[Any, ...]  # a value of each axis of a choice; () without a choice
Published = tuple[str, str, str]  # the table, row and column of a published number


class ScoreWords(dict[str, Any]):
    """The settings of a score: eval, task, eval.KEY ..., sorted.

    They are never changed, so that a score can be a key.
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
    task = score.words.get("task")
    if task:
        return str(task)
    return str(task_of_option(str(score.words["eval"])))


def difference_of(score: ScoreRef, metric: str | None) -> tuple[str, ScoreRef] | None:
    """Return the measure and the score that are subtracted, if a metric is a difference.

    An example is `reading`. None for other metrics.
    """
    if not metric or "task" not in score.words:
        return None
    parts = difference_parts(str(score.words["task"]), metric)
    if parts is None:
        return None
    measure, task = parts
    return measure, replace(score, words=ScoreWords({**score.words, "task": task}))


def another_number(score: ScoreRef, metric: str | None, pair: str | None) -> str:
    """Return the setting of a cell whose number a choice does not compare, or "".

    The setting is a metric other than the primary one, or a direction of a translation. It is
    refused, because the report repeats a choice by the number that the cell shows. It could then
    show a candidate that was not chosen.
    """
    if metric is not None and metric != primary_metric(task_of(score))[0]:
        return f"metric: {metric}"
    if pair is None:
        return ""
    return f"pair: {pair}"


@dataclass
class Choice:
    """The best value of some axes of a run.

    It has the largest mean over its scores, or the smallest if less is better. Ties choose the
    first.
    """

    key: str
    run: str
    axes: Axes
    at: At
    candidates: dict[Candidate, tuple[ScoreRef, ...]]

    @cached_property
    def sign(self) -> int:
        """The sign that makes the best mean the largest: -1 if less is better."""
        for scores in self.candidates.values():
            if any(lower_is_better(task_of(score)) for score in scores):
                return -1
        return 1


@dataclass
class Chosen:
    """A model that is known after its choice: candidate -> spec.

    A spec that is not named elsewhere is computed only if it wins.
    """

    key: str
    choice: str
    models: dict[Candidate, str]


@dataclass
class Item:
    """One number under a cell: the mean over `readings`, one per language.

    A reading has a score for each candidate of `choice`. The winner's score counts, and the others
    are shown next to it. If there is no choice, or only the Chosen model is scored, a reading has a
    single score under ().

    Attributes:
        model: The spec of a fact or a figure, which is not scored.
    """

    at: At
    readings: tuple[dict[Candidate, ScoreRef], ...] = ()
    choice: str | None = None
    model: str | None = None


@dataclass
class Cell:
    """Items that are reduced step by step.

    Attributes:
        reduce: The steps: mean, max or min over these axes.
    """

    row: str
    column: str
    items: list[Item] = field(default_factory=list)
    reduce: tuple[tuple[str, Axes], ...] = ()
    metric: str | None = None
    pair: str | None = None
    fact: str | None = None
    published: Published | None = None


@dataclass
class TablePlan:
    """A table's specs, choices, scores and cells.

    Attributes:
        specs: Parents come first.
        cells: Without empty places.
        compare: Pairs of columns, or of rows.
        controls: Pairs of a merge and its control, as in `compare`.
        trainings: model -> the trainings behind it, cached.
    """

    table: Table
    specs: dict[str, Spec]
    choices: dict[str, Choice] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    scores: list[ScoreRef] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    compare: list[tuple[str, str]] = field(default_factory=list)
    controls: list[tuple[str, str]] = field(default_factory=list)
    trainings: dict[str, frozenset[str]] = field(default_factory=dict)
