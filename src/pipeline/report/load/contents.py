"""What a report is made of: a table's cells, and the runs behind them as they were found.

All but the folders is plain data, which an archive carries (report/load/archive.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.stages import Report
from pipeline.report.stats.claims import Verdict

TRAININGS = ("sft", "cpt")


@dataclass(frozen=True)
class RunResult:
    """A run behind the table, as its manifest records it. `label`: what its seeds have in common.

    `config`: knobs that are not at their defaults, by dotted names; `model`: what it scored or started from; `card`:
    the data run whose card describes its rows; `unlike`: how it was made otherwise than most runs of its stage;
    `warnings`: what it warned of; `stale`: why what is shown may not be what was made; `reason`: why it is not there.
    """

    name: str
    stage: str
    folder: Path
    label: str = ""
    finished: bool = True
    reason: str = ""
    stale: str = ""
    unlike: Sequence[str] = ()
    warnings: Sequence[str] = ()
    model: str = ""
    card: str = ""
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
    """An evaluation behind a cell: its run, and the values of the table's axes."""

    run: str
    at: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CellResult:
    """A cell of the table as its YAML defines it: the number measured, its 95 % interval where there is one, and what
    the paper prints. `n`: numbers that it was reduced from; `runs`: the names of those that these were read from.

    `scores`: the evaluations behind it; `task`, `metric`, `pair` (null: both directions): what is read of them, empty
    where the number is a fact that runs recorded. `role`: base, expert or merge, of the model scored;
    `best`: significantly above each other model in the same place, after Holm's correction over them.
    `maximum`: of a best configuration, the score on the questions that chose it, as the papers report it; `value` is
    then its split-half estimate, or the maximum again where there is none. `base`: of untrained models alone;
    `experts`: points by which another set of experts may differ (95 %), where the cell is reduced over several."""

    row: str
    column: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    published: float | None = None
    base: bool = False
    experts: float | None = None
    suspect: str | None = None
    missing: str = ""
    runs: Sequence[str] = ()
    digits: int = 1  # that a reader wants: a loss has more than a score
    maximum: float | None = None
    scores: Sequence[CellScore] = ()
    task: str = ""
    metric: str = ""
    pair: str | None = None
    role: str = ""
    best: bool = False

    @property
    def as_published(self) -> float | None:
        """The number by the papers' method, which theirs is compared with."""
        return self.value if self.maximum is None else self.maximum


@dataclass(frozen=True)
class FailedRun:
    """A run that the table needs and that is not there, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Link:
    """Another page that belongs to this one: a sweep over its experts. `address`: relative to the reports' folder."""

    title: str
    address: str


@dataclass(frozen=True)
class Results:
    """A table's results. `rows`, `columns`: their names in the table's order; `cells`: what stands where they meet.

    `seconds`: of all finished runs behind the table; `failed`: tried, and failed; `missing`: never tried. `sampled`:
    the axes of three trainings or more, whose variance intervals include. `choices`: what its `best` chose.
    `contrasts`: a line of contrasts.csv each; `declared`: whether the table's `compare` names them, else they are each
    merge against the base and the best expert. `verdicts`: on what is claimed of it. `base_tolerance`: points by which
    an untrained model may differ from its published score. `linked`: whether the page can lead to the runs' folders.
    """

    table: str
    title: str
    note: str
    command: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[CellResult] = ()
    runs: Sequence[RunResult] = ()
    failed: Sequence[FailedRun] = ()
    missing: Sequence[FailedRun] = ()
    seconds: float = 0.0
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    sampled: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    contrasts: Sequence[Mapping[str, Any]] = ()
    declared: bool = True
    verdicts: Sequence[Verdict] = ()
    links: Sequence[Link] = ()
    base_tolerance: float = Report.base_tolerance
    linked: bool = True

    @property
    def by_place(self) -> dict[tuple[str, str], CellResult]:
        """Each cell by its row and column."""
        return {(cell.row, cell.column): cell for cell in self.cells}

    @property
    def finished(self) -> int:
        """Cells that have what they show."""
        return sum(cell.value is not None for cell in self.cells)

    @property
    def trainings(self) -> list[RunResult]:
        return [run for run in self.runs if run.stage in TRAININGS and run.finished]

    @property
    def evaluations(self) -> dict[str, RunResult]:
        """The finished ones, by name."""
        return {run.name: run for run in self.runs if run.stage == "eval" and (run.folder / "scores.json").is_file()}
