"""Whether a run can be written to runs_dir and the disk has room for it; which disk was full when a
write failed.
"""

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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TORCH_SIGNS = (
    "PytorchStreamWriter failed writing",
    "iostream error",
    "file write failed",
)  # without the system's error
FREE_SOME = "free some (stage=clean), or give another"
SPARE_BYTES = 64 * 2**20  # logs, tables, W&B's files


def check_writable(runs_dir: Path, create: bool = True) -> None:
    """Raise PipelineError for a folder that cannot be written; a missing one is created, or could
    be.
    """
    try:
        if create:
            runs_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=nearest_existing(runs_dir)):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise PipelineError(
                f"{error.strerror}: {', '.join(describe_disks(runs_dir))}; {FREE_SOME}"
            ) from error
        raise PipelineError(
            f"runs_dir={runs_dir} cannot be written ({error.strerror}): give another; people who"
            " share one need group rights, chmod -R g+rwsX and umask 002"
        ) from error


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_disk(run: Run, sizes: Mapping[str, int]) -> None:
    """Check that the disk has room for a run. sizes: purpose -> bytes.

    Raises:
        PipelineError: too little space; it reports what is free and what is needed for which
            purpose.
    """
    total, free = sum(sizes.values()) + SPARE_BYTES, shutil.disk_usage(run.runs_dir).free
    if free < total:
        parts = ", ".join(
            f"{size / 2**30:.1f} {purpose}" for purpose, size in sizes.items() if size
        )
        message = (
            f"{free / 2**30:.1f} GB free, about {total / 2**30:.1f} GB"
            f" needed{f' ({parts})' if parts else ''}"
        )
        remedy = "free some (stage=clean), or give another runs_dir"
        raise PipelineError(
            f"runs_dir={run.runs_dir} is too full for {run.label}: {message}; {remedy}"
        )


def disk_full_reason(error: BaseException) -> str | None:
    """Return why a write failed, if the disk is full, the quota is used up, or the file is too
    large; otherwise None.

    Looks through errors that libraries wrap.
    """
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in FULL:
            return os.strerror(error.errno)
        return None
    text = f"{error} {error.__cause__ or ''} {error.__context__ or ''}"
    if any(sign in text for sign in TORCH_SIGNS):
        return os.strerror(errno.ENOSPC)
    return next(
        (
            os.strerror(code)
            for code in FULL
            if os.strerror(code) in text or f"os error {code}" in text
        ),
        None,
    )


@contextmanager
def naming_a_full_disk(runs_dir: Path) -> Iterator[None]:
    """Inside, an error of a full disk becomes one sentence that names the disk: a failed write
    itself names no file.
    """
    try:
        yield
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None or isinstance(error, PipelineError):
            raise
        remedy = FREE_SOME
        if reason == os.strerror(errno.EFBIG):
            remedy = (
                "raise the limit of a file's size (ulimit -f), or give a folder on another file"
                " system"
            )
        raise PipelineError(
            f"{reason}: {', '.join(describe_disks(runs_dir))}; {remedy}; nothing was published"
        ) from error


def describe_disks(runs_dir: Path) -> list[str]:
    """Free space of the disks a run writes to: those without room, else both (a quota is not
    detected).
    """
    usage, full = [], []
    for knob, folder in (("runs_dir", runs_dir), ("TMPDIR", Path(gettempdir()))):
        with suppress(OSError):
            disk = os.statvfs(nearest_existing(folder))
            free, takes_files = disk.f_bavail * disk.f_frsize, disk.f_favail > 0 or not disk.f_files
            text = f"{knob}={folder} has {free / 2**30:.2f} GB free"
            usage.append(text if takes_files else f"{text}, but no room for another file (inodes)")
            if free < SPARE_BYTES or not takes_files:
                full.append(usage[-1])
    return full or usage
