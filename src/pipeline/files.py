"""Files: written at once or not at all, and known by their digests."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

UNHASHED_FILES = ("wandb/",)  # tracking writes there; results are elsewhere


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Size, time and sha256 of each file that counts as a result."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(UNHASHED_FILES):
            stat = path.stat()
            found[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256(path)}
    return found


@lru_cache(maxsize=256)
def _cached_sha256(path: Path, size: int, mtime_ns: int) -> str:
    return sha256(path)


def content_hash(paths: list[Path], root: Path) -> str:
    """One digest over named files: the identity of what no run of ours made."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {_cached_sha256(path, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()
