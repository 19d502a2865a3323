"""The manifest of a finished run, which is written last. All code that reads manifests is here."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.errors import PipelineError
from pipeline.files import SETTLED_NS, write_atomically
from pipeline.hub.addresses import without_credentials

MANIFEST = "manifest.json"
SNAPSHOTS = "snapshots"  # the folder of a training with its snapshots
ROWS = ("train.jsonl", "validation.jsonl")  # the files of a data run that a training reads


class Malformed(PipelineError):
    """A malformed manifest.json. Commands that list runs report it and continue."""


@dataclass(frozen=True)
class Ancestor:
    """A parent as a manifest records it.

    Attributes:
        content: Its second identity; None for external models.
    """

    name: str
    hash: str
    content: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Inputs, contents and cost of a finished run.

    Attributes:
        decided_by: The values that the hash covers.
        facts: The results that the stage reports.
        config: All settings.
        files: name -> {bytes, mtime_ns, sha256}. Weights whose tensors all have digests have no
            sha256.
        cost: {seconds, predicted_seconds, peak_memory_bytes}.
    """

    name: str
    hash: str
    decided_by: dict[str, Any]
    facts: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    parents: dict[str, Ancestor] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    attempt: int = 1
    git: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    started: str = ""
    cost: dict[str, Any] = field(default_factory=lambda: {"seconds": 0.0})

    @property
    def stage(self) -> str:
        return self.decided_by["stage"]

    @property
    def weights(self) -> dict[str, Any]:
        """{root, digests, ...} of the model in the run; empty without a model."""
        return self.facts.get("weights") or {}

    @property
    def weights_root(self) -> str | None:
        return self.weights.get("root")

    @property
    def snapshots(self) -> dict[str, dict[str, Any]]:
        """step -> its weights, its validation loss, and `freed` if stage=clean deleted it."""
        return self.facts.get("snapshots") or {}

    @property
    def base(self) -> Ancestor | None:
        """The model that this one started from: the base of a training, otherwise of a merge."""
        return self.parents.get("model") or self.parents.get("base")

    @property
    def content(self) -> str:
        """The second identity: the root digest over the tensors, or a digest over files.

        For a training set, these are the files with its rows. Its card, which names the compared
        benchmarks, does not count. For other runs without weights, these are all files.
        """
        if self.weights_root:
            return self.weights_root
        names: Sequence[str] = sorted(self.files)
        if self.stage == "data" and self.files.keys() >= set(ROWS):
            names = ROWS
        lines = [f"{name} {self.files[name]['sha256']}\n" for name in names]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        return f"sha256:{digest}"

    @property
    def seconds(self) -> float:
        return self.cost["seconds"]

    def of_snapshot(self, step: str) -> Manifest:
        """Return a snapshot's manifest: its training's, with the snapshot's identity and files."""
        prefix = f"{SNAPSHOTS}/step-{step}/"
        files = {}
        for name, file in self.files.items():
            if name.startswith(prefix):
                files[name.removeprefix(prefix)] = file
        return replace(
            self,
            name=f"{self.name}@{step}",
            hash=snapshot_hash(self.hash, int(step)),
            files=files,
            facts={**self.facts, "weights": self.snapshots[step]},
        )

    def without_snapshot(self, step: str) -> Manifest:
        """Return the manifest without the files of a deleted snapshot.

        The digests of its weights stay.
        """
        prefix = f"{SNAPSHOTS}/step-{step}/"
        files = {}
        for name, file in self.files.items():
            if not name.startswith(prefix):
                files[name] = file
        snapshots = {**self.snapshots, step: {**self.snapshots[step], "freed": True}}
        return replace(self, files=files, facts={**self.facts, "snapshots": snapshots})

    def as_json(self) -> str:
        return json.dumps(without_credentials(asdict(self)), indent=1)

    def write(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, self.as_json())


READER = TypeAdapter(Manifest)


def home_of(folder: Path) -> Path:
    """Return the folder of the training that a snapshot is in; for other folders, the folder."""
    if folder.parent.name == SNAPSHOTS:
        return folder.parents[1]
    return folder


def snapshot_hash(run_hash: str, step: int) -> str:
    return hashlib.sha256(f"{run_hash}@{step}".encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a finished run or of a snapshot, or None if there is none.

    Raises:
        Malformed: If the file is damaged, or was not written by this program.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if folder.parent.name != SNAPSHOTS:
            return None
        training, step = read_manifest(folder.parent.parent), folder.name.removeprefix("step-")
        if training is not None and step in training.snapshots:
            return training.of_snapshot(step)
        return None
    stat = path.stat()
    if (
        time.time_ns() - stat.st_mtime_ns > SETTLED_NS
    ):  # a newer file may change within the same mtime
        return _read_cached(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return read_file(path)


@lru_cache(maxsize=256)  # about 100 KB each for a model of 8B parameters
def _read_cached(path: Path, *_: int) -> Manifest:
    """Return a manifest, read once while its file is unchanged. Callers must not modify it."""
    return read_file(path)


def read_file(path: Path) -> Manifest:
    """Read a manifest from its file, with the errors of `read_manifest`."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Malformed(f"{path} is not readable JSON. Remove the folder or restore it.") from error
    try:
        manifest = READER.validate_python(content)
        if manifest.stage and math.isfinite(content["cost"]["seconds"]):  # every run has them
            return manifest
        raise ValueError("seconds")
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed(
            f"{path} is not a manifest of this program. Name another folder, or move this one away."
        ) from error
