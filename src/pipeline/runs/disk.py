"""Checks that a run can be written to runs_dir, and errors that name the full disk."""

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
# messages of torch without the system's error
TORCH_SIGNS = (
    "PytorchStreamWriter failed writing",
    "iostream error",
    "file write failed",
)
FREE_SOME = "free some (stage=clean), or give another"
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
        if error.errno in FULL:
            raise PipelineError(
                f"{error.strerror}: {', '.join(describe_disks(runs_dir))}; {FREE_SOME}"
            ) from error
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
            f" {gigabytes(needed)} GB needed ({', '.join(parts)}); {FREE_SOME} runs_dir"
        )


def gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f}"


def disk_full_reason(error: BaseException) -> str | None:
    """Return why a write failed: a full disk, a used-up quota, or a file that is too large.

    None for other errors. Libraries wrap the system's errors, so that texts are compared.
    """
    text = f"{error} {error.__cause__ or ''} {error.__context__ or ''}"
    for code in FULL:
        if os.strerror(code) in text or f"os error {code}" in text:
            return os.strerror(code)
    if any(sign in text for sign in TORCH_SIGNS):
        return os.strerror(errno.ENOSPC)
    return None


@contextmanager
def naming_a_full_disk(runs_dir: Path) -> Iterator[None]:
    """Inside, turn an error of a full disk into a sentence that names the disk.

    The error of a failed write does not name its file.
    """
    try:
        yield
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None or isinstance(error, PipelineError):
            raise
        raise PipelineError(
            f"{reason}: {', '.join(describe_disks(runs_dir))}; {FREE_SOME} runs_dir; nothing was"
            " published"
        ) from error


def describe_disks(runs_dir: Path) -> list[str]:
    """Return the free space of the disks that a run writes to. A quota is not detected."""
    texts = []
    for knob, folder in (("runs_dir", runs_dir), ("TMPDIR", Path(gettempdir()))):
        with suppress(OSError):
            free = shutil.disk_usage(nearest_existing(folder)).free
            texts.append(f"{knob}={folder} has {gigabytes(free)} GB free")
    return texts
