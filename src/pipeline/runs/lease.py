"""Who makes a run: one process, by a lease file with a heartbeat, without locks, which do not reach across nodes.

`runs_dir/.work/<hash>/` holds the leases `lease-1`, `lease-2`, ... of which the highest counts, and a work folder for
each, named by the lease's own random id: nobody can write into another's. Taking is creating the next number, which a
file system does for one process only (O_EXCL, also on NFS and Lustre). What a dead owner left is taken over by renaming
its folder, so that the owner, if it lives after all, finds nothing to write into or to publish.

An owner is dead when its process on this machine is gone, or when its lease was not touched for DEAD_AFTER seconds by
the clock of the file system: that of a file touched now. Where clients set the times of files by their own clocks, as
Lustre's do, one that is off looks dead so; before a lease is taken from another machine, it is watched for two beats.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from pipeline.errors import Held
from pipeline.files import move_folder

BEAT = 10.0  # seconds between two touches of a lease
DEAD_AFTER = 120.0  # longer than clients of NFS keep a time in their caches (60 s)
LOOK = 0.5  # seconds between two looks of a process that waits
LEASE = "lease-"
RELEASED = "released"  # what a lease says that was given back: its number is not used again while work is left here
UNOWNED = "work"  # the work folder of who has no lease: of tests, and of benchmarks


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. machine: what tells that a process id means the same here; began: when its process did."""

    id: str
    host: str
    pid: int
    job: str | None
    since: str
    machine: str
    began: str

    def __str__(self) -> str:
        return f"{f'job {self.job}' if self.job else f'process {self.pid}'} on {self.host} since {self.since}"


@lru_cache(maxsize=1)
def this_boot() -> str:
    """The boot of this machine and the name space of process ids; empty where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def began(pid: int) -> str:
    """When a process began, in ticks since the boot; empty where there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def job() -> str | None:
    """The Slurm job that this process is of."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def me() -> Holder:
    pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(secrets.token_hex(4), socket.gethostname(), pid, job(), now, this_boot(), began(pid))


def numbers(workplace: Path) -> list[int]:
    """Those of the leases in a workplace, sorted."""
    with suppress(FileNotFoundError):
        names = (name.removeprefix(LEASE) for name in os.listdir(workplace) if name.startswith(LEASE))
        return sorted(int(name) for name in names if name.isdigit())
    return []


def holder(workplace: Path) -> Holder | None:
    """Who makes the run of this workplace now; None where nobody that lives does."""
    lease_numbers = numbers(workplace)
    return living(workplace / f"{LEASE}{lease_numbers[-1]}") if lease_numbers else None


def living(lease: Path) -> Holder | None:
    try:
        touched, text = lease.stat().st_mtime, lease.read_text()
    except FileNotFoundError:
        return None
    if text.startswith(RELEASED):
        return None
    try:
        owner = Holder(**json.loads(text))
    except (ValueError, TypeError):  # created this moment, or by a process that died in between
        owner = Holder("", "a host that has not said its name", 0, None, "a moment ago", "", "")
    if owner.machine and owner.machine == this_boot():
        return owner if owner.began == began(owner.pid) else None
    return owner if now_at(lease.parent) - touched < DEAD_AFTER else None


def stirring(lease: Path) -> Holder | None:
    """The holder of a lease that looks dead, where it is touched while this process watches."""
    try:
        text, touched = lease.read_text(), lease.stat().st_mtime_ns
        owner = Holder(**json.loads(text))
    except (FileNotFoundError, ValueError, TypeError):  # given back, or never written
        return None
    deadline = time.monotonic() + 2 * BEAT
    while owner.machine != this_boot() and time.monotonic() < deadline:
        time.sleep(LOOK)
        try:
            if lease.stat().st_mtime_ns != touched:
                return owner
        except FileNotFoundError:  # another was first
            return None
    return None


def now_at(workplace: Path) -> float:
    """The time by the clock of the file system, which may not be this machine's."""
    probe = workplace / f"now-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except (FileNotFoundError, PermissionError):  # the run was published; one who may only read asks for its state
        return time.time()
    finally:
        with suppress(PermissionError):
            probe.unlink(missing_ok=True)


def left(workplace: Path) -> Path:
    """The work folder that an owner left: the last touched, where there are several."""
    with suppress(FileNotFoundError):
        folders = [path for path in workplace.iterdir() if path.is_dir() and "." not in path.name]
        if folders:
            return max(folders, key=lambda path: path.stat().st_mtime_ns)
    return workplace / UNOWNED


class Lost(Held):
    """Another process took this one for dead and makes the run."""


class Lease:
    """The right to make a run. `folder`: where its work is done."""

    def __init__(self, workplace: Path, number: int, of: Holder) -> None:
        self.workplace, self.number, self.of = workplace, number, of
        self.file, self.folder = workplace / f"{LEASE}{number}", workplace / of.id
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):  # a file system that is away for a moment; one that took the lease is seen by check
                os.utime(self.file)

    def take_over(self) -> None:
        """Make what an owner before left the work folder of this lease; an empty one where there was nothing."""
        work = left(self.workplace)
        try:
            move_folder(work, self.folder)
        except FileNotFoundError:
            self.folder.mkdir()
        for path in self.workplace.iterdir():
            if path.is_dir() and path != self.folder:
                shutil.rmtree(path, ignore_errors=True)

    def check(self) -> None:
        """Raise Lost unless this lease still counts."""
        try:
            text = self.file.read_text()
            is_mine = bool(text) and json.loads(text)["id"] == self.of.id
        except (FileNotFoundError, ValueError):
            is_mine = False
        if not is_mine or numbers(self.workplace)[-1:] != [self.number]:
            hint = f"; now held by {owner}" if (owner := holder(self.workplace)) else ""
            raise Lost(f"{self.folder} was taken over: this process gave no sign for {DEAD_AFTER:.0f} s{hint}")

    def release(self) -> None:
        self._over.set()
        with suppress(Lost, OSError):
            self.check()
            if any(not path.name.startswith(LEASE) for path in self.workplace.iterdir()):
                # else who saw it dead and who sees nothing take different numbers
                with open(self.file, "r+", encoding="utf-8") as file:  # in place: a full disk has no room for a new one
                    file.write(RELEASED)
                    file.truncate()
            else:
                self.file.unlink()
                self.workplace.rmdir()


def take(workplace: Path) -> Lease | Holder:
    """The lease of a run, or who holds it."""
    while True:
        workplace.mkdir(parents=True, exist_ok=True)
        earlier = numbers(workplace)
        if earlier and (owner := living(last := workplace / f"{LEASE}{earlier[-1]}") or stirring(last)):
            return owner
        number, holder_here = (earlier[-1] if earlier else 0) + 1, me()
        file = workplace / f"{LEASE}{number}"
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(json.dumps(asdict(holder_here)))
        except (FileExistsError, FileNotFoundError):  # another was first, or has finished and removed the workplace
            continue
        except OSError:  # a full disk: an empty lease would count as somebody's
            file.unlink(missing_ok=True)
            raise
        if numbers(workplace)[-1:] != [number]:  # a later one was there already when this number became free
            file.unlink(missing_ok=True)
            continue
        for old in earlier:
            (workplace / f"{LEASE}{old}").unlink(missing_ok=True)
        return Lease(workplace, number, holder_here)


def waits() -> bool:
    """Whether a process that finds a live lease waits for it: not in an allocation, whose hours are paid for."""
    return "SLURM_JOB_ID" not in os.environ or sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def leased(workplace: Path, name: str) -> Iterator[Lease]:
    """The lease of a run, as soon as nobody else holds it.

    Raises:
        Held: somebody does, and this process is not to wait.
    """
    reported = False
    while isinstance(lease := take(workplace), Holder):
        if not waits():
            raise Held(f"{name} is held by {lease}: the same command goes on when that is over")
        if not reported:
            print(f"{name}: held by {lease}; waiting", file=sys.stderr, flush=True)
        reported = True
        time.sleep(LOOK)
    try:
        yield lease
    finally:
        lease.release()
