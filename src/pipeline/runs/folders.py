"""Which folders of runs_dir are of which runs: one scan serves a command, and manifests are read when asked for."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.runs.manifest import MANIFEST, read_manifest

DIGITS = 8  # of a hash, in the names of folders; 12 where another run has the same eight
SETTLED_NS = 2 * 10**9  # a change within the same tick of the file system's clock as the scan would not show
_NAMED = re.compile(r".*-([0-9a-f]{8})[0-9a-f]*")


@dataclass
class Scan:
    """The names in a runs_dir as they were at `mtime_ns`: all, sorted, and by the eight digits they end in."""

    mtime_ns: int
    settled: bool
    names: list[str]
    by_digits: dict[str, list[str]] = field(default_factory=dict)


_scans: dict[str, Scan] = {}


def scan(runs_dir: Path) -> Scan:
    """The folders of runs_dir, read anew only when it has changed since: publishing a run does."""
    key = str(runs_dir)
    try:
        mtime_ns = os.stat(runs_dir).st_mtime_ns
    except OSError:
        return Scan(0, False, [])
    kept = _scans.get(key)
    if kept is None or not kept.settled or kept.mtime_ns != mtime_ns:
        names = sorted(os.listdir(runs_dir))
        kept = _scans[key] = Scan(mtime_ns, time.time_ns() - mtime_ns > SETTLED_NS, names)
        for name in names:
            if match := _NAMED.fullmatch(name):
                kept.by_digits.setdefault(match[1], []).append(name)
    return kept


def of_same_digits(run_hash: str, runs_dir: Path) -> dict[str, Path]:
    """Full hash -> folder, of the finished runs whose hash begins with the same eight digits: one, but for chance."""
    folders = [runs_dir / name for name in scan(runs_dir).by_digits.get(run_hash[:DIGITS], [])]
    found = {folder: read_manifest(folder) for folder in reversed(folders)}  # of copies the first stands
    return {manifest.hash: folder for folder, manifest in found.items() if manifest}


def folder_of(run_hash: str, runs_dir: Path) -> Path | None:
    """Where the run of this hash was published; None where it is not finished."""
    return of_same_digits(run_hash, runs_dir).get(run_hash)


def finished_names(runs_dir: Path, beginning: str = "") -> list[str]:
    """The names of the finished runs that begin so, sorted."""
    names = [name for name in scan(runs_dir).names if name.startswith(beginning)]
    return [name for name in names if (runs_dir / name / MANIFEST).is_file()]
