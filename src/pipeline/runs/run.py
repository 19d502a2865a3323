"""What a run is: its configuration and its parents, the hash of both, and what differs between two.

Its folder is `runs_dir/<label>-<hash>` with twelve digits of the hash; the manifest has all. Its
manifest is written last, so that a folder with a manifest is finished. Work happens in
`runs_dir/.work/<hash>/<lease>`, and one atomic rename publishes it (runs/make.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pipeline.benchmarks import find_benchmark
from pipeline.config.knob import identity
from pipeline.config.merging import Merge
from pipeline.config.stages import DataStage, EvalStage, RunStage
from pipeline.files import content_hash
from pipeline.hub.addresses import without_credentials
from pipeline.models.files import DECIDING, IDENTIFYING_SUFFIXES
from pipeline.models.identity import folder_digest
from pipeline.runs.folders import place_of
from pipeline.runs.lease import latest_work_folder
from pipeline.runs.manifest import snapshot_hash

LABEL_LENGTH = 110
Config = TypeVar("Config", bound=RunStage)


class Parent(Protocol):
    """What a stage needs of a parent: a run, or an external model or folder."""

    @property
    def hash(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class External:
    """An existing input: a finished run, identified by its hash; files, by their content; or a
    model on the Hub.
    """

    name: str
    hash: str
    folder: Path
    hub: str | None = (
        None  # for a model on the Hub: its id and the requested revision, as in the lock file
    )
    files: tuple[Path, ...] = ()  # below the folder, of which `hash` is the content

    @classmethod
    def of_files(cls, folder: Path, files: Iterable[Path], name: str = "") -> External:
        """Files below a folder, identified by their content."""
        paths = tuple(sorted(files))
        return cls(name or folder.name, content_hash([*paths], folder), folder, files=paths)

    @property
    def has_changed(self) -> bool:
        """Whether its files differ from when they were hashed; read again only where one was
        touched. A deleted file did not change what was read of it.
        """
        all_here = bool(self.files) and all(path.is_file() for path in self.files)
        return all_here and content_hash([*self.files], self.folder) != self.hash


@dataclass(frozen=True)
class Folder:
    """A folder with an external model, identified by its content, which is hashed when first
    needed.
    """

    folder: Path
    files: tuple[Path, ...]
    runs_dir: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def hash(self) -> str:
        return folder_digest(self.folder, self.files, self.runs_dir)

    @property
    def has_changed(self) -> bool:
        """As of External; an added file counts, too, where models are read by its name."""
        deciding = set()
        for name in DECIDING:
            if name.endswith(IDENTIFYING_SUFFIXES):
                deciding.add(self.folder / name)
        if any(path.is_file() for path in deciding.difference(self.files)):
            return True
        all_here = all(path.is_file() for path in self.files)
        return all_here and folder_digest(self.folder, self.files, self.runs_dir) != self.hash


@dataclass(frozen=True)
class Snapshot:
    """RUN@STEP of a requested training, finished or not."""

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
    """One run, requested or finished. Two runs of the same hash are the same run."""

    config: Config
    label: str
    parents: dict[str, Parent] = field(default_factory=dict)
    version: int = field(kw_only=True)  # version of the stage: raised when its code changes results
    lease: str | None = field(
        default=None, kw_only=True, compare=False
    )  # id of its holder, while it is computed

    def __post_init__(self) -> None:
        """Check the label: it names a folder and a W&B run (at most 128 characters)."""
        self.label = re.sub(r"[^\w.+-]+", "-", self.label).lstrip(".-")[:LABEL_LENGTH]

    @cached_property
    def decided_by(self) -> dict[str, Any]:
        """Everything that affects the hash."""
        return {
            "stage": self.config.stage,
            "version": self.version,
            "config": identity(self.config),
            "parents": {role: parent.hash for role, parent in sorted(self.parents.items())},
            **decided_beyond_knobs(self.config),
        }

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.decided_by, sort_keys=True).encode()).hexdigest()

    @cached_property
    def runs_dir(self) -> Path:
        return Path(self.config.runs_dir)

    @property
    def folder(self) -> Path:
        """Where it is or will be, looked up each time: another process may have finished it."""
        return place_of(self.label, self.hash, self.runs_dir)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def workplace(self) -> Path:
        """The folder with its leases, its state, and the work folders of their holders."""
        return self.runs_dir / ".work" / self.hash

    @property
    def work(self) -> Path:
        """Where it is computed: the folder of the lease; without one, that of an interrupted
        attempt.
        """
        if self.lease:
            return self.workplace / self.lease
        return latest_work_folder(self.workplace)


def decided_beyond_knobs(config: Any) -> dict[str, Any]:
    """Return what affects the hash besides knobs and parents; empty if nothing does.

    `packages` has the name and version of other packages that a method or task is from. Methods add
    their own entries, such as the order of sources.
    """
    decided: dict[str, Any] = {}
    if isinstance(config, DataStage):
        names = []
        if not config.data.shuffle:
            names = [*config.expert.sources, *config.expert.union]
        if len(names) > 1:  # of keys, which their JSON is sorted by
            decided["order"] = names
        if any(
            source.rows == "conversation" and source.column
            for source in config.expert.sources.values()
        ):
            decided["turns"] = "with all keys"
        return decided
    merge = getattr(config, "merge", None)
    if isinstance(merge, Merge):
        decided = merge.beyond_knobs()
    if isinstance(config, EvalStage):
        items = {task.task: find_benchmark(task.task) for task in config.eval.tasks}
        packages = {}
        for task, item in items.items():
            if item and item.package:
                packages[task] = item.package
        if packages:
            decided["packages"] = decided.get("packages", {}) | packages
    return decided


def without_step(parent: Parent) -> Parent:
    """Return the training of a planned snapshot; for other parents, the parent."""
    if isinstance(parent, Snapshot):
        return parent.run
    return parent


def parent_runs(parents: dict[str, Parent]) -> list[Run]:
    """Return the parents that are computed here when unfinished: runs, and the trainings of
    snapshots.
    """
    found = []
    for parent in map(without_step, parents.values()):
        if isinstance(parent, Run):
            found.append(parent)
    return found


def recorded_config(config: RunStage) -> dict[str, Any]:
    """Every knob, as the manifest and W&B record them: without the launcher, whose lines of bash
    may hold secrets.
    """
    found = {}
    for key, value in asdict(config).items():
        if key != "launcher":
            found[key] = value
    return found


def describe_changes(earlier: dict[str, Any], later: dict[str, Any]) -> list[str]:
    """Return the differences between the `decided_by` of two runs: 'sft.steps 120 -> 200'."""
    old, new = flatten_dict(without_credentials(earlier)), flatten_dict(without_credentials(later))
    found = []
    for key in sorted({**new, **old}):
        if new.get(key) != old.get(key):
            found.append(
                f"{key.removeprefix('config.')} {_shorten_value(old.get(key))} ->"
                f" {_shorten_value(new.get(key))}"
            )
    return found


def _shorten_value(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, str):
        return str(value)[:12]
    return str(value)


def flatten_dict(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict: {'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(nested, dict):
        return {prefix.removesuffix("."): nested}
    found = {}
    for name, part in nested.items():
        for key, value in flatten_dict(part, f"{prefix}{name}.").items():
            found[key] = value
    return found
