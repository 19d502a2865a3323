"""Runs: names, hashes, folders, manifests, locks, and finding one.

A run is decided by its configuration and its parents. Its hash covers both, its folder is `runs_dir/<label>-<hash>`
with eight digits of the hash (twelve where another run has the same eight; the manifest has all), and its manifest is
written last, so that a folder with a manifest is finished. Work happens in `runs_dir/.work/<hash>`, and one atomic
rename publishes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pipeline.config.knob import identity
from pipeline.config.stages import RunStage
from pipeline.errors import PipelineError
from pipeline.files import Seen, content_hash, sha256
from pipeline.models.checkpoint import digests_in, read_header
from pipeline.runs.folders import of_same_digits
from pipeline.runs.manifest import read_manifest, snapshot_hash
from pipeline.runs.provenance import without_credentials

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
    """What is there: a finished run, known by its hash; any other folder, by its content; a model of the hub."""

    name: str
    hash: str
    folder: Path
    hub: str | None = None  # of a model of the hub: its id, and the revision asked for, as the lock file has them


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
        """Whether its content is another than when it was hashed; read again only where a file was touched."""
        seen, was = self._content
        if seen == [Seen.now(path) for path in self.files]:
            return False
        return content_hash(list(self.files), self.folder, self.runs_dir) != was

    @cached_property
    def _content(self) -> tuple[list[Seen], str]:
        seen = [Seen.now(path) for path in self.files]
        return seen, content_hash(list(self.files), self.folder, self.runs_dir)


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
        """Where it is or will be. Found by hash, so that a label may change."""
        published = of_same_digits(self.hash, self.runs_dir)
        if self.hash in published:
            return published[self.hash]
        taken = {folder.name.rpartition("-")[2] for folder in published.values()}
        digits = next(count for count in (8, 12, 64) if self.hash[:count] not in taken)
        return self.runs_dir / f"{self.label}-{self.hash[:digits]}"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def work(self) -> Path:
        return self.runs_dir / ".work" / self.hash


def runs_behind(parents: dict[str, Parent]) -> list[Run]:
    """The parents that are made here when they are not finished: runs, and the trainings of snapshots."""
    found = [parent.run if isinstance(parent, Snapshot) else parent for parent in parents.values()]
    return [parent for parent in found if isinstance(parent, Run)]


def content(parent: Parent) -> str | None:
    """The second identity of a finished parent: the digest over its tensors, of a data run over its files.

    None for what is not made yet, and for what no run of ours made, which is known by its content alone.
    """
    manifest = read_manifest(parent.folder)
    return manifest.content if manifest else None


def check_unchanged(folder: Path) -> None:
    """Refuse a finished run whose files are not those that its manifest lists."""
    remedy = "make it again with redo=true, or restore the file"
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if manifest.weights.get("freed"):
        raise PipelineError(f"{manifest.name} was freed by stage=clean: train it again with redo=true")
    for name, was in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} is gone; {remedy}")
        stat = path.stat()
        touched = (stat.st_size, stat.st_mtime_ns) != (was["bytes"], was["mtime_ns"])
        if touched and not _same(path, was, manifest.weights.get("digests", {})):
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} differs; {remedy}")


def _same(path: Path, was: dict[str, Any], digests: dict[str, str]) -> bool:
    """Whether a file is what a manifest lists: by its sha256, or a file of weights by the digests of its tensors."""
    if "sha256" in was:
        return sha256(path) == was["sha256"]
    try:
        return path.stat().st_size == was["bytes"] and all(
            digests[name] == one for name, one in digests_in(path).items()
        )
    except PipelineError:  # its header is broken, or it holds NaN
        return False


def known_by_tensors(folder: Path, digests: dict[str, str]) -> list[str]:
    """The files of weights all of whose tensors have a digest on record: they need none of their own."""
    files = folder.glob("*.safetensors")
    return [path.name for path in files if digests.keys() >= read_header(path).keys()]


def next_attempt(run: Run) -> int:
    """1 for a run that was never finished; redo=true makes a finished one again, as a new attempt."""
    manifest = read_manifest(run.folder)
    return manifest.attempt + 1 if manifest else 1


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two runs, each by its `decided_by`: 'sft.steps 120 -> 200'."""
    theirs, mine = flat(without_credentials(before)), flat(without_credentials(after))
    return [
        f"{key.removeprefix('config.')} {_short(theirs.get(key))} -> {_short(mine.get(key))}"
        for key in sorted({**mine, **theirs})
        if mine.get(key) != theirs.get(key)
    ]


def _short(value: Any) -> str:
    return "default" if value is None else str(value)[:12] if isinstance(value, str) else str(value)


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    if not isinstance(nested, dict):
        return {prefix.removesuffix("."): nested}
    return {key: value for name, inner in nested.items() for key, value in flat(inner, f"{prefix}{name}.").items()}
