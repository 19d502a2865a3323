"""Which folders of runs_dir are of which runs: one scan serves a command, and manifests are read when asked for."""

from __future__ import annotations

import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

from pipeline.files import SETTLED_NS
from pipeline.runs.manifest import MANIFEST, Malformed, Manifest, read_file, read_manifest

DIGITS = (8, 12, 64)  # of a hash, in the names of folders: more where another run has the same
_NAMED = re.compile(r"(.*)-([0-9a-f]{8})([0-9a-f]{4}|[0-9a-f]{56})?")


@dataclass
class Scan:
    """The names in a runs_dir as they were at `mtime_ns`: all, sorted, and by the eight digits they end in.

    `places`: full hash -> folder of those that were looked up.
    """

    mtime_ns: int
    settled: bool  # else a change within the same tick of the file system's clock would not show
    names: list[str]
    by_digits: dict[str, list[str]] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)


_scans: dict[str, Scan] = {}


def scan(runs_dir: Path) -> Scan:
    """The folders of runs_dir, read anew only when it has changed since: publishing a run does."""
    key = str(runs_dir)
    try:
        mtime_ns = os.stat(runs_dir).st_mtime_ns
    except OSError:
        return Scan(0, False, [])
    cached = _scans.get(key)
    if cached is None or not cached.settled or cached.mtime_ns != mtime_ns:
        names, settled = sorted(os.listdir(runs_dir)), time.time_ns() - mtime_ns > SETTLED_NS
        same = cached is not None and cached.names == names
        _scans[key] = Scan(mtime_ns, settled, names, cached.by_digits if cached and same else by_digits(names))
    return _scans[key]


def by_digits(names: list[str]) -> dict[str, list[str]]:
    """The eight digits that names of runs end in -> these names."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        if match := _NAMED.fullmatch(name):
            grouped.setdefault(match[2], []).append(name)
    return grouped


def folder_name(label: str, run_hash: str, digits: int = DIGITS[0]) -> str:
    """The name of a run's folder."""
    return f"{label}-{run_hash[:digits]}"


def label_in(name: str) -> str:
    """The label that the name of a run's folder begins with; of another name all of it."""
    match = _NAMED.fullmatch(name)
    return match[1] if match else name


def of_same_digits(run_hash: str, runs_dir: Path) -> dict[str, Path]:
    """Full hash -> folder, of the finished runs whose hash begins with the same eight digits: one, but for chance."""
    folders = {}
    for name in reversed(scan(runs_dir).by_digits.get(run_hash[: DIGITS[0]], [])):  # of copies the first stands
        with suppress(Malformed):  # refused where it is read
            if manifest := read_manifest(runs_dir / name):
                folders[manifest.hash] = runs_dir / name
    return folders


def folder_of(run_hash: str, runs_dir: Path) -> Path | None:
    """Where the run of this hash was published; None where it is not finished."""
    return of_same_digits(run_hash, runs_dir).get(run_hash)


def place_of(label: str, run_hash: str, runs_dir: Path) -> Path:
    """Where a run is, by its hash, so that a label may change; else where it will be."""
    listing = scan(runs_dir)
    if run_hash in listing.places:
        return listing.places[run_hash]
    published = of_same_digits(run_hash, runs_dir)
    if run_hash in published:
        if listing.settled:  # else it is listed anew next time
            listing.places[run_hash] = published[run_hash]
        return published[run_hash]
    used_digits = {folder.name.rpartition("-")[2] for folder in published.values()}
    digits = next(count for count in DIGITS if run_hash[:count] not in used_digits)
    return runs_dir / folder_name(label, run_hash, digits)


def finished_names(runs_dir: Path, beginning: str = "") -> list[str]:
    """The names of the finished runs that begin so, sorted."""
    names = scan(runs_dir).names
    first = bisect_left(names, beginning)
    matching = takewhile(lambda name: name.startswith(beginning), islice(names, first, None))
    return [name for name in matching if (runs_dir / name / MANIFEST).is_file()]


def finished(runs_dir: Path) -> Iterator[Manifest]:
    """The manifests of all finished runs, one after the other, so that 10,000 need not fit in memory at once.

    A malformed one is named on standard error and left out.
    """
    for name in finished_names(runs_dir):
        try:
            yield read_file(runs_dir / name / MANIFEST)
        except Malformed as error:
            print(f"left out: {error}", file=sys.stderr)
