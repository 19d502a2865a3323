"""Runs: names, hashes, folders, manifests, locks, and finding one.

A run is decided by its configuration and its parents. Its hash covers both, its folder is `runs_dir/<label>-<hash>`,
and its manifest is written last, so that a folder with a manifest is finished. Work happens in `runs_dir/.work/<hash>`,
and one atomic rename publishes it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import VERSIONS, RunStage
from pipeline.files import Seen, content_hash, fingerprints, sha256, write_atomically
from pipeline.knobs import PipelineError, identity
from pipeline.lock import key, read_lock
from pipeline.models.checkpoint import digests_in, read_header
from pipeline.provenance import environment, git_state, machine, versions, without_credentials

MANIFEST = "manifest.json"
LABEL_LENGTH = 110


class Parent(Protocol):
    """What a stage needs of a parent: a run of ours, or something that no run made."""

    @property
    def hash(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class Found:
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
        """Whether its content is another than when it was hashed; read again only where a file was touched.

        One that is gone did not change what was read of it.
        """
        seen, was = self._content
        if not all(path.is_file() for path in self.files) or seen == [Seen.now(path) for path in self.files]:
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
class Run:
    """One run, asked for or finished. Two runs of the same hash are the same run."""

    config: RunStage
    label: str
    parents: dict[str, Parent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A label is the name of a folder and of a W&B run (128 characters at most)."""
        self.label = re.sub(r"[^\w.+-]+", "-", self.label).lstrip(".-")[:LABEL_LENGTH]

    @cached_property
    def decided_by(self) -> dict[str, Any]:
        """All that enters the hash."""
        return {
            "stage": self.config.stage,
            "version": VERSIONS[self.config.stage],
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
        found = sorted(self.runs_dir.glob(f"*-{self.hash[:8]}"))
        return found[0] if found else self.runs_dir / f"{self.label}-{self.hash[:8]}"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def work(self) -> Path:
        return self.runs_dir / ".work" / self.hash


def snapshot_hash(run_hash: str, step: int) -> str:
    return hashlib.sha256(f"{run_hash}@{step}".encode()).hexdigest()


def runs_behind(parents: dict[str, Parent]) -> list[Run]:
    """The parents that are made here when they are not finished: runs, and the trainings of snapshots."""
    found = [parent.run if isinstance(parent, Snapshot) else parent for parent in parents.values()]
    return [parent for parent in found if isinstance(parent, Run)]


# ---------------------------------------------------------------------------------------------------- manifests


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, or None. A broken one is refused: nobody but us writes it.

    A snapshot's is that of its training, with the snapshot's own name, weights and files.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return _snapshot_manifest(folder) if folder.parent.name == "snapshots" else None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PipelineError(f"{path} is not readable JSON: remove the folder or restore it") from error
    if not isinstance(manifest, dict) or "facts" not in manifest:
        raise PipelineError(f"{path} is no manifest of this program: name another folder, or move this one away")
    return manifest


def _snapshot_manifest(folder: Path) -> dict[str, Any] | None:
    training, step = read_manifest(folder.parent.parent), folder.name.removeprefix("step-")
    if training is None or step not in training["facts"].get("snapshots", {}):
        return None
    inside = f"{folder.parent.name}/{folder.name}/"
    files = {name.removeprefix(inside): file for name, file in training["files"].items() if name.startswith(inside)}
    return {
        **training, "name": f"{training['name']}@{step}", "hash": snapshot_hash(training["hash"], int(step)),
        "facts": {**training["facts"], "weights": training["facts"]["snapshots"][step]}, "files": files,
    }  # fmt: skip


def why_not_finished(run: Run) -> str | None:
    """None where the run is finished and still valid, else the reason in a few words; parents are taken as they are."""
    manifest = read_manifest(run.folder)
    if manifest is None:
        return _nearest(run) or "never made"
    for role, parent in run.parents.items():
        current = content(parent)
        if current is not None and current != manifest["parents"][role]["content"]:
            return f"its {role} {parent.name} was made again with other contents"
    return None


def content(parent: Parent) -> str | None:
    """The second identity of a finished parent: the digest over its tensors, of a data run over its files.

    None for what is not made yet, and for what no run of ours made, which is known by its content alone.
    """
    manifest = read_manifest(parent.folder)
    if manifest is None:
        return None
    if root := manifest["facts"].get("weights", {}).get("root"):
        return str(root)
    files = "".join(f"{name} {file['sha256']}\n" for name, file in sorted(manifest["files"].items()))
    return f"sha256:{hashlib.sha256(files.encode()).hexdigest()}"


def check_unchanged(folder: Path) -> None:
    """Refuse a finished run whose files are not those that its manifest lists."""
    remedy = "make it again with redo=true, or restore the file"
    manifest = read_manifest(folder) or {"files": {}, "facts": {}}
    weights = manifest["facts"].get("weights", {})
    if weights.get("freed"):
        raise PipelineError(f"{manifest['name']} was freed by stage=clean: train it again with redo=true")
    for name, was in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} is gone; {remedy}")
        stat = path.stat()
        touched = (stat.st_size, stat.st_mtime_ns) != (was["bytes"], was["mtime_ns"])
        if touched and not _same(path, was, weights.get("digests", {})):
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} differs; {remedy}")


def _same(path: Path, was: dict[str, Any], digests: dict[str, str]) -> bool:
    """Whether a file is what a manifest lists: by its sha256, or a file of weights by the digests of its tensors."""
    if "sha256" in was:
        return sha256(path) == was["sha256"]
    try:
        return path.stat().st_size == was["bytes"] and all(
            digests.get(name) == one for name, one in digests_in(path).items()
        )
    except PipelineError:  # its header is broken, or it holds NaN
        return False


def known_by_tensors(folder: Path, digests: dict[str, str]) -> list[str]:
    """The files of weights all of whose tensors have a digest on record: they need none of their own."""
    files = folder.glob("*.safetensors")
    return [path.name for path in files if digests.keys() >= read_header(path).keys()]


def _nearest(run: Run) -> str | None:
    """How this run differs from the finished one of the same stage that is most like it: 'sft.steps 120 -> 200'."""
    best: list[str] | None = None
    for folder in sorted(run.runs_dir.glob(f"{glob.escape(run.label)}-*")):
        manifest = read_manifest(folder)
        if manifest is None or manifest["decided_by"]["stage"] != run.config.stage:
            continue
        changed = changes(manifest["decided_by"], run.decided_by)
        if best is None or len(changed) < len(best):
            best = changed
    return "changed: " + ", ".join(best[:3]) if best else None


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two runs, each by its `decided_by`: 'sft.steps 120 -> 200'."""
    theirs, mine = flat(before), flat(after)
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


# ---------------------------------------------------------------------------------------------------- making one


def lock_of(work: Path) -> Any:
    """What a process on this host holds while it makes the run of a work folder."""
    from filelock import FileLock

    return FileLock(f"{work}.lock")


def make(run: Run, stage: Callable[[Run, Path, Any], dict[str, Any]], predicted_seconds: float | None = None) -> Path:
    """Make the run unless it is finished, and give its folder.

    On one host two processes that ask for the same run meet at its lock: one works, the other waits and uses the
    result.
    """
    from filelock import Timeout

    from pipeline.room import check_room

    run.work.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_of(run.work)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{run.name}: another process is making it; waiting", file=sys.stderr)
        lock.acquire()
    try:
        if (run.work / MANIFEST).is_file():
            publish(run.work, run.folder)  # killed between its manifest and its rename
        if not run.config.redo and why_not_finished(run) is None:
            check_unchanged(run.folder)
            return run.folder
        if run.folder.exists() and read_manifest(run.folder) is None:
            raise PipelineError(
                f"{run.folder} has no {MANIFEST}, so no run made it: move it away, its name is this run's"
            )
        for parent in run.parents.values():
            check_unchanged(parent.folder)
            if isinstance(parent, Found) and parent.hub in read_lock(run.runs_dir).models:
                read_lock(run.runs_dir).check_model(parent.hub)
        check_room(run)
        attempt = (read_manifest(run.folder) or {"attempt": 0})["attempt"] + 1
        _make(run, stage, attempt, predicted_seconds)
        return run.folder
    finally:
        lock.release()


def _make(run: Run, stage: Callable[[Run, Path, Any], dict[str, Any]], attempt: int, predicted: float | None) -> None:
    from pipeline import resume
    from pipeline.tracking import tracked

    earlier = resume.begin(run)
    begun, started = time.perf_counter(), datetime.now(UTC)
    with tracked(run, attempt) as tracker:
        facts = stage(run, run.work, tracker)
    resume.forget(run.work)
    for parent in run.parents.values():
        if isinstance(parent, Folder) and parent.changed:
            raise PipelineError(f"{parent.folder} was changed while {run.label} was made of it: ask for it again")
    manifest = {
        "name": f"{run.label}-{run.hash[:8]}",
        "hash": run.hash,
        "attempt": attempt,
        "decided_by": run.decided_by,
        "config": asdict(run.config),
        "parents": {
            role: {"name": parent.name, "hash": parent.hash, "content": content(parent)}
            for role, parent in run.parents.items()
        },
        "facts": facts,
        "files": fingerprints(run.work, known_by_tensors(run.work, facts.get("weights", {}).get("digests", {}))),
        "git": git_state(),
        "versions": versions(),
        "machine": machine(),
        "environment": environment(),
        "started": started.isoformat(timespec="seconds"),
        "cost": {
            "seconds": round(earlier + time.perf_counter() - begun, 3),
            "predicted_seconds": predicted,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }
    write_atomically(run.work / MANIFEST, json.dumps(without_credentials(manifest), indent=1))
    publish(run.work, run.folder)


def publish(work: Path, folder: Path) -> None:
    """Rename the finished work folder to its place; what was there (an earlier attempt) goes first to the work side."""
    old = work.with_name(f"{work.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.rename(folder, old)
    os.rename(work, folder)
    shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- finding one


def find(reference: str, runs_dir: Path, knob: str, revision: str | None = None) -> Parent:
    """What RUN means: a folder (has a / or starts with .), a run's exact name, or a unique prefix of one.

    hub:org/name is a model on the hub, package:folder one that is shipped with this package, RUN@STEP a snapshot. A
    model that stage=prefetch locked is known by its revision, and is its folder in the hub's cache.

    Raises:
        PipelineError: nothing or more than one thing is meant, or the folder is no finished run and no model.
    """
    if not reference:
        raise PipelineError(f"{knob} is empty: give {knob}=RUN, a finished run, a folder with a model, or hub:org/name")
    if reference.startswith("hub:"):
        name = reference.removeprefix("hub:")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise PipelineError(f"{knob}={reference} is no model of the hub: write hub:org/name")
        hub = key(name, revision)
        pinned, folder = read_lock(runs_dir).model(hub) or (None, Path(name))
        identity = f"{reference}@{pinned}" if pinned else reference
        return Found(Path(name).name, hashlib.sha256(identity.encode()).hexdigest(), folder, hub)
    if reference.startswith("package:"):
        return from_folder(Path(__file__).parent / reference.removeprefix("package:"), knob, runs_dir)
    name, at, step = reference.rpartition("@")
    if at and step.isdigit() and not Path(reference).is_dir():
        return snapshot(find(name, runs_dir, knob), int(step), knob)
    if "/" in reference or reference.startswith("."):
        return from_folder(Path(reference), knob, runs_dir)
    names = [path.parent.name for path in sorted(runs_dir.glob(f"{glob.escape(reference)}*/{MANIFEST}"))]
    if reference in names:
        names = [reference]
    if len(names) == 1:
        return from_folder(runs_dir / names[0], knob, runs_dir)
    if names:
        raise PipelineError(
            f"{knob}={reference} means more than one run: {', '.join(names[:6])}; give more of the name"
        )
    if (runs_dir / reference).is_dir():
        return from_folder(runs_dir / reference, knob, runs_dir)
    known = [path.parent.name for path in sorted(runs_dir.glob(f"*/{MANIFEST}"))]
    raise PipelineError(f"{knob}={reference} is no finished run of {runs_dir}{near(reference, known)}")


def snapshot(training: Parent, step: int, knob: str) -> Parent:
    """RUN@STEP. One that stage=clean freed is still known by its weights' digests."""
    folder = training.folder / "snapshots" / f"step-{step}"
    manifest = read_manifest(folder)
    if manifest is None:
        there = (read_manifest(training.folder) or {"facts": {}})["facts"].get("snapshots", {})
        told = f"there are {', '.join(there)}" if there else "it was trained without sft.snapshot_every"
        raise PipelineError(f"{knob}={training.name}@{step}: {training.name} has no snapshot of that step; {told}")
    return Found(manifest["name"], manifest["hash"], folder)


def near(word: str, known: list[str]) -> str:
    """'; did you mean a, b' where something is near, else what there is."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}" if close else f"; there are {', '.join(known[:8]) or 'none'}"


def from_folder(folder: Path, knob: str, runs_dir: Path) -> Parent:
    folder = Path(os.path.normpath(folder))
    if not folder.is_dir():
        raise PipelineError(f"{knob}={folder} is not a folder: name a finished run, or a folder with a model")
    manifest = read_manifest(folder)
    if manifest is not None:
        return Found(manifest["name"], manifest["hash"], folder)
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".model", ".jinja")]
    described = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not described or not any(path.suffix == ".safetensors" for path in files):
        raise PipelineError(
            f"{knob}={folder} has no {MANIFEST}, so it is no finished run, "
            "and no config.json with safetensors, so it is no model"
        )
    return Folder(folder, tuple(files), runs_dir)


def finished(runs_dir: Path) -> Iterator[dict[str, Any]]:
    """The manifests of all finished runs, oldest first."""
    found = [read_manifest(path.parent) for path in runs_dir.glob(f"*/{MANIFEST}")]
    yield from sorted((manifest for manifest in found if manifest), key=lambda manifest: manifest["started"])
