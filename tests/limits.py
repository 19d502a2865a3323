"""Full disks, large files, and processes that other processes have started (Linux)."""

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a separate file system, which only root may do."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Inside, the disk has no room."""
    ballast = disk / "ballast"
    try:
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        yield
    finally:
        ballast.unlink()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Inside, no file may have more bytes, as with ulimit -f."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def tree(pid: int) -> list[int]:
    """Return a process and all processes that it started, the process first."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(word) for word in path.read_text().split()]
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, or an empty text if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
