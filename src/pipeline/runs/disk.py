"""Checks that a run can be written to runs_dir."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from pipeline.errors import PipelineError
from pipeline.runs.run import Run

SPARE_BYTES = 64 * 2**20  # logs, tables, W&B's files


def check_writable(runs_dir: Path, create: bool = True) -> None:
    """Raise PipelineError for a folder that cannot be written.

    With `create`, a missing folder is created. Otherwise it is only checked that it could be.
    """
    try:
        if create:
            runs_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=nearest_existing(runs_dir)):
            pass
    except OSError as error:
        raise PipelineError(
            f"runs_dir={runs_dir} cannot be written ({error.strerror}). Give another. People"
            " who share it need group rights: chmod -R g+rwsX, umask 002."
        ) from error


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_disk(run: Run, sizes: Mapping[str, int]) -> None:
    """Check that the disk has room for a run.

    `sizes` has the bytes of each purpose.

    Raises:
        PipelineError: If there is too little space. It reports the free and the needed space.
    """
    needed = sum(sizes.values()) + SPARE_BYTES
    free = shutil.disk_usage(run.runs_dir).free
    if free < needed:
        parts = [f"{gigabytes(SPARE_BYTES)} spare"]
        parts += [f"{gigabytes(size)} {purpose}" for purpose, size in sizes.items()]
        raise PipelineError(
            f"runs_dir={run.runs_dir} is too full for {run.label}: {gigabytes(free)} GB free, about"
            f" {gigabytes(needed)} GB needed ({', '.join(parts)}); free some (stage=clean), or give"
            " another runs_dir"
        )


def gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f}"
