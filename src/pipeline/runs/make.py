"""Computing a run: in its work folder, its manifest last, published by one rename."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.files import fingerprints
from pipeline.hub.lock import read_lock
from pipeline.runs import state
from pipeline.runs.disk import check_disk
from pipeline.runs.folders import finished_names
from pipeline.runs.lease import UNOWNED, Holder, Lease, hold_lease, latest_work_folder, take_lease
from pipeline.runs.manifest import MANIFEST, Ancestor, Malformed, Manifest, read_manifest
from pipeline.runs.provenance import (
    git_state,
    machine_facts,
    package_versions,
    recorded_environment,
)
from pipeline.runs.run import External, Folder, Run, describe_changes, recorded_config
from pipeline.runs.unchanged import check_unchanged, content_digest, known_by_tensors, next_attempt

Stage = Callable[[Run, Path, Any], dict[str, Any]]


def why_not_finished(run: Run) -> str | None:
    """Return why a run is not finished and valid, or None if it is. Parents are not checked.

    Raises:
        PipelineError: For a finished training of another side. The side is not hashed, but merges
            and maps use it.
    """
    try:
        manifest = read_manifest(run.folder)
        if manifest and manifest.hash != run.hash:  # another run has the same label and digits
            manifest = None
        recorded = {}
        if manifest:
            recorded = {role: manifest.parents[role].content for role in run.parents}
        contents = {role: content_digest(run.parents[role]) for role in recorded}
    except Malformed as error:
        return str(error)
    if manifest is None:
        return _describe_nearest_run(run) or "never made"
    if isinstance(run.config, TrainStage) and not run.config.redo:
        side = run.config.expert.side
        recorded_side = manifest.config.get("expert", {}).get("side", side)
        if side != recorded_side:
            raise PipelineError(
                f"{run.name} was trained with expert.side={recorded_side}, not {side}. Give that"
                " side, or merge.sides=any to its merges, or redo=true to train it again."
            )
    for role, current in contents.items():
        if current is not None and current != recorded[role]:
            return f"its {role} {run.parents[role].name} was recomputed with other contents"
    return None


def _describe_nearest_run(run: Run) -> str | None:
    """Return how this run differs from the most similar finished run of its stage.

    For example: 'sft.steps 120 -> 200'.
    """
    changes: list[list[str]] = []
    for name in finished_names(run.runs_dir, f"{run.label}-"):
        with suppress(Malformed):  # reported where runs are listed
            manifest = read_manifest(run.runs_dir / name)
            if manifest and manifest.stage == run.config.stage:
                changes.append(describe_changes(manifest.decided_by, run.decided_by))
    fewest = min(changes, key=len, default=[])
    if fewest:
        return "changed: " + ", ".join(fewest[:3])
    return None


def make_once(
    run: Run,
    stage: Stage,
    bytes_needed: Callable[[Run], Mapping[str, int]] = lambda run: {},
    predicted_seconds: float | None = None,
    begin: Callable[[], None] | None = None,
) -> Path:
    """Return the folder of the run. Computes it unless it is finished.

    If two processes request the same run, one takes its lease and computes. The other waits and
    uses the result.

    Args:
        run: The run.
        stage: Works in the run's work folder and returns the manifest's facts.
        bytes_needed: Returns purpose -> bytes that the run will write.
        predicted_seconds: The predicted seconds, for the manifest.
        begin: Called if the run is computed, after the lease is taken. The process then does not
            wait for the lease.

    Raises:
        Held: If another process computes it, and this process is in an allocation, where it does
            not wait.
    """
    with hold_lease(run.workplace, run.name, begin is None) as lease:
        run.lease = lease.of.id
        try:
            if (latest_work_folder(run.workplace) / MANIFEST).is_file():
                lease.take_over()
                publish_run(lease, run.folder)  # killed between its manifest and its rename
            if not run.config.redo and why_not_finished(run) is None:
                check_unchanged(run.folder)
                state.remove_state(run.workplace)
                return run.folder
            if begin is not None:
                begin()
            if run.folder.exists() and getattr(read_manifest(run.folder), "hash", None) != run.hash:
                raise PipelineError(
                    f"{run.folder} has no {MANIFEST} of this run, so another made it. Move it away,"
                    " as this run needs its name."
                )
            for parent in run.parents.values():
                check_unchanged(parent.folder)
                if isinstance(parent, External) and parent.hub in read_lock(run.runs_dir).models:
                    read_lock(run.runs_dir).check_model(parent.hub)
            check_disk(run, bytes_needed(run))
            lease.take_over()
            with state.track_state(run.workplace, lease.of, run.name, run.config.stage):
                _compute_run(run, lease, stage, next_attempt(run), predicted_seconds)
            state.remove_state(run.workplace)
            return run.folder
        except OSError:
            # if another process took it over, its folder was renamed: that is the reason
            lease.check()
            raise
        finally:
            run.lease = None


def clear_workplace(run: Run) -> None:
    """Remove the lease and the state of a finished run whose process was killed after publishing.

    The work of another attempt, by redo=true, stays.
    """
    if not run.workplace.is_dir() or latest_work_folder(run.workplace) != run.workplace / UNOWNED:
        return
    with suppress(OSError):  # this user may only read runs_dir
        lease = take_lease(run.workplace)
        if not isinstance(lease, Holder):
            state.remove_state(run.workplace)
            for replaced in run.workplace.glob("*.replaced"):
                shutil.rmtree(replaced, ignore_errors=True)
            lease.release()


def _compute_run(
    run: Run, lease: Lease, stage: Stage, attempt: int, predicted_seconds: float | None
) -> None:
    from pipeline.runs import resume
    from pipeline.runs.tracking import track_run

    check_parents(run)
    earlier_seconds = resume.prepare_work_folder(run)
    begun, started = time.perf_counter(), datetime.now(UTC)
    with track_run(run, attempt) as tracker:
        facts = stage(run, run.work, tracker)
        resume.remove_resume_point(run.work)
        check_parents(run)
        parents = {}
        for role, parent in run.parents.items():
            parents[role] = Ancestor(parent.name, parent.hash, content_digest(parent))
        digests = facts.get("weights", {}).get("digests", {})
        machines = [attempt.get("machine", {}) for attempt in facts.get("resumed", ())]
        manifest = Manifest(
            name=run.name,
            hash=run.hash,
            attempt=attempt,
            decided_by=run.decided_by,
            config=recorded_config(run.config),
            parents=parents,
            facts=facts,
            files=fingerprints(run.work, known_by_tensors(run.work, digests)),
            git=git_state(),
            versions=package_versions(),
            machine=machine_facts(machines),
            environment=recorded_environment(),
            started=started.isoformat(timespec="seconds"),
            cost={
                "seconds": round(earlier_seconds + time.perf_counter() - begun, 3),
                "predicted_seconds": predicted_seconds,
                "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            },
        )
        manifest.write(run.work)
        if run.config.tracking.weights and manifest.weights:
            tracker.weights(run, manifest)
    publish_run(lease, run.folder)


def check_parents(run: Run) -> None:
    """Raise PipelineError if the files of a parent have changed since they were hashed."""
    for parent in run.parents.values():
        if isinstance(parent, External | Folder) and parent.has_changed:
            raise PipelineError(
                f"{parent.folder} was changed after {run.label} was planned, or while it"
                " read it. Rerun the same command."
            )


def publish_run(lease: Lease, folder: Path) -> None:
    """Rename the finished work folder to the run's folder, after moving an earlier attempt aside.

    Raises:
        Lost: If another process took the lease over.
    """
    work = lease.folder
    lease.check()
    old = work.with_name(f"{work.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.rename(folder, old)
    os.rename(work, folder)
    shutil.rmtree(old, ignore_errors=True)
