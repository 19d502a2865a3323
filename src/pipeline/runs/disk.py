"""Whether a run can be written where it is to be, and the disk has room for it: asked before the work."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from pipeline.errors import PipelineError
from pipeline.runs.run import Run

SPARE_BYTES = 64 * 2**20  # logs, tables, W&B's files


def check_writable(runs_dir: Path) -> None:
    """Refuse a folder that takes no files; it is made where there is none."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=runs_dir):
            pass
    except OSError as error:
        raise PipelineError(
            f"runs_dir={runs_dir} cannot be written ({error.strerror}): give another; people who share one need group "
            "rights, chmod -R g+rwsX and umask 002"
        ) from error


def check_disk(run: Run, needs: Mapping[str, int]) -> None:
    """Refuse a run that the disk has no room for. needs: what for -> bytes.

    Raises:
        PipelineError: what is free, what is needed, and what for.
    """
    needed, free = sum(needs.values()) + SPARE_BYTES, shutil.disk_usage(run.runs_dir).free
    if free < needed:
        parts = ", ".join(f"{size / 2**30:.1f} {what}" for what, size in needs.items() if size)
        told = f"{free / 2**30:.1f} GB free, about {needed / 2**30:.1f} GB needed{f' ({parts})' if parts else ''}"
        remedy = "free some (stage=clean), or give another runs_dir"
        raise PipelineError(f"runs_dir={run.runs_dir} is too full for {run.label}: {told}; {remedy}")
