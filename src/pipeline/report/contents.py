"""What a report is made of: a table's runs as they were found, its cells, and the scores of its evaluations.

All but the folders is plain data, which an archive carries (report/archive.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.stages import Report
from pipeline.evaluate.records import ScoreRow
from pipeline.report.claims import Verdict

TRAININGS = ("sft", "cpt")


@dataclass(frozen=True)
class CellResult:
    """A model (`row`) evaluated for one language and seed: the evaluation that scores it, finished or not.

    `name`, `folder`: of the evaluation, which rows may share.
    """

    row: str
    language: str
    seed: int
    name: str
    folder: Path


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
class TableCell:
    """A place of the table as its YAML defines it: the number measured, its 95 % interval where there is one, and what
    the paper prints. `n`: numbers that it was reduced from; `runs`: the names of those that these were read from.

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
    """What the table stage gathered. `rows`: in the table's order; `seconds`: of all finished runs behind the table.

    `failed`: tried, and failed; `missing`: never tried. `roles`: row -> base, expert or merge, of rows whose names do
    not say it. `over`: the axes that stand as seeds, where these are not the seeds alone; `sampled`: the axes of three
    trainings or more whose variance intervals include. `selected`: rows of
    configurations chosen by the scores shown. `table_rows`,
    `table_columns`, `table_cells`: the table itself; `choices`: what its `best` chose.
    `contrasts`: what its `compare` measured, a line of contrasts.csv each; `verdicts`: on what is claimed of it.
    `base_tolerance`: points by which an untrained model may differ from its published score.
    `linked`: whether the folders of runs are where the page can lead to.
    """

    table: str
    title: str
    note: str
    command: str
    languages: Sequence[str]
    seeds: Sequence[int]
    rows: Sequence[str]
    cells: Sequence[CellResult] = ()
    runs: Sequence[RunResult] = ()
    failed: Sequence[FailedRun] = ()
    missing: Sequence[FailedRun] = ()
    seconds: float = 0.0
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    over: Sequence[str] = ()
    sampled: Sequence[str] = ()
    selected: Sequence[str] = ()
    table_rows: Sequence[str] = ()
    table_columns: Sequence[str] = ()
    table_cells: Sequence[TableCell] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    contrasts: Sequence[Mapping[str, Any]] = ()
    verdicts: Sequence[Verdict] = ()
    links: Sequence[Link] = ()
    base_tolerance: float = Report.base_tolerance
    linked: bool = True

    @property
    def finished(self) -> int:
        """Cells that have what they show: the table's own, or where it has none, the evaluations."""
        own = sum(cell.value is not None for cell in self.table_cells)
        return own or sum((cell.folder / "scores.json").is_file() for cell in self.cells)

    @property
    def trainings(self) -> list[RunResult]:
        return [run for run in self.runs if run.stage in TRAININGS and run.finished]

    @property
    def evaluations(self) -> dict[str, RunResult]:
        """Those that are finished, by name; of a cell without a record of its run, what the cell says."""
        found = {cell.name: RunResult(cell.name, "eval", cell.folder) for cell in self.cells}
        found |= {run.name: run for run in self.runs if run.stage == "eval"}
        return {name: run for name, run in found.items() if (run.folder / "scores.json").is_file()}


@dataclass(frozen=True, kw_only=True)
class Score(ScoreRow):
    """A score row placed in a table. `target`: the language the model was made for; `eval`: the run that scored it.

    `label`: its column's title. `primary`: whether the table shows it.
    """

    row: str
    target: str
    seed: int
    eval: str
    label: str
    primary: bool

    def as_json(self) -> dict[str, Any]:
        found = super().as_json()
        del found["label"]
        return found
