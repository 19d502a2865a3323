"""What a report is made of: a table's runs as they were found, and the scores of their evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.evaluate.records import ScoreRow


@dataclass(frozen=True)
class CellResult:
    """One row of a table for one language and seed: the evaluation that scores it, finished or not.

    `name`, `folder`: of the evaluation, which rows may share. `manifest_warnings`: how its making differs from here.
    """

    row: str
    language: str
    seed: int
    name: str
    folder: Path
    checkpoint: Path | None = None
    seconds: float | None = None
    manifest_warnings: Sequence[str] = ()


@dataclass(frozen=True)
class TrainingResult:
    """A finished training. `label`: what its seeds have in common."""

    label: str
    name: str
    folder: Path


@dataclass(frozen=True)
class FailedRun:
    """A run that the table needs and that is not there, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Results:
    """What the table stage gathered. `rows`: in the table's order; `seconds`: of all finished runs behind the table.

    `roles`: row -> base, expert or merge, of rows whose names do not say it.
    """

    table: str
    title: str
    note: str
    command: str
    languages: Sequence[str]
    seeds: Sequence[int]
    rows: Sequence[str]
    cells: Sequence[CellResult] = ()
    trainings: Sequence[TrainingResult] = ()
    failed: Sequence[FailedRun] = ()
    seconds: float = 0.0
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


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
