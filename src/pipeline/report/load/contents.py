"""Input of a report: a table's cells and the runs behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.evaluate.records import ScoreRow
from pipeline.report.claims import Verdict
from pipeline.report.load.answers import Answers, Evaluation, Place


@dataclass(frozen=True)
class RunResult:
    """A run behind the table, as its manifest records it.

    Attributes:
        reason: Why it is missing.
        stale: Why it has to be recomputed, or "".
        model: The model that it scored or started from.
        parents: role -> name.
        config: Settings with non-default values, by dotted names.
    """

    name: str
    stage: str
    folder: Path
    finished: bool = True
    reason: str = ""
    stale: str = ""
    warnings: Sequence[str] = ()
    model: str = ""
    parents: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    attempt: int = 1
    started: str = ""
    weights_root: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellScore:
    """An evaluation behind a cell.

    Attributes:
        run: Its run.
        at: The values of the table's axes.
        rows: The scores that the cell shows.
    """

    run: str
    at: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[ScoreRow] = ()


@dataclass(frozen=True)
class CellResult:
    """A cell of the table, with its number, the number's 95 % interval, and the published number.

    Attributes:
        n: How many numbers it is reduced from.
        missing: Why it has no number.
        runs: The names of the runs that provide its numbers.
        digits: The decimals to show; a loss has more than a score.
        maximum: The score of a best configuration on the questions that chose it, as the papers
            report it. `value` is then its split-half estimate, or the maximum if there is no
            estimate.
        scores: The evaluations behind it.
        task: The task of these scores; "" if the number is a fact that runs recorded.
        pair: The pair of languages; None for both directions.
        best: True if it is the best of its place, and significantly better than each model that it
            is compared with.
        marks: The signs of the baselines that it significantly exceeds.
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
    digits: int = 1
    maximum: float | None = None
    scores: Sequence[CellScore] = ()
    task: str = ""
    pair: str | None = None
    best: bool = False
    marks: str = ""

    def decimal(self, value: float | None) -> str:
        """Return a number of the cell's scale, with the decimals that the cell shows."""
        if value is None:
            return ""
        return f"{value:.{self.digits}f}"


class ScoreBehind(NamedTuple):
    """A score behind a cell's number, with its evaluation."""

    cell: CellResult
    score: CellScore
    row: ScoreRow

    @property
    def place(self) -> Place:
        return self.score.run, self.row.task, self.row.where


@dataclass(frozen=True)
class Results:
    """A table's results.

    Attributes:
        rows: The names of the rows, in the table's order.
        columns: The names of the columns.
        failed: run -> why it failed.
        missing: run -> why it was never started.
        sampled: Axes with at least three trainings; intervals include their variance.
        choices: The winners of the table's `best` rules.
        contrasts: The lines of contrasts.csv.
        primary: Left, right and place of the primary comparison.
        baselines: name -> the mark of cells that exceed it.
        verdicts: The verdicts on the claims about the table.
        evaluations: The finished evaluations, by name.
        answers: Their answers.
        parquet: The bytes of answers.parquet.
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
    sampled: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    contrasts: Sequence[Mapping[str, Any]] = ()
    primary: Sequence[str] = ()
    baselines: Mapping[str, str] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    answers: Mapping[Place, Answers] = field(default_factory=dict)
    parquet: bytes = b""

    @property
    def by_place(self) -> dict[tuple[str, str], CellResult]:
        """Each cell by its row and column."""
        return {(cell.row, cell.column): cell for cell in self.cells}

    @property
    def finished(self) -> int:
        """The number of cells with a value."""
        return sum(cell.value is not None for cell in self.cells)


def score_rows_of(cells: Iterable[CellResult]) -> list[ScoreBehind]:
    """Return the score rows behind each cell's number, from each of its finished evaluations."""
    behind = []
    for cell in cells:
        for score in cell.scores:
            for row in score.rows:
                behind.append(ScoreBehind(cell, score, row))
    return behind
