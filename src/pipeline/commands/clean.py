"""Stage clean: deletes files that no finished run needs.

It only lists them unless clean.dry_run=false.

- Work folders that no process holds: what a killed run left. Those with a resume point are kept,
  unless
  clean.resume_points=true.
- Snapshots that are the parent of no finished run except the evaluations by which a select run
  ranked them: the select
  run has its choice in its own folder. A table with free_snapshots=true deletes those that it
  ranked while it runs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import CleanStage, SelectStage
from pipeline.evaluate.selection import compared
from pipeline.files import move_folder
from pipeline.runs import resume
from pipeline.runs.folders import finished_manifests, folder_of
from pipeline.runs.graph import reasons_unfinished
from pipeline.runs.lease import Holder, latest_work_folder, live_holder, take_lease
from pipeline.runs.manifest import Manifest, read_manifest, snapshot_hash
from pipeline.runs.run import Run, Snapshot
from pipeline.text import align_columns


@dataclass(frozen=True)
class Removable:
    """A folder that may be deleted, and why; step: of a snapshot."""

    folder: Path
    hash: str  # of its run; for a snapshot, of its training
    reason: str
    step: str | None = None

    @property
    def bytes(self) -> int:
        """Disk bytes that deleting it frees: files with another link stay on the disk."""
        files = []
        for path in self.folder.rglob("*"):
            if path.is_file():
                files.append(path.lstat())
        return sum(stat.st_size for stat in files if stat.st_nlink == 1)


def clean_up(config: CleanStage) -> str:
    """Delete the removable folders, or list them if clean.dry_run. Returns a table as text."""
    runs_dir = config.runs_path
    items = [
        *stale_work(runs_dir, config.clean.hours, config.clean.resume_points),
        *idle_snapshots(runs_dir),
    ]
    rows, total, count = [], 0, 0
    for item in items:
        size = item.bytes
        if config.clean.dry_run:
            problem = None
        else:
            problem = free_unless_in_use(item, runs_dir)
        rows.append((f"{size / 2**20:.1f} MB", str(item.folder), problem or item.reason))
        if problem is None:
            total, count = total + size, count + 1
    outcome = "freed"
    if config.clean.dry_run:
        outcome = "would be freed: nothing was touched, clean.dry_run=false frees it"
    return "\n".join(
        [*align_columns(rows, right={0}), f"{total / 2**20:.1f} MB in {count} folders {outcome}"]
    )


def stale_work(runs_dir: Path, hours: float, resume_points: bool) -> list[Removable]:
    """Abandoned work folders: nobody holds their lease, and nothing in them was touched within
    `hours`.
    """
    items = []
    for folder in sorted(path for path in (runs_dir / ".work").glob("*") if path.is_dir()):
        record = resume.read_resume_point(latest_work_folder(folder))
        age = (time.time() - last_touched(folder)) / 3600
        if age < hours or (record and not resume_points) or live_holder(folder):
            continue
        kind = "an unfinished run"
        if record:
            kind = f"an interrupted run, with a resume point after step {record['step']}"
        items.append(
            Removable(
                folder, folder.name.partition(".")[0], f"{kind}, untouched for {age:.0f} hours"
            )
        )
    return items


def last_touched(folder: Path) -> float:
    return max((path.lstat().st_mtime for path in [folder, *folder.rglob("*")]), default=0.0)


def idle_snapshots(runs_dir: Path) -> list[Removable]:
    """Snapshots of finished trainings that no finished run needs."""
    manifests = sorted(finished_manifests(runs_dir), key=lambda manifest: manifest.started)
    by_hash = {manifest.hash: manifest for manifest in manifests}
    selections = [manifest for manifest in manifests if manifest.stage == "select"]
    scores = parent_hashes(selections)
    inputs = parent_hashes(
        by_hash[key] for key in scores if key in by_hash
    )  # snapshots; evals of one language
    ranked = scores | inputs
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
                reason = "no run was made from it"
                if key in ranked:
                    reason = "a select run has ranked it"
                items.append(Removable(folder, training.hash, f"a snapshot: {reason}", step))
    return items


def parent_hashes(manifests: Iterable[Manifest]) -> set[str]:
    found = set()
    for manifest in manifests:
        for parent in manifest.parents.values():
            found.add(parent.hash)
    return found


def free_ranked(runs: list[Run], protected: set[str]) -> list[str]:
    """Delete the snapshots that the finished selections among a table's runs have ranked.

    Returns their names.

    Kept are the parents and candidates of unfinished runs, the parents of finished ones, and the
    hashes in `protected`.
    """
    reasons = reasons_unfinished(runs)
    rankings = {}
    for run in runs:
        if isinstance(run.config, SelectStage):
            rankings[run.hash] = compared(run)
    decided = [candidates for key, candidates in rankings.items() if key not in reasons]
    ranked = {}
    for candidates in decided:
        for snapshot in candidates:
            ranked[snapshot.hash] = snapshot.name
    waiting = [run for run in runs if run.hash in reasons]
    inputs = []
    for run in waiting:
        for parent in [*run.parents.values(), *rankings.get(run.hash, ())]:
            inputs.append(parent)
    needed_hashes = {parent.hash for parent in inputs} | protected
    deleted = []
    for item in idle_snapshots(runs[0].runs_dir) if ranked.keys() - needed_hashes else []:
        key = ""
        if item.step:
            key = snapshot_hash(item.hash, int(item.step))
        if (
            key in ranked
            and key not in needed_hashes
            and free_unless_in_use(item, runs[0].runs_dir) is None
        ):
            deleted.append(ranked[key])
    return deleted


def missing_snapshots(runs: list[Run], reasons: Container[str]) -> list[str]:
    """Names of deleted snapshots, and of runs whose weights were deleted, that unfinished runs
    need; finished trainings are not rerun. reasons: the hashes of the unfinished ones.
    """
    names = []
    parents = []
    for run in runs:
        if run.hash in reasons:
            for parent in run.parents.values():
                parents.append(parent)
    for snapshot in (parent for parent in parents if isinstance(parent, Snapshot)):
        manifest = None
        if snapshot.run.hash not in reasons:
            manifest = read_manifest(snapshot.run.folder)
        if manifest and manifest.snapshots.get(str(snapshot.step), {}).get("freed"):
            names.append(snapshot.name)
    for run in (
        parent for parent in parents if isinstance(parent, Run) and parent.hash not in reasons
    ):
        manifest = read_manifest(run.folder)
        if manifest and manifest.weights_root and not any(run.folder.glob("*.safetensors")):
            names.append(run.name)
    return list(dict.fromkeys(names))


def free_unless_in_use(item: Removable, runs_dir: Path) -> str | None:
    """Delete it; None if it was deleted, else why it was not."""
    lease = take_lease(runs_dir / ".work" / item.hash)
    if isinstance(lease, Holder):
        return f"in use: left, {item.reason}"
    try:
        delete(item)
    finally:
        lease.release()
    return None


def delete(item: Removable) -> None:
    """Delete a folder; for a snapshot, first record it in its training's manifest, so that nobody
    looks for the files.

    A folder that does not exist counts as deleted.
    """
    if item.step is not None:
        training = item.folder.parent.parent
        manifest = read_manifest(training)
        assert manifest is not None
        manifest.without_snapshot(item.step).write(training)
    doomed = item.folder.with_name(f"{item.folder.name}.freed")
    shutil.rmtree(doomed, ignore_errors=True)  # left by a clean that was killed
    with suppress(FileNotFoundError):
        move_folder(
            item.folder, doomed
        )  # so that a partly deleted folder is not taken for a complete one
        shutil.rmtree(doomed)
