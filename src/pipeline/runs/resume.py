"""The resume point of a run in work: what it holds, whether it may be used, what of the work folder it keeps.

One a run. It lies in the work folder as `resume/step-<N>`, and `resume.json`, written last, names it, the sizes of its
files and the snapshots made so far. What `resume.json` does not name is never used, so a half-written one cannot be.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.runs.lease import holder, left
from pipeline.runs.run import Run, changes
from pipeline.runs.unchanged import content, next_attempt

RECORD, FOLDER, SNAPSHOTS = "resume.json", "resume", "snapshots"


def made_for(run: Run) -> dict[str, Any]:
    """What a resume point is of: the run, its attempt, and the contents of its parents."""
    parents = {role: content(parent) for role, parent in sorted(run.parents.items())}
    return {"hash": run.hash, "attempt": next_attempt(run), "parents": parents}


def write(run: Run, finished: Path, step: int, facts: dict[str, Any]) -> None:
    """Make the finished folder `beside` the run's one resume point: to the disk, then into its place, then named."""
    folder = run.work / FOLDER / f"step-{step}"
    sizes = {}
    for path in sorted(path for path in finished.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(finished).as_posix()] = path.stat().st_size
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    os.rename(finished, folder)
    identity = {"label": run.label, "decided_by": run.decided_by}
    record = {"of": made_for(run), **identity, "step": step, "files": sizes, **facts}
    write_atomically(run.work / RECORD, json.dumps(without_credentials(record)))
    for older in folder.parent.iterdir():
        if older != folder:
            shutil.rmtree(older)


def read(work: Path) -> dict[str, Any] | None:
    """The record of a resume point whose files are all there in full, else None."""
    try:
        record = json.loads((work / RECORD).read_text(encoding="utf-8"))
        folder = point(work, record)
        complete = all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return record if complete else None


def usable(run: Run) -> dict[str, Any] | None:
    """The record of a resume point of this very run, attempt and parents, else None."""
    record = read(run.work)
    return record if record is not None and record["of"] == made_for(run) else None


def point(work: Path, record: dict[str, Any]) -> Path:
    return work / FOLDER / f"step-{record['step']}"


def begin(run: Run) -> float:
    """An empty work folder, but for what a usable resume point needs. Gives the seconds that went into that."""
    record = usable(run)
    if record is None:
        tell_of_others(run)
        shutil.rmtree(run.work, ignore_errors=True)
        run.work.mkdir(parents=True)
        return 0.0
    snapshots_kept = {run.work / SNAPSHOTS / f"step-{step}" for step in record["snapshots"]}
    snapshots_kept |= {point(run.work, record), run.work / RECORD, run.work / FOLDER, run.work / SNAPSHOTS}
    parts_found = [path for part in (FOLDER, SNAPSHOTS) for path in (run.work / part).glob("*")]
    for path in {*run.work.iterdir(), *parts_found} - snapshots_kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return float(record["seconds"])


def tell_of_others(run: Run) -> None:
    """A run that begins anew says so where one of its label, interrupted, could go on: a knob may have slipped."""
    for workplace in sorted(path for path in run.workplace.parent.glob("*") if path.is_dir()):
        record = read(work := left(workplace)) if workplace != run.workplace else None
        if record is None or record.get("label") != run.label or holder(workplace):
            continue
        differ = ", ".join(changes(record["decided_by"], run.decided_by))
        print(
            f"{run.name} begins anew: an unfinished {run.label} differs in {differ}; its resume point after step "
            f"{record['step']} stays in {work}",
            file=sys.stderr,
        )


def forget(work: Path) -> None:
    """Remove the resume point: first its record, so that what is half removed is not used."""
    (work / RECORD).unlink(missing_ok=True)
    shutil.rmtree(work / FOLDER, ignore_errors=True)
