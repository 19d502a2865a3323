"""The resume point of an unfinished run: its content, whether it is usable, and its work files.

A run has a single resume point, in the work folder as `resume/step-<N>`. `resume.json` is written
last. It names the folder, the sizes of its files and the snapshots made so far. Files that
`resume.json` does not name are never used, so a half-written resume point is never used.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.runs.run import Run
from pipeline.runs.unchanged import content_digest, next_attempt

RECORD, FOLDER, SNAPSHOTS = "resume.json", "resume", "snapshots"


def resume_identity(run: Run) -> dict[str, Any]:
    """Return the identity of a resume point: the run, its attempt, and its parents' contents."""
    parents = {role: content_digest(parent) for role, parent in sorted(run.parents.items())}
    return {"hash": run.hash, "attempt": next_attempt(run), "parents": parents}


def write_resume_point(run: Run, finished: Path, step: int, facts: dict[str, Any]) -> None:
    """Make a folder the run's resume point: flush it to disk, rename it, then write the record.

    The run resumes after `step`. `facts` has further entries of the record.
    """
    folder = run.work / FOLDER / f"step-{step}"
    sizes = {}
    for path in sorted(finished.rglob("*")):
        if not path.is_file():
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(finished).as_posix()] = path.stat().st_size
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    os.rename(finished, folder)
    record = {"of": resume_identity(run), "step": step, "files": sizes, **facts}
    write_atomically(run.work / RECORD, json.dumps(without_credentials(record)))
    for older in folder.parent.iterdir():
        if older != folder:
            shutil.rmtree(older)


def read_resume_point(work: Path) -> dict[str, Any] | None:
    """Return the record of a resume point if all its files are complete, otherwise None."""
    try:
        record = json.loads((work / RECORD).read_text(encoding="utf-8"))
        folder = resume_folder(work, record)
        for name, size in record["files"].items():
            if (folder / name).stat().st_size != size:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return record


def usable_resume_point(run: Run) -> dict[str, Any] | None:
    """Return the record of a resume point of the same run, attempt and parents, otherwise None."""
    record = read_resume_point(run.work)
    if record is not None and record["of"] == resume_identity(run):
        return record
    return None


def resume_folder(work: Path, record: dict[str, Any]) -> Path:
    return work / FOLDER / f"step-{record['step']}"


def prepare_work_folder(run: Run) -> float:
    """Empty the work folder, except for the files of a usable resume point.

    Returns the seconds spent before that point.
    """
    record = usable_resume_point(run)
    if record is None:
        shutil.rmtree(run.work, ignore_errors=True)
        run.work.mkdir(parents=True)
        return 0.0
    points, snapshots = run.work / FOLDER, run.work / SNAPSHOTS
    needed_paths = {snapshots / f"step-{step}" for step in record["snapshots"]}
    needed_paths |= {resume_folder(run.work, record), run.work / RECORD, points, snapshots}
    paths = {*run.work.iterdir(), *points.glob("*"), *snapshots.glob("*")}
    for path in paths - needed_paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return float(record["seconds"])


def remove_resume_point(work: Path) -> None:
    """Remove the resume point, its record first, so that a partial one is never used."""
    (work / RECORD).unlink(missing_ok=True)
    shutil.rmtree(work / FOLDER, ignore_errors=True)
