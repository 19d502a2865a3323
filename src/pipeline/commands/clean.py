"""Stage clean: deletes files that no finished run needs.

It only lists them unless clean.dry_run=false. Two kinds of folders are removable:

- Work folders of killed runs. Folders with a resume point are kept unless clean.resume_points=true.
- Snapshots that no finished run has as a parent. Selections, and the evaluations by which they
  ranked snapshots, do not count as such runs, because a select run keeps a copy of its choice.

A table with free_snapshots=true deletes ranked snapshots while it runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import CleanStage, SelectStage
from pipeline.errors import PipelineError
from pipeline.evaluate.selection import compared
from pipeline.runs import resume
from pipeline.runs.folders import finished_manifests, folder_of
from pipeline.runs.graph import reasons_unfinished
from pipeline.runs.lease import Holder, latest_work_folder, live_holder, take_lease
from pipeline.runs.manifest import Manifest, read_manifest, snapshot_hash
from pipeline.runs.run import Run, without_step
from pipeline.text import align_columns


@dataclass(frozen=True)
class Removable:
    """A folder that may be deleted, and why.

    `step` is the step of a snapshot.
    """

    folder: Path
    hash: str  # hash of the run; for a snapshot, of its training
    reason: str
    step: str | None = None

    @property
    def bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())


def clean_up(config: CleanStage) -> str:
    """Delete the removable folders, or list them if clean.dry_run. Return a table as text."""
    runs_dir, clean = config.runs_path, config.clean
    if not runs_dir.is_dir():
        raise PipelineError(f"runs_dir={runs_dir} is not a folder. Name the folder of the runs.")
    rows, total, count = [], 0, 0
    items = stale_work(runs_dir, clean.hours, clean.resume_points) + idle_snapshots(runs_dir)
    for item in items:
        size = item.bytes
        problem = None
        if not clean.dry_run:
            problem = free_unless_in_use(item, runs_dir)
        rows.append((megabytes(size), str(item.folder), problem or item.reason))
        if problem is None:
            total += size
            count += 1
    outcome = "freed."
    if clean.dry_run:
        outcome = "would be freed. This was a dry run: clean.dry_run=false frees them."
    lines = align_columns(rows, right={0})
    lines.append(f"{megabytes(total)} in {count} folders {outcome}")
    return "\n".join(lines)


def megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MB"


def stale_work(runs_dir: Path, hours: float, resume_points: bool) -> list[Removable]:
    """Return work folders without a live lease that have not changed for `hours`."""
    items = []
    for folder in sorted(path for path in (runs_dir / ".work").glob("*") if path.is_dir()):
        record = resume.read_resume_point(latest_work_folder(folder))
        age = (time.time() - last_touched(folder)) / 3600
        if age < hours or (record and not resume_points) or live_holder(folder):
            continue
        kind = "an unfinished run"
        if record:
            kind = f"an interrupted run, with a resume point after step {record['step']}"
        run_hash = folder.name.partition(".")[0]
        items.append(Removable(folder, run_hash, f"{kind}, untouched for {age:.0f} hours"))
    return items


def last_touched(folder: Path) -> float:
    times = [path.lstat().st_mtime for path in folder.rglob("*")]
    return max([folder.lstat().st_mtime, *times])


def idle_snapshots(runs_dir: Path) -> list[Removable]:
    """Return snapshots of finished trainings that no finished run needs."""
    manifests = sorted(finished_manifests(runs_dir), key=lambda manifest: manifest.started)
    by_hash = {manifest.hash: manifest for manifest in manifests}
    selections = [manifest for manifest in manifests if manifest.stage == "select"]
    scores = parent_hashes(selections)
    # snapshots, and evaluations in one language
    inputs = parent_hashes(by_hash[key] for key in scores & by_hash.keys())
    ranking = scores.union(manifest.hash for manifest in selections)
    ranking |= {key for key in inputs if key in by_hash and by_hash[key].stage == "eval"}
    used_hashes = parent_hashes(manifest for manifest in manifests if manifest.hash not in ranking)
    items = []
    for training in manifests:
        for step, entry in training.snapshots.items():
            key = snapshot_hash(training.hash, int(step))
            if not entry.get("freed") and key not in used_hashes:
                home = folder_of(training.hash, runs_dir) or runs_dir / training.name
                folder = home / resume.SNAPSHOTS / f"step-{step}"
                reason = "a snapshot that no other run needs"
                items.append(Removable(folder, training.hash, reason, step))
    return items


def parent_hashes(manifests: Iterable[Manifest]) -> set[str]:
    found = set()
    for manifest in manifests:
        for parent in manifest.parents.values():
            found.add(parent.hash)
    return found


def free_ranked(runs: list[Run], protected: set[str]) -> list[str]:
    """Delete the snapshots that the finished selections of a table have ranked.

    Parents and candidates of unfinished runs, parents of finished runs, and the hashes in
    `protected` are kept.

    Returns the names of the deleted snapshots.
    """
    reasons = reasons_unfinished(runs)
    ranked: dict[str, str] = {}
    needed_hashes = set(protected)
    for run in runs:
        candidates = compared(run) if isinstance(run.config, SelectStage) else []
        if run.hash in reasons:
            for needed in [*run.parents.values(), *candidates]:
                needed_hashes.add(needed.hash)
        else:
            ranked |= {snapshot.hash: snapshot.name for snapshot in candidates}
    doomed = ranked.keys() - needed_hashes
    if not doomed:
        return []
    deleted = []
    runs_dir = runs[0].runs_dir
    for item in idle_snapshots(runs_dir):
        key = ""
        if item.step:
            key = snapshot_hash(item.hash, int(item.step))
        if key in doomed and free_unless_in_use(item, runs_dir) is None:
            deleted.append(ranked[key])
    return deleted


def missing_snapshots(runs: list[Run], reasons: Container[str]) -> list[str]:
    """Return the names of deleted models that unfinished runs need.

    These are deleted snapshots, and runs whose weights were deleted. Finished trainings are not run
    again.

    `reasons` has the hashes of the unfinished runs.
    """
    names = []
    for run in runs:
        if run.hash not in reasons:
            continue
        for parent in run.parents.values():
            training = without_step(parent)
            if not isinstance(training, Run) or training.hash in reasons:
                continue
            manifest = read_manifest(parent.folder)
            has_weights = any(parent.folder.glob("*.safetensors"))
            if manifest and manifest.weights_root and not has_weights:
                names.append(parent.name)
    return list(dict.fromkeys(names))


def free_unless_in_use(item: Removable, runs_dir: Path) -> str | None:
    """Delete a folder. Return None, or why it was not deleted."""
    lease = take_lease(runs_dir / ".work" / item.hash)
    if isinstance(lease, Holder):
        return f"in use: left, {item.reason}"
    try:
        delete(item)
    finally:
        lease.release()
    return None


def delete(item: Removable) -> None:
    """Delete a folder that may be missing already.

    The deletion of a snapshot is recorded first in its training's manifest, so that its files are
    not looked for later.
    """
    if item.step is not None:
        training = item.folder.parent.parent
        manifest = read_manifest(training)
        assert manifest is not None
        manifest.without_snapshot(item.step).write(training)
    doomed = item.folder.with_name(f"{item.folder.name}.freed")
    shutil.rmtree(doomed, ignore_errors=True)  # left by a clean that was killed
    with suppress(FileNotFoundError):
        os.rename(item.folder, doomed)  # a partly deleted folder must not look complete
        shutil.rmtree(doomed)
