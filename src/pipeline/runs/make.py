"""Making a run: in its work folder, its manifest last, published by one rename."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import fingerprints, move_folder
from pipeline.hub.lock import read_lock
from pipeline.progress import say
from pipeline.runs import state
from pipeline.runs.adopt import adopt, adoptable
from pipeline.runs.disk import check_disk, naming_a_full_disk
from pipeline.runs.folders import finished_names
from pipeline.runs.lease import Lease, leased, left
from pipeline.runs.manifest import MANIFEST, Ancestor, Malformed, Manifest, read_manifest
from pipeline.runs.provenance import environment, git_state, machine, versions
from pipeline.runs.run import External, Folder, Run, changes, recorded
from pipeline.runs.unchanged import check_unchanged, content, known_by_tensors, next_attempt

Stage = Callable[[Run, Path, Any], dict[str, Any]]


def why_not_finished(run: Run) -> str | None:
    """None where the run is finished and still valid, else the reason in a few words; parents are taken as they are."""
    try:
        manifest = read_manifest(run.folder)
        recorded = {role: manifest.parents[role].content for role in run.parents} if manifest else {}
        contents = {role: content(run.parents[role], was) for role, was in recorded.items()}
    except Malformed as error:
        return str(error)
    if manifest is None:
        return _nearest(run) or "never made"
    for role, current in contents.items():
        if current is not None and current != recorded[role]:
            return f"its {role} {run.parents[role].name} was made again with other contents"
    return None


def _nearest(run: Run) -> str | None:
    """How this run differs from the finished one of the same stage that is most like it: 'sft.steps 120 -> 200'."""
    best: list[str] | None = None
    for name in finished_names(run.runs_dir, f"{run.label}-"):
        try:
            manifest = read_manifest(run.runs_dir / name)
        except Malformed:  # named where runs are listed
            continue
        if manifest is None or manifest.stage != run.config.stage:
            continue
        changed = changes(manifest.decided_by, run.decided_by)
        if best is None or len(changed) < len(best):
            best = changed
    return "changed: " + ", ".join(best[:3]) if best else None


def make_once(
    run: Run,
    stage: Stage,
    bytes_needed: Callable[[Run], Mapping[str, int]] = lambda run: {},
    predicted_seconds: float | None = None,
    guessed_seconds: float | None = None,
    adopts: bool = True,
) -> Path:
    """Make the run unless it is finished, and give its folder.

    `stage` works in the run's work folder and gives the facts of the manifest; `bytes_needed` says what it will write.
    predicted_seconds: as finished runs have it; guessed_seconds: by its work alone; adopts: whether the files of a
    finished run may be taken that would be the same (runs/adopt.py).
    Two processes that ask for the same run, on one host or two, meet at its lease: one works, the other waits and uses
    the result.

    Raises:
        Held: another process makes it, and this one is in an allocation, where it does not wait.
    """
    with naming_a_full_disk(run.runs_dir), leased(run.workplace, run.name) as lease:
        run.lease = lease.of.id
        try:
            if (left(run.workplace) / MANIFEST).is_file():
                lease.take_over()
                publish(lease, run.folder)  # killed between its manifest and its rename
            if not run.config.redo and why_not_finished(run) is None:
                check_unchanged(run.folder)
                state.forget(run.workplace)
                return run.folder
            if run.folder.exists() and read_manifest(run.folder) is None:
                raise PipelineError(
                    f"{run.folder} has no {MANIFEST}, so no run made it: move it away, its name is this run's"
                )
            for parent in run.parents.values():
                check_unchanged(parent.folder)
                if isinstance(parent, External) and parent.hub in read_lock(run.runs_dir).models:
                    read_lock(run.runs_dir).check_model(parent.hub)
            if adopts and (equal := adoptable(run)):
                lease.take_over()
                adopt(run, equal, next_attempt(run))
                publish(lease, run.folder)
                state.forget(run.workplace)
                say(f"{run.name}: adopted from {equal.name}, which read the same")
                return run.folder
            check_disk(run, bytes_needed(run))
            lease.take_over()
            tracked_state = state.told(run.workplace, lease.of, run.name, run.config.stage)
            with tracked_state, naming_a_full_disk(run.runs_dir):
                _make(run, lease, stage, next_attempt(run), (predicted_seconds, guessed_seconds))
            state.forget(run.workplace)
            return run.folder
        except OSError:
            lease.check()  # where another took it over, its folder was renamed: that is the reason
            raise
        finally:
            run.lease = None


def _make(run: Run, lease: Lease, stage: Stage, attempt: int, expected: tuple[float | None, float | None]) -> None:
    from pipeline.runs import resume
    from pipeline.runs.tracking import tracked

    earlier = resume.begin(run)
    begun, started = time.perf_counter(), datetime.now(UTC)
    with tracked(run, attempt) as tracker:
        facts = stage(run, run.work, tracker)
    resume.forget(run.work)
    for parent in run.parents.values():
        if isinstance(parent, Folder) and parent.changed:
            raise PipelineError(f"{parent.folder} was changed while {run.label} was made of it: ask for it again")
    manifest = Manifest(
        name=run.name,
        hash=run.hash,
        attempt=attempt,
        decided_by=run.decided_by,
        config=recorded(run.config),
        parents={role: Ancestor(parent.name, parent.hash, content(parent)) for role, parent in run.parents.items()},
        facts=facts,
        files=fingerprints(run.work, known_by_tensors(run.work, facts.get("weights", {}).get("digests", {}))),
        git=git_state(),
        versions=versions(),
        machine=machine(),
        environment=environment(),
        started=started.isoformat(timespec="seconds"),
        cost={
            "seconds": round(earlier + time.perf_counter() - begun, 3),
            "predicted_seconds": expected[0],
            "guessed_seconds": expected[1],
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    )
    manifest.write(run.work)
    publish(lease, run.folder)


def publish(lease: Lease, folder: Path) -> None:
    """Rename the finished work folder to its place; what was there (an earlier attempt) goes first to the work side.

    Raises:
        Lost: another process took the lease over.
    """
    work = lease.folder
    lease.check()
    old = work.with_name(f"{work.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        move_folder(folder, old)
    move_folder(work, folder)
    shutil.rmtree(old, ignore_errors=True)
