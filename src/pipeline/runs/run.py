"""What a run is: its configuration and its parents, the hash of both, and what differs between two.

Its folder is `runs_dir/<label>-<hash>` with eight digits of the hash (twelve where another run has the same eight; the
manifest has all). Its manifest is written last, so that a folder with a manifest is finished. Work happens in
`runs_dir/.work/<hash>/<lease>`, and one atomic rename publishes it (runs/make.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pipeline.config.knob import identity
from pipeline.config.stages import RunStage
from pipeline.files import FileState
from pipeline.hub.addresses import without_credentials
from pipeline.models.identity import folder_digest
from pipeline.runs.folders import place_of
from pipeline.runs.lease import left
from pipeline.runs.manifest import snapshot_hash

LABEL_LENGTH = 110
Config = TypeVar("Config", bound=RunStage)


class Parent(Protocol):
    """What a stage needs of a parent: a run of ours, or something that no run made."""

    @property
    def hash(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class External:
    """What is there: a finished run, known by its hash; any other folder, by its content; a model on the Hub."""

    name: str
    hash: str
    folder: Path
    hub: str | None = None  # of a model on the Hub: its id, and the revision asked for, as the lock file has them


@dataclass(frozen=True)
class Folder:
    """A folder with a model that no run made, known by its content: hashed when it is first asked for."""

    folder: Path
    files: tuple[Path, ...]
    runs_dir: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def hash(self) -> str:
        return self._content[1]

    @property
    def changed(self) -> bool:
        """Whether its content is another than when it was hashed; read again only where a file was touched.

        One that is gone did not change what was read of it.
        """
        files_then, was = self._content
        if not all(path.is_file() for path in self.files) or files_then == [FileState.now(path) for path in self.files]:
            return False
        return folder_digest(self.folder, self.files, self.runs_dir) != was

    @cached_property
    def _content(self) -> tuple[list[FileState], str]:
        files_now = [FileState.now(path) for path in self.files]
        return files_now, folder_digest(self.folder, self.files, self.runs_dir)


@dataclass(frozen=True)
class Snapshot:
    """RUN@STEP of a training that is asked for, made or not."""

    run: Run
    step: int

    @property
    def hash(self) -> str:
        return snapshot_hash(self.run.hash, self.step)

    @property
    def name(self) -> str:
        return f"{self.run.name}@{self.step}"

    @property
    def folder(self) -> Path:
        return self.run.folder / "snapshots" / f"step-{self.step}"


@dataclass
class Run(Generic[Config]):
    """One run, asked for or finished. Two runs of the same hash are the same run."""

    config: Config
    label: str
    parents: dict[str, Parent] = field(default_factory=dict)
    version: int = field(kw_only=True)  # of the stage: raised when its code changes results
    lease: str | None = field(default=None, kw_only=True, compare=False)  # of who makes it, while it is made

    def __post_init__(self) -> None:
        """A label is the name of a folder and of a W&B run (128 characters at most)."""
        self.label = re.sub(r"[^\w.+-]+", "-", self.label).lstrip(".-")[:LABEL_LENGTH]

    @cached_property
    def decided_by(self) -> dict[str, Any]:
        """All that enters the hash."""
        return {
            "stage": self.config.stage,
            "version": self.version,
            "config": identity(self.config),
            "parents": {role: parent.hash for role, parent in sorted(self.parents.items())},
        }

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.decided_by, sort_keys=True).encode()).hexdigest()

    @property
    def runs_dir(self) -> Path:
        return Path(self.config.runs_dir)

    @property
    def folder(self) -> Path:
        """Where it is or will be. Asked of the disk each time: another process may have made it."""
        return place_of(self.label, self.hash, self.runs_dir)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def workplace(self) -> Path:
        """Its leases, its state, and the work folders of those who make it."""
        return self.runs_dir / ".work" / self.hash

    @property
    def work(self) -> Path:
        """Where it is made: the folder of the lease; without one, what an interrupted attempt left."""
        return self.workplace / self.lease if self.lease else left(self.workplace)


def runs_behind(parents: dict[str, Parent]) -> list[Run]:
    """The parents that are made here when they are not finished: runs, and the trainings of snapshots."""
    trainings = [parent.run if isinstance(parent, Snapshot) else parent for parent in parents.values()]
    return [parent for parent in trainings if isinstance(parent, Run)]


def recorded(config: RunStage) -> dict[str, Any]:
    """Every knob, as the manifest and W&B keep them: without the launcher, whose lines of bash may hold secrets."""
    return {key: value for key, value in asdict(config).items() if key != "launcher"}


def changes(earlier: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two runs, each by its `decided_by`: 'sft.steps 120 -> 200'."""
    old, new = flat(without_credentials(earlier)), flat(without_credentials(after))
    return [
        f"{key.removeprefix('config.')} {_short(old.get(key))} -> {_short(new.get(key))}"
        for key in sorted({**new, **old})
        if new.get(key) != old.get(key)
    ]


def _short(value: Any) -> str:
    return "default" if value is None else str(value)[:12] if isinstance(value, str) else str(value)


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    if not isinstance(nested, dict):
        return {prefix.removesuffix("."): nested}
    return {key: value for name, inner in nested.items() for key, value in flat(inner, f"{prefix}{name}.").items()}
