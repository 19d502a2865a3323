"""Leases: one process computes a run, and keeps a lease file alive with a heartbeat.

File locks do not work across nodes. `runs_dir/.work/<hash>/` has the leases `lease-1`, `lease-2`,
...; the highest one counts. Each lease has a work folder with the lease's random id as its name, so
that no other process writes into it. To take a lease is to create the next number, which a file
system does for a single process (O_EXCL, also on NFS and Lustre). The work of a dead owner is taken
over by renaming its folder. If the owner lives after all, its folder is gone, and it cannot
publish.

An owner is dead when its process on this machine is gone. On other machines it is dead when its
lease was not touched for DEAD_AFTER seconds, by the clock of the file system: the time of a file
touched now. If clients set the times of files by their own clocks, as on Lustre, a wrong clock
makes an owner look dead. So a lease from another machine is watched for two beats before it is
taken.
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

BEAT = 10.0  # seconds between two touches of a lease
DEAD_AFTER = 120.0  # longer than clients of NFS keep a time in their caches (60 s)
LOOK = 0.5  # seconds between two checks of a waiting process
LEASE = "lease-"
# content of a released lease: its number is not reused while its work folder remains
RELEASED = "released"
UNOWNED = "work"  # the work folder without a lease, in tests and benchmarks


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        machine: The boot id and the process-id namespace.
        began: The start time of the process.
    """

    id: str
    host: str
    pid: int
    job: str | None
    since: str
    machine: str
    began: str

    def __str__(self) -> str:
        process = f"process {self.pid}"
        if self.job:
            process = f"job {self.job}"
        return f"{process} on {self.host} since {self.since}"


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Return this machine's boot id and process-id namespace; empty if the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return the start time of a process, in ticks since boot.

    Empty if the process does not exist or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return ""
    return fields[19]


def slurm_job() -> str | None:
    """Return the Slurm job of this process, ARRAY_TASK in an array; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID")


def this_process() -> Holder:
    """Return this process as a lease holder, with a new random id."""
    pid = os.getpid()
    return Holder(
        id=secrets.token_hex(4),
        host=socket.gethostname(),
        pid=pid,
        job=slurm_job(),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_boot(),
        began=process_start(pid),
    )


def list_lease_numbers(workplace: Path) -> list[int]:
    """Return the sorted numbers of the leases in a workplace."""
    numbers = []
    with suppress(FileNotFoundError):
        for name in os.listdir(workplace):
            number = name.removeprefix(LEASE)
            if name.startswith(LEASE) and number.isdigit():
                numbers.append(int(number))
    return sorted(numbers)


def live_holder(workplace: Path, watch: bool = False) -> Holder | None:
    """Return the live process that computes the run of this workplace, or None.

    With `watch`, a lease that looks dead is observed for two heartbeats.
    """
    latest = max(list_lease_numbers(workplace), default=0)
    lease = workplace / f"{LEASE}{latest}"
    try:
        touched = lease.stat().st_mtime_ns
        text = lease.read_text()
        if text.startswith(RELEASED):
            return None
        owner = Holder(**json.loads(text))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # created just now, or by a process that died before writing it
        owner = Holder("", "a host that has not said its name", 0, None, "a moment ago", "", "")
    if owner.machine and owner.machine == this_boot():
        if owner.began == process_start(owner.pid):
            return owner
        return None
    if now_at(workplace) - touched / 1e9 < DEAD_AFTER:
        return owner
    deadline = time.monotonic()
    if watch and owner.id:
        deadline += 2 * BEAT
    while time.monotonic() < deadline:
        time.sleep(LOOK)
        try:
            if lease.stat().st_mtime_ns != touched:
                return owner
        except FileNotFoundError:  # another process was first
            return None
    return None


def now_at(workplace: Path) -> float:
    """Return the time by the clock of the file system, which may differ from this machine's."""
    probe = workplace / f"now-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except (FileNotFoundError, PermissionError):
        # the run was published, or the user may only read
        return time.time()
    finally:
        with suppress(PermissionError):
            probe.unlink(missing_ok=True)


def latest_work_folder(workplace: Path) -> Path:
    """Return the most recently changed work folder of a workplace, or `work` without one."""
    with suppress(FileNotFoundError):
        folders = [path for path in workplace.iterdir() if path.is_dir() and "." not in path.name]
        if folders:
            return max(folders, key=lambda path: path.stat().st_mtime_ns)
    return workplace / UNOWNED


class Lost(Held):
    """Another process took over the lease of this process, which looked dead."""


class Lease:
    """The right to compute a run.

    Attributes:
        folder: Its work folder.
        of: This process as its holder.
    """

    def __init__(self, workplace: Path, number: int, of: Holder) -> None:
        self.workplace, self.number, self.of = workplace, number, of
        self.file = workplace / f"{LEASE}{number}"
        self.folder = workplace / of.id
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            # a file system may be away for a moment; `check` detects a lost lease
            with suppress(OSError):
                os.utime(self.file)

    def take_over(self) -> None:
        """Rename an earlier owner's work folder to this lease's, or create an empty folder."""
        work = latest_work_folder(self.workplace)
        try:
            os.rename(work, self.folder)
        except FileNotFoundError:
            self.folder.mkdir()
        for path in self.workplace.iterdir():
            if path.is_dir() and path != self.folder:
                shutil.rmtree(path, ignore_errors=True)

    def check(self) -> None:
        """Raise Lost unless this lease still counts."""
        try:
            is_mine = json.loads(self.file.read_text())["id"] == self.of.id
        except (FileNotFoundError, ValueError):
            is_mine = False
        if is_mine and list_lease_numbers(self.workplace)[-1:] == [self.number]:
            return
        problem = f"{self.folder} was taken over: this process gave no sign for {DEAD_AFTER:.0f} s"
        owner = live_holder(self.workplace)
        if owner:
            problem += f"; now held by {owner}"
        raise Lost(problem)

    def release(self) -> None:
        self._over.set()
        with suppress(Lost, OSError):
            self.check()
            if any(not path.name.startswith(LEASE) for path in self.workplace.iterdir()):
                # The number stays. Otherwise a process that saw a dead lease and a process that
                # sees no lease would both take the run.
                # Written in place, because a full disk has no room for a new file.
                with open(self.file, "r+", encoding="utf-8") as file:
                    file.write(RELEASED)
                    file.truncate()
            else:
                self.file.unlink()
                self.workplace.rmdir()


def take_lease(workplace: Path) -> Lease | Holder:
    """Take the lease of a run, and return it or the live process that holds it."""
    while True:
        try:
            workplace.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if workplace.exists() and not workplace.is_dir():
                raise
            continue  # another process removed it while mkdir looked
        earlier = list_lease_numbers(workplace)
        owner = live_holder(workplace, watch=True)
        if owner:
            return owner
        number = max(earlier, default=0) + 1
        taker = this_process()
        file = workplace / f"{LEASE}{number}"
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(json.dumps(asdict(taker)))
        except (FileExistsError, FileNotFoundError):
            continue  # another process was first, or has removed the workplace
        except OSError:  # a full disk: an empty lease would count
            file.unlink(missing_ok=True)
            raise
        if list_lease_numbers(workplace)[-1:] != [number]:
            # a later lease existed already when this number became free
            file.unlink(missing_ok=True)
            continue
        for old in earlier:
            (workplace / f"{LEASE}{old}").unlink(missing_ok=True)
        return Lease(workplace, number, taker)


def should_wait() -> bool:
    """Return True if a process waits for a live lease.

    It does not wait in a batch allocation, whose hours are paid for.
    """
    return "SLURM_JOB_ID" not in os.environ or sys.stdin is not None and sys.stdin.isatty()


def held_by(name: str, holder: Holder) -> str:
    return f"{name} is held by {holder}. Rerun the same command to resume when that has ended."


def waits_for(name: str, holder: Holder) -> str:
    return f"{name}: held by {holder}; waiting"


@contextmanager
def hold_lease(workplace: Path, name: str, may_wait: bool = True) -> Iterator[Lease]:
    """Take the lease of a run as soon as no other process holds it.

    Raises:
        Held: If another process holds it, and this process may or should not wait.
    """
    reported = False
    lease = take_lease(workplace)
    while isinstance(lease, Holder):
        if not (may_wait and should_wait()):
            raise Held(held_by(name, lease))
        if not reported:
            print(waits_for(name, lease), file=sys.stderr, flush=True)
        reported = True
        time.sleep(LOOK)
        lease = take_lease(workplace)
    try:
        yield lease
    finally:
        lease.release()
