"""Whether a run can be written where it is to be and the disk has room for it; which disk had none in the end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir

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


def check_disk(run: Run, sizes: Mapping[str, int]) -> None:
    """Refuse a run that the disk has no room for. needs: what for -> bytes.

    Raises:
        PipelineError: what is free, what is needed, and what for.
    """
    total, free = sum(sizes.values()) + SPARE_BYTES, shutil.disk_usage(run.runs_dir).free
    if free < total:
        parts = ", ".join(f"{size / 2**30:.1f} {purpose}" for purpose, size in sizes.items() if size)
        message = f"{free / 2**30:.1f} GB free, about {total / 2**30:.1f} GB needed{f' ({parts})' if parts else ''}"
        remedy = "free some (stage=clean), or give another runs_dir"
        raise PipelineError(f"runs_dir={run.runs_dir} is too full for {run.label}: {message}; {remedy}")


def full(error: BaseException) -> str | None:
    """Why a write failed, where the disk is full or the quota used up, as libraries wrap it too; else None."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    text = f"{error} {error.__cause__ or ''} {error.__context__ or ''}"
    codes = (errno.ENOSPC, errno.EDQUOT)
    return next((os.strerror(code) for code in codes if os.strerror(code) in text or f"os error {code}" in text), None)


@contextmanager
def naming_a_full_disk(runs_dir: Path) -> Iterator[None]:
    """Inside, an error of a full disk becomes one sentence that names the disk: a failed write itself names no file."""
    try:
        yield
    except Exception as error:
        reason = full(error)
        if reason is None or isinstance(error, PipelineError):
            raise
        raise PipelineError(
            f"{reason}: {', '.join(disks(runs_dir))}; free some (stage=clean), or give another; nothing was published"
        ) from error


def disks(runs_dir: Path) -> list[str]:
    """Where a run writes, and what is free there: of those the ones without room, else both (a quota is not seen)."""
    usage = {}
    for knob, folder in (("runs_dir", runs_dir), ("TMPDIR", Path(gettempdir()))):
        with suppress(OSError):
            usage[f"{knob}={folder}"] = shutil.disk_usage(folder).free
    least = {name: free for name, free in usage.items() if free < SPARE_BYTES} or usage
    return [f"{name} has {free / 2**30:.2f} GB free" for name, free in least.items()]
