"""Stage clean: free what no finished run needs. It only tells, until clean.dry_run=false.

- Work folders of runs that nobody is making: what a killed run left. One with a resume point stays, unless
  clean.resume_points=true.
- Snapshots that nothing was made from but evaluations by which a select run ranked them: its choice lives on in its
  own folder. A table with free_snapshots=true frees those that it ranked itself, as it goes on.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import CleanStage, SelectStage
from pipeline.evaluate.selection import compared
from pipeline.files import move
from pipeline.report.render.text import aligned
from pipeline.runs import resume
from pipeline.runs.folders import finished, of_same_digits
from pipeline.runs.graph import unfinished
from pipeline.runs.lease import Holder, holder, left, take
from pipeline.runs.manifest import read_manifest, snapshot_hash
from pipeline.runs.run import Run, Snapshot


@dataclass(frozen=True)
class Removable:
    """Something to free: a folder, why it may go, and its training where it is a snapshot."""

    folder: Path
    hash: str  # of the run that it is of
    reason: str
    step: str | None = None

    @property
    def bytes(self) -> int:
        """What freeing it gives back: files that have another link stay on the disk."""
        files = [path.lstat() for path in self.folder.rglob("*") if path.is_file()]
        return sum(stat.st_size for stat in files if stat.st_nlink == 1)


def clean_up(config: CleanStage) -> str:
    """Free, or tell what would be freed; a table in text."""
    runs_dir = Path(config.runs_dir)
    items = [*stale_work(runs_dir, config.clean.hours, config.clean.resume_points), *idle_snapshots(runs_dir)]
    rows, total, count = [], 0, 0
    for item in items:
        size = item.bytes
        left = None if config.clean.dry_run else free_unless_in_use(item, runs_dir)
        rows.append((f"{size / 2**20:.1f} MB", str(item.folder), left or item.reason))
        if left is None:
            total, count = total + size, count + 1
    said = "would be freed: nothing was touched, clean.dry_run=false frees it" if config.clean.dry_run else "freed"
    return "\n".join([*aligned(rows, right={0}), f"{total / 2**20:.1f} MB in {count} folders {said}"])


def stale_work(runs_dir: Path, hours: float, resume_points: bool) -> list[Removable]:
    """Workplaces that were left behind: nobody holds their lease, and nothing in them is younger than `hours`."""
    found = []
    for folder in sorted(path for path in (runs_dir / ".work").glob("*") if path.is_dir()):
        record = resume.read(left(folder))
        age = (time.time() - last_touched(folder)) / 3600
        if age < hours or (record is not None and not resume_points):
            continue
        if holder(folder):
            continue
        kind = f"an interrupted run, with a resume point after step {record['step']}" if record else "an unfinished run"
        found.append(Removable(folder, folder.name.partition(".")[0], f"{kind}, untouched for {age:.0f} hours"))
    return found


def last_touched(folder: Path) -> float:
    return max((path.lstat().st_mtime for path in [folder, *folder.rglob("*")]), default=0.0)


def idle_snapshots(runs_dir: Path) -> list[Removable]:
    """Snapshots of finished trainings that no finished run needs any more."""
    manifests = sorted(finished(runs_dir), key=lambda manifest: manifest.started)
    by_hash = {manifest.hash: manifest for manifest in manifests}
    ranked, ranking = set(), set()  # snapshots that select runs compared; the evaluations that they did it by
    for manifest in manifests:
        if manifest.stage == "select":
            parents = {parent.hash for parent in manifest.parents.values()}
            ranking |= {manifest.hash, *parents}
            scored = [by_hash[parent].parents for parent in parents if parent in by_hash]
            behind = {parent.hash for one in scored for parent in one.values()}  # snapshots, and scores a language each
            ranking |= {one for one in behind if one in by_hash and by_hash[one].stage == "eval"}
            ranked |= parents | behind
    others = [manifest for manifest in manifests if manifest.hash not in ranking]
    used = {parent.hash for manifest in others for parent in manifest.parents.values()}
    found = []
    for training in manifests:
        for step, entry in training.snapshots.items():
            here = snapshot_hash(training.hash, int(step))
            if not entry.get("freed") and here not in used:
                home = of_same_digits(training.hash, runs_dir)[training.hash]
                folder = home / resume.SNAPSHOTS / f"step-{step}"
                reason = "a select run has ranked it" if here in ranked else "no run was made from it"
                found.append(Removable(folder, training.hash, f"a snapshot: {reason}", step))
    return found


def free_ranked(runs: list[Run], kept: set[str]) -> list[str]:
    """Free the snapshots that the finished selections among a table's runs have ranked; gives their names.

    Those stay that a run still to be made is of or ranks, that a finished one was made from, and the hashes in `kept`.
    """
    left = unfinished(runs)
    rankings = {run.hash: compared(run) for run in runs if isinstance(run.config, SelectStage)}
    ranked = {one.hash: one.name for key, found in rankings.items() if key not in left for one in found}
    waiting = [run for run in runs if run.hash in left]
    needed = {one.hash for run in waiting for one in [*run.parents.values(), *rankings.get(run.hash, ())]} | kept
    freed = []
    for item in idle_snapshots(runs[0].runs_dir) if ranked.keys() - needed else []:
        one = snapshot_hash(item.hash, int(item.step)) if item.step else ""
        if one in ranked and one not in needed and free_unless_in_use(item, runs[0].runs_dir) is None:
            freed.append(ranked[one])
    return freed


def freed_needed(runs: list[Run]) -> list[str]:
    """The snapshots that runs still to be made need, and that were freed: their trainings are not made again."""
    left, found = unfinished(runs), []
    for one in (one for run in runs if run.hash in left for one in run.parents.values() if isinstance(one, Snapshot)):
        manifest = read_manifest(one.run.folder) if one.run.hash not in left else None
        if manifest and manifest.snapshots.get(str(one.step), {}).get("freed"):
            found.append(one.name)
    return list(dict.fromkeys(found))


def free_unless_in_use(item: Removable, runs_dir: Path) -> str | None:
    """None where it is freed, else why it is left."""
    lease = take(runs_dir / ".work" / item.hash)
    if isinstance(lease, Holder):
        return f"in use: left, {item.reason}"
    try:
        free(item)
    finally:
        lease.release()
    return None


def free(item: Removable) -> None:
    """Remove a folder; of a snapshot, tell its training's manifest first, so that nobody misses the files.

    A folder that is gone already counts as freed.
    """
    if item.step is not None:
        training = item.folder.parent.parent
        manifest = read_manifest(training)
        assert manifest is not None
        manifest.without_snapshot(item.step).write(training)
    aside = item.folder.with_name(f"{item.folder.name}.freed")
    shutil.rmtree(aside, ignore_errors=True)  # of a clean that was killed
    with suppress(FileNotFoundError):
        move(item.folder, aside)  # so that what is half removed is not taken for whole
        shutil.rmtree(aside)
