"""Who makes a run: one process a host, by a lock on its work folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def lock_of(work: Path) -> Any:
    """What a process on this host holds while it makes the run of a work folder."""
    from filelock import FileLock

    return FileLock(f"{work}.lock")
