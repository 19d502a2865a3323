"""Input of a report: a table's cells and the runs behind them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.evaluate.records import ScoreRow
from pipeline.report.claims import Verdict
from pipeline.report.load.answers import Answers, Evaluation, Place
from pipeline.tables.schema import TRAININGS
from pipeline.text import first_few

MOST_MERGES = 2  # that are named of a row


@dataclass(frozen=True)
class RunResult:
    """A run behind the table, as its manifest records it. `label`: the name that its seeds share.

    `config`: knobs with non-default values, by dotted names; `model`: the model that it scored or
    started from; `merge`: what the merge that it scored does, in the layers of its model;
    `warnings`: its warnings; `stale`: why its files may have changed since; `reason`: why it is
    missing.
    """

    name: str
    stage: str
    folder: Path
    label: str = ""
    finished: bool = True
    reason: str = ""
    stale: str = ""
    warnings: Sequence[str] = ()
    model: str = ""
    merge: str = ""
    parents: Mapping[str, str] = field(default_factory=dict)  # role -> name
    config: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    attempt: int = 1
    started: str = ""
    weights_root: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellScore:
    """An evaluation behind a cell: its run, the values of the table's axes, and the scores that the
    cell shows.
    """

    run: str
    at: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[ScoreRow] = ()


@dataclass(frozen=True)
class CellResult:
    """A cell of the table as its YAML defines it: the measured number, its 95 % interval if there
    is one, and the published number. `n`: how many numbers it is reduced from; `runs`: the names of
    the runs that provide them.

    `scores`: the evaluations behind it; `task`, `metric`, `pair` (null: both directions): the
    scores read from them, empty if the number is a fact that runs recorded. `role`: of the scored
    model, base, expert or merge; `best`: significantly above each other model in the same place,
    after Holm's correction over them. `maximum`: the score of a best configuration on the questions
    that chose it, as the papers report it; `value` is then its split-half estimate, or the maximum
    if there is none.
    """

    row: str
    column: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    published: float | None = None
    suspect: str | None = None
    missing: str = ""
    runs: Sequence[str] = ()
    digits: int = 1  # decimals to show: a loss has more than a score
    maximum: float | None = None
    scores: Sequence[CellScore] = ()
    task: str = ""
    metric: str = ""
    pair: str | None = None
    role: str = ""
    best: bool = False
    marks: str = ""  # of the baselines that it is significantly better than

    def decimal(self, value: float | None) -> str:
        """Write a number of the cell's own scale, with the decimals that it shows."""
        if value is None:
            return ""
        return f"{value:.{self.digits}f}"


class ScoreBehind(NamedTuple):
    """A score behind a cell's number, with the evaluation that it is from."""

    cell: CellResult
    score: CellScore
    row: ScoreRow

    @property
    def place(self) -> Place:
        return self.score.run, self.row.task, self.row.where


@dataclass(frozen=True)
class Results:
    """A table's results. `rows`, `columns`: their names in the table's order; `cells`: its cells.

    `failed`: run -> why it failed; `missing`: run -> why it was never started. `computed`: title ->
    sentences on how the numbers were computed; `other_bases`: sentences on adapters that were
    scored on another base than the one that they name. `sampled`: axes with at least three
    trainings, whose variance intervals include. `choices`: winners of its `best` rules.
    `contrasts`: lines of contrasts.csv; `declared`: whether they come from the table's `compare`,
    else they are each merge against the base and the best expert; `primary`: left, right and place
    of the one that is named first. `verdicts`: on the claims about it. `evaluations`: the finished
    ones, by name; `answers`: theirs; `parquet`: the bytes of answers.parquet.
    """

    table: str
    title: str
    note: str
    command: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[CellResult] = ()
    runs: Sequence[RunResult] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    other_bases: Sequence[str] = ()
    sampled: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    contrasts: Sequence[Mapping[str, Any]] = ()
    declared: bool = True
    primary: Sequence[str] = ()
    baselines: Mapping[str, str] = field(
        default_factory=dict
    )  # name -> the mark of cells that are better
    verdicts: Sequence[Verdict] = ()
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    answers: Mapping[Place, Answers] = field(default_factory=dict)
    parquet: bytes = b""

    @property
    def by_place(self) -> dict[tuple[str, str], CellResult]:
        """Each cell by its row and column."""
        return {(cell.row, cell.column): cell for cell in self.cells}

    @property
    def merged(self) -> list[str]:
        """What the merges of the table do, each after the row (or column) that has it."""
        of_run = {}
        for run in self.runs:
            if run.merge:
                of_run[run.name] = run.merge
        texts_by_side: dict[str, dict[str, dict[str, None]]] = {"row": {}, "column": {}}
        for cell in self.cells:
            for side, names in texts_by_side.items():
                texts = names.setdefault(getattr(cell, side), {})
                for name in cell.runs:
                    if name in of_run:
                        texts[of_run[name]] = None
        shorter = min(texts_by_side.values(), key=lambda names: sum(map(len, names.values())))
        return [
            f"{name}: {'; '.join(first_few(list(texts), MOST_MERGES))}"
            for name, texts in shorter.items()
            if texts
        ]

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a training; 0 without trainings."""
        labels = set()
        for run in self.runs:
            if run.stage in TRAININGS and run.finished:
                labels.add(run.label)
        return max(Counter(re.sub(r"-s\d+$", "", label) for label in labels).values(), default=0)

    @property
    def languages_of_primary(self) -> list[str]:
        """The columns (or rows) that have the task of the primary comparison, each in a
        language.
        """
        tasks = {}
        for cell in self.cells:
            for place in (cell.row, cell.column):
                tasks[place] = cell.task
        found = []
        for place in tasks:
            if self.primary and tasks[place] == tasks.get(self.primary[2]):
                found.append(place)
        return found

    @property
    def finished(self) -> int:
        """Number of cells with a value."""
        return sum(cell.value is not None for cell in self.cells)


def score_rows_of(cells: Iterable[CellResult]) -> list[ScoreBehind]:
    """Yield the score rows behind the number of each cell, from each of its finished
    evaluations.
    """
    found = []
    for cell in cells:
        for score in cell.scores:
            for row in score.rows:
                found.append(ScoreBehind(cell, score, row))
    return found
