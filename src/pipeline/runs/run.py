"""A run: its configuration and its parents, the hash of both, and the differences of two runs.

Its folder is `runs_dir/<label>-<hash>` with twelve digits of the hash; the manifest has all digits.
Its manifest is written last, so that a folder with a manifest is finished. Work happens in
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

from pipeline.config.knob import identity
from pipeline.config.merging import Merge
from pipeline.config.stages import DataStage, RunStage
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
    """The properties of a parent that a stage needs: a run, or an external model or folder."""

    @property
    def hash(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class External:
    """An existing input.

    It is a finished run, identified by its hash, or files, identified by their content, or a model
    on the Hub.

    Attributes:
        hub: For a model on the Hub: its id and the requested revision, as in the lock file.
        files: The files below the folder whose content `hash` covers.
    """

    name: str
    hash: str
    folder: Path
    hub: str | None = None
    files: tuple[Path, ...] = ()

    @classmethod
    def of_files(cls, folder: Path, files: Iterable[Path], name: str = "") -> External:
        """Return the input of files below a folder, identified by their content."""
        paths = tuple(sorted(files))
        return cls(name or folder.name, content_hash([*paths], folder), folder, files=paths)

    @property
    def has_changed(self) -> bool:
        """True if its files have changed since they were hashed.

        Files are read again only if one was touched. A deleted file does not count as changed.
        """
        all_here = bool(self.files) and all(path.is_file() for path in self.files)
        return all_here and content_hash([*self.files], self.folder) != self.hash


@dataclass(frozen=True)
class Folder:
    """A folder with an external model, identified by its content.

    The content is hashed when it is first needed.
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
        """True if its files have changed, as in External.

        An added file is a change, too, if it has a name that models are read by.
        """
        for name in DECIDING:
            path = self.folder / name
            if name.endswith(IDENTIFYING_SUFFIXES) and path not in self.files and path.is_file():
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
    version: int = field(kw_only=True)  # of the stage: raised when its code changes results
    # the id of its holder, while it is computed
    lease: str | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        """Clean and shorten the label, which names a folder and a W&B run (128 characters)."""
        self.label = re.sub(r"[^\w.+-]+", "-", self.label).lstrip(".-")[:LABEL_LENGTH]

    @cached_property
    def decided_by(self) -> dict[str, Any]:
        """Everything that affects the hash."""
        parents = {role: parent.hash for role, parent in sorted(self.parents.items())}
        return {
            "stage": self.config.stage,
            "version": self.version,
            "config": identity(self.config),
            "parents": parents,
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
        """The folder where the run is or will be.

        It is looked up each time, because another process may have finished the run.
        """
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
        """The folder where the run is computed: the lease's.

        Without a lease it is the folder of an interrupted attempt.
        """
        if self.lease:
            return self.workplace / self.lease
        return latest_work_folder(self.workplace)


def decided_beyond_knobs(config: Any) -> dict[str, Any]:
    """Return the values that affect the hash besides settings and parents.

    `packages` has the names and versions of the packages that provide a method or task. Methods add
    further entries, such as the order of sources.
    """
    merge = getattr(config, "merge", None)
    if isinstance(merge, Merge):
        return merge.beyond_knobs()
    decided: dict[str, Any] = {}
    if isinstance(config, DataStage):
        names = [*config.expert.sources, *config.expert.union]
        if not config.data.shuffle and len(names) > 1:
            decided["order"] = names  # JSON sorts keys, so their order is stored as a list
        for source in config.expert.sources.values():
            if source.rows == "conversation" and source.column:
                decided["turns"] = "with all keys"
    return decided


def without_step(parent: Parent) -> Parent:
    """Return the training of a planned snapshot; for other parents, the parent."""
    if isinstance(parent, Snapshot):
        return parent.run
    return parent


def parent_runs(parents: dict[str, Parent]) -> list[Run]:
    """Return the parents that are computed here: runs, and the trainings of snapshots."""
    trainings = map(without_step, parents.values())
    return [parent for parent in trainings if isinstance(parent, Run)]


def recorded_config(config: RunStage) -> dict[str, Any]:
    """Return all settings, as the manifest and W&B record them.

    The launcher is left out, because its lines of bash may have secrets.
    """
    recorded = asdict(config)
    recorded.pop("launcher", None)
    return recorded


def describe_changes(earlier: dict[str, Any], later: dict[str, Any]) -> list[str]:
    """Return the differences between the `decided_by` of two runs: 'sft.steps 120 -> 200'."""
    old = flatten_dict(without_credentials(earlier))
    new = flatten_dict(without_credentials(later))
    changes = []
    for key in sorted({**new, **old}):
        before, after = old.get(key), new.get(key)
        if before != after:
            values = f"{_shorten_value(before)} -> {_shorten_value(after)}"
            changes.append(f"{key.removeprefix('config.')} {values}")
    return changes


def _shorten_value(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, str):
        return str(value)[:12]
    return str(value)


def flatten_dict(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as a flat one: {'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(nested, dict):
        return {prefix.removesuffix("."): nested}
    flat: dict[str, Any] = {}
    for name, part in nested.items():
        flat |= flatten_dict(part, f"{prefix}{name}.")
    return flat
