"""The folders of runs in runs_dir. One scan serves a command; manifests are read when needed."""

from __future__ import annotations

import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.files import SETTLED_NS
from pipeline.runs.manifest import MANIFEST, Malformed, Manifest, read_file, read_manifest

DIGITS = 12  # of the hash in a folder's name; 10,000 runs have a clash with probability 2e-7
_FOLDER_NAME = re.compile(rf"(.*)-([0-9a-f]{{{DIGITS}}})")


@dataclass
class Scan:
    """The names in a runs_dir at `mtime_ns`.

    Attributes:
        settled: True if a later change will change the mtime. Otherwise a change could fall within
            the same tick of the file system's clock.
        names: All names, sorted.
        by_digits: The names by the digits at their end.
        places: (label, full hash) -> the folder, for runs that were looked up.
    """

    mtime_ns: int
    settled: bool
    names: list[str]
    by_digits: dict[str, list[str]] = field(default_factory=dict)
    places: dict[tuple[str, str], Path] = field(default_factory=dict)


_scans: dict[str, Scan] = {}


def scan_folders(runs_dir: Path) -> Scan:
    """Return the folders of runs_dir. They are listed again only after runs_dir has changed."""
    key = str(runs_dir)
    try:
        mtime_ns = os.stat(f"{key}/").st_mtime_ns
    except OSError:
        mtime_ns = 0  # not there yet, or a file: runs/disk.py refuses it
    cached = _scans.get(key)
    if cached is None or not cached.settled or cached.mtime_ns != mtime_ns:
        names: list[str] = []
        if mtime_ns:
            names = sorted(os.listdir(key))
        if cached is not None and cached.names == names:
            grouped = cached.by_digits
        else:
            grouped = by_digits(names)
        settled = time.time_ns() - mtime_ns > SETTLED_NS
        _scans[key] = Scan(mtime_ns, settled, names, grouped)
    return _scans[key]


def by_digits(names: list[str]) -> dict[str, list[str]]:
    """Group run names by the digits at their end."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        match = _FOLDER_NAME.fullmatch(name)
        if match:
            grouped.setdefault(match[2], []).append(name)
    return grouped


def folder_name(label: str, run_hash: str) -> str:
    """Return the name of a run's folder."""
    return f"{label}-{run_hash[:DIGITS]}"


def label_in(name: str) -> str:
    """Return the label in the name of a run's folder, or the whole name of another folder."""
    match = _FOLDER_NAME.fullmatch(name)
    if match:
        return match[1]
    return name


def folder_of(run_hash: str, runs_dir: Path) -> Path | None:
    """Return the folder of the finished run with this hash, or None if there is no such run."""
    names = scan_folders(runs_dir).by_digits.get(run_hash[:DIGITS], [])
    for name in names:
        with suppress(Malformed):  # the reader of this run reports it
            manifest = read_manifest(runs_dir / name)
            if manifest and manifest.hash == run_hash:
                return runs_dir / name
    return None


def place_of(label: str, run_hash: str, runs_dir: Path) -> Path:
    """Return the folder of a finished run, found by its hash, or the folder where it will be.

    The label may have changed since the run was finished.
    """
    listing = scan_folders(runs_dir)
    folder = listing.places.get((label, run_hash))
    if folder:
        return folder
    folder = folder_of(run_hash, runs_dir) or runs_dir / folder_name(label, run_hash)
    if listing.settled:
        listing.places[label, run_hash] = folder
    return folder


def finished_names(runs_dir: Path, beginning: str = "") -> list[str]:
    """Return the sorted names of finished runs that begin with `beginning`."""
    names = scan_folders(runs_dir).names
    first = bisect_left(names, beginning)
    end = bisect_left(names, f"{beginning}{chr(sys.maxunicode)}")
    return [name for name in names[first:end] if (runs_dir / name / MANIFEST).is_file()]


def finished_manifests(runs_dir: Path) -> Iterator[Manifest]:
    """Yield the manifests of all finished runs, so that 10,000 need not fit in memory.

    A malformed manifest is skipped and reported on standard error.
    """
    for name in finished_names(runs_dir):
        try:
            yield read_file(runs_dir / name / MANIFEST)
        except Malformed as error:
            print(f"skipped: {error}", file=sys.stderr)
