"""Runs: names, hashes, folders, manifests, locks, and finding one.

A run is decided by its configuration and its parents. Its hash covers both, its folder is `runs_dir/<label>-<hash>`, and
its manifest is written last, so that a folder with a manifest is finished. Work happens in `runs_dir/.work/<hash>`, and
one atomic rename publishes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import VERSIONS, PipelineError, RunStage, identity

MANIFEST = "manifest.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "lm-eval", "safetensors", "tokenizers", "numpy")
ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID")
UNHASHED_FILES = ("wandb/",)  # tracking writes there; results are elsewhere


class Parent(Protocol):
    """What a stage needs of a parent: a run of ours, or something that no run made."""

    @property
    def hash(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class Foreign:
    """A folder that no run of ours made, known by its content, or a model on the hub, known by its revision."""

    name: str
    hash: str
    folder: Path


@dataclass
class Run:
    """One run, asked for or finished. Two runs of the same hash are the same run."""

    config: RunStage
    label: str
    parents: dict[str, Parent] = field(default_factory=dict)

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


# ---------------------------------------------------------------------------------------------------- manifests


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, or None. Broken JSON is refused: nobody but us writes it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path} is not readable JSON: remove the folder or restore it") from error


def why_not_finished(run: Run) -> str | None:
    """None where the run is finished and still valid, else the reason in a few words."""
    manifest = read_manifest(run.folder) if run.folder.is_dir() else None
    if manifest is None:
        return _nearest(run) or "never made"
    for role, parent in run.parents.items():
        recorded = manifest["parents"][role]["weights"]
        current = weights_root(parent)
        if recorded != current and current is not None:
            return f"its {role} {parent.name} was made again with other weights"
    return None


def weights_root(parent: Parent) -> str | None:
    """The digest over all tensors that a finished parent recorded; None where it has no weights or is not made yet."""
    manifest = read_manifest(parent.folder) if parent.folder.is_dir() else None
    return manifest and manifest["facts"].get("weights", {}).get("root")


def check_unchanged(folder: Path) -> None:
    """Refuse a finished run whose files are not those that its manifest lists."""
    for name, was in (read_manifest(folder) or {"files": {}})["files"].items():
        path = folder / name
        remedy = "make it again with redo=true, or restore the file"
        if not path.is_file():
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} is gone; {remedy}")
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (was["bytes"], was["mtime_ns"]) and sha256(path) != was["sha256"]:
            raise PipelineError(f"{folder.name} was changed after it was finished: {name} differs; {remedy}")


def _nearest(run: Run) -> str | None:
    """How this run differs from the finished one of the same stage that is most like it: 'sft.steps 120 -> 200'."""
    mine = flat(run.decided_by)
    best: list[str] | None = None
    for folder in sorted(run.runs_dir.glob(f"{run.label}-*")):
        manifest = read_manifest(folder)
        if manifest is None or manifest["decided_by"]["stage"] != run.config.stage:
            continue
        theirs = flat(manifest["decided_by"])
        changes = [
            f"{key.removeprefix('config.')} {_short(theirs.get(key))} -> {_short(mine.get(key))}"
            for key in sorted({**mine, **theirs})
            if mine.get(key) != theirs.get(key)
        ]
        if best is None or len(changes) < len(best):
            best = changes
    return best and "changed: " + ", ".join(best[:3])


def _short(value: Any) -> str:
    return "default" if value is None else str(value)[:12] if isinstance(value, str) else str(value)


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    if not isinstance(nested, dict):
        return {prefix.removesuffix("."): nested}
    return {key: value for name, inner in nested.items() for key, value in flat(inner, f"{prefix}{name}.").items()}


# ---------------------------------------------------------------------------------------------------- making one


def make(run: Run, stage: Callable[[Run, Path, Any], dict[str, Any]], predicted_seconds: float | None = None) -> Path:
    """Make the run unless it is finished, and give its folder.

    On one host two processes that ask for the same run meet at its lock: one works, the other waits and uses the result.
    """
    from filelock import FileLock, Timeout

    run.work.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(run.work) + ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{run.name}: another process is making it; waiting", file=sys.stderr)
        lock.acquire()
    try:
        redo = run.config.redo
        if not redo and why_not_finished(run) is None:
            check_unchanged(run.folder)
            return run.folder
        for parent in run.parents.values():
            check_unchanged(parent.folder)
        attempt = (read_manifest(run.folder) or {"attempt": 0})["attempt"] + 1 if run.folder.is_dir() else 1
        _make(run, stage, attempt, predicted_seconds)
        return run.folder
    finally:
        lock.release()


def _make(run: Run, stage: Callable[[Run, Path, Any], dict[str, Any]], attempt: int, predicted: float | None) -> None:
    from pipeline.tracking import tracked

    shutil.rmtree(run.work, ignore_errors=True)
    run.work.mkdir(parents=True)
    begun, started = time.perf_counter(), datetime.now(UTC)
    with tracked(run, attempt) as tracker:
        facts = stage(run, run.work, tracker)
    manifest = {
        "name": f"{run.label}-{run.hash[:8]}",
        "hash": run.hash,
        "attempt": attempt,
        "decided_by": run.decided_by,
        "config": without_credentials(asdict(run.config)),
        "parents": {
            role: {"name": parent.name, "hash": parent.hash, "weights": weights_root(parent)}
            for role, parent in run.parents.items()
        },
        "facts": facts,
        "files": fingerprints(run.work),
        "git": git_state(),
        "versions": versions(),
        "machine": machine(),
        "environment": {key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
        "started": started.isoformat(timespec="seconds"),
        "cost": {
            "seconds": round(time.perf_counter() - begun, 3),
            "predicted_seconds": predicted,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }
    write_atomically(run.work / MANIFEST, json.dumps(manifest, indent=1))
    publish(run.work, run.folder)


def publish(work: Path, folder: Path) -> None:
    """Rename the finished work folder to its place; what was there (an earlier attempt) goes first to the work side."""
    if folder.is_dir():
        old = work.parent / f"{folder.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
        os.rename(work, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(work, folder)


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- digests


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Size, time and sha256 of each file that counts as a result."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(UNHASHED_FILES):
            stat = path.stat()
            found[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256(path)}
    return found


@lru_cache(maxsize=256)
def _cached_sha256(path: Path, size: int, mtime_ns: int) -> str:
    return sha256(path)


def content_hash(paths: list[Path], root: Path) -> str:
    """One digest over named files: the identity of what no run of ours made."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {_cached_sha256(path, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- finding one


def find(reference: str, runs_dir: Path, knob: str) -> Parent:
    """What RUN means: a folder (has a / or starts with .), a run's exact name, or a unique prefix of one.

    hub:org/name is a model on the hub, package:folder one that is shipped with this package.

    Raises:
        PipelineError: nothing or more than one thing is meant, or the folder is no finished run and no model.
    """
    if reference.startswith("hub:"):
        name = reference.removeprefix("hub:")
        return Foreign(name, hashlib.sha256(reference.encode()).hexdigest(), Path(name))
    if reference.startswith("package:"):
        return from_folder(Path(__file__).parent / reference.removeprefix("package:"), knob)
    if "/" in reference or reference.startswith("."):
        return from_folder(Path(reference), knob)
    names = [path.parent.name for path in sorted(runs_dir.glob(f"{reference}*/{MANIFEST}"))]
    if reference in names:
        names = [reference]
    if len(names) == 1:
        return from_folder(runs_dir / names[0], knob)
    if names:
        raise PipelineError(f"{knob}={reference} means more than one run: {', '.join(names[:6])}; give more of the name")
    if (runs_dir / reference).is_dir():
        return from_folder(runs_dir / reference, knob)
    known = [path.parent.name for path in sorted(runs_dir.glob(f"*/{MANIFEST}"))]
    raise PipelineError(f"{knob}={reference} is no finished run of {runs_dir}{near(reference, known)}")


def near(word: str, known: list[str]) -> str:
    """'; did you mean a, b' where something is near, else what there is."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}" if close else f"; there are {', '.join(known[:8]) or 'none'}"


@dataclass(frozen=True)
class Finished:
    """A finished run as a parent: known by the hash in its manifest."""

    name: str
    hash: str
    folder: Path


def from_folder(folder: Path, knob: str) -> Parent:
    if not folder.is_dir():
        raise PipelineError(f"{knob}={folder} is not a folder: name a finished run, or a folder with a model")
    manifest = read_manifest(folder)
    if manifest is not None:
        return Finished(manifest["name"], manifest["hash"], folder)
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".model", ".jinja")]
    if not (folder / "config.json").is_file() or not any(path.suffix == ".safetensors" for path in files):
        raise PipelineError(
            f"{knob}={folder} has no manifest.json, so it is no finished run, and no config.json with safetensors, so it is no model"
        )
    return Foreign(folder.name, content_hash(files, folder), folder)


def finished(runs_dir: Path) -> Iterator[dict[str, Any]]:
    """The manifests of all finished runs, oldest first."""
    found = [read_manifest(path.parent) for path in runs_dir.glob(f"*/{MANIFEST}")]
    yield from sorted((manifest for manifest in found if manifest), key=lambda manifest: manifest["started"])


# ---------------------------------------------------------------------------------------------------- provenance


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return found


def git_state() -> dict[str, Any]:
    """The commit, and whether anything but results/ differs from it; null outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) not in here.parents or not git("ls-files", __file__):
            return {"commit": None, "dirty": None}
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def without_credentials(value: Any) -> Any:
    """The same structure with user:password@ taken out of every address."""
    if isinstance(value, dict):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(inner) for inner in value]
    return re.sub(r"(\w+://)[^/\s@]+@", r"\1", value) if isinstance(value, str) else value


@contextmanager
def plain_io_errors(what: str) -> Iterator[None]:
    """A full disk and the like as one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise PipelineError(f"{what}: {error.strerror} ({error.filename or 'no file named'}); nothing was published") from error
