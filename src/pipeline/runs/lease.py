"""Which process computes a run: one, by a lease file with a heartbeat; file locks do not reach
across nodes.

`runs_dir/.work/<hash>/` holds the leases `lease-1`, `lease-2`, ... of which the highest counts, and
a work folder for each, named by the lease's own random id: nobody can write into another's. Taking
is creating the next number, which a file system does for one process only (O_EXCL, also on NFS and
Lustre). What a dead owner left is taken over by renaming its folder, so that the owner, if it lives
after all, finds nothing to write into or to publish.

An owner is dead when its process on this machine is gone, or when its lease was not touched for
DEAD_AFTER seconds by the clock of the file system: that of a file touched now. Where clients set
the times of files by their own clocks, as Lustre's do, one that is off looks dead so; before a
lease is taken from another machine, it is watched for two beats.
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
# content of a released lease: its number is not reused while its work folder remains
RELEASED = "released"
UNOWNED = "work"  # the work folder of a process without a lease: tests and benchmarks


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    machine: boot and process namespace of its id; began: its start time.
    """

    id: str
    host: str
    pid: int
    job: str | None
    since: str
    machine: str
    began: str

    def __str__(self) -> str:
        return (
            f"{f'job {self.job}' if self.job else f'process {self.pid}'} on {self.host} since"
            f" {self.since}"
        )


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Return this machine's boot id and process-id namespace; empty if the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Start time of a process, in ticks since boot; empty where there is no such process (or only a
    zombie).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
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
    pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(
        secrets.token_hex(4),
        socket.gethostname(),
        pid,
        slurm_job(),
        now,
        this_boot(),
        process_start(pid),
    )


def list_lease_numbers(workplace: Path) -> list[int]:
    """Return the sorted numbers of the leases in a workplace."""
    with suppress(FileNotFoundError):
        names = (
            name.removeprefix(LEASE) for name in os.listdir(workplace) if name.startswith(LEASE)
        )
        return sorted(int(name) for name in names if name.isdigit())
    return []


def live_holder(workplace: Path, watch: bool = False) -> Holder | None:
    """Return the live process that computes the run of this workplace; None if there is none.

    Args:
        watch: observe a lease that looks dead for two heartbeats.
    """
    numbers = list_lease_numbers(workplace)
    lease = workplace / f"{LEASE}{numbers[-1] if numbers else 0}"
    try:
        touched, text = lease.stat().st_mtime_ns, lease.read_text()
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
    deadline = time.monotonic() + (2 * BEAT if watch and owner.id else 0)
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
    except (
        FileNotFoundError,
        PermissionError,
    ):  # the run was published, or its state is read without write permission
        return time.time()
    finally:
        with suppress(PermissionError):
            probe.unlink(missing_ok=True)


def latest_work_folder(workplace: Path) -> Path:
    """Return the most recently changed work folder of a workplace; `work` if there is none."""
    with suppress(FileNotFoundError):
        folders = [path for path in workplace.iterdir() if path.is_dir() and "." not in path.name]
        if folders:
            return max(folders, key=lambda path: path.stat().st_mtime_ns)
    return workplace / UNOWNED


class Lost(Held):
    """Another process took over the lease of this one, which looked dead, and computes the run."""


class Lease:
    """The right to compute a run. folder: its work folder; of: this process as its holder."""

    def __init__(self, workplace: Path, number: int, of: Holder) -> None:
        self.workplace, self.number, self.of = workplace, number, of
        self.file, self.folder = workplace / f"{LEASE}{number}", workplace / of.id
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(
                OSError
            ):  # a file system may be away for a moment; check detects a lost lease
                os.utime(self.file)

    def take_over(self) -> None:
        """Rename the work folder of an earlier owner to that of this lease; create an empty one if
        there was none.
        """
        work = latest_work_folder(self.workplace)
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
            is_mine = json.loads(self.file.read_text())["id"] == self.of.id
        except (FileNotFoundError, ValueError):
            is_mine = False
        if not is_mine or list_lease_numbers(self.workplace)[-1:] != [self.number]:
            hint = ""
            owner = live_holder(self.workplace)
            if owner:
                hint = f"; now held by {owner}"
            raise Lost(
                f"{self.folder} was taken over: this process gave no sign for {DEAD_AFTER:.0f}"
                f" s{hint}"
            )

    def release(self) -> None:
        self._over.set()
        with suppress(Lost, OSError):
            self.check()
            if any(not path.name.startswith(LEASE) for path in self.workplace.iterdir()):
                # the number stays: else a process that saw the lease dead and one that sees none
                # both take the run
                with open(
                    self.file, "r+", encoding="utf-8"
                ) as file:  # in place: a full disk has no room for a new one
                    file.write(RELEASED)
                    file.truncate()
            else:
                self.file.unlink()
                self.workplace.rmdir()


def take_lease(workplace: Path) -> Lease | Holder:
    """Take the lease of a run. Returns it, or the live process that holds it."""
    while True:
        workplace.mkdir(parents=True, exist_ok=True)
        earlier = list_lease_numbers(workplace)
        owner = live_holder(workplace, watch=True)
        if owner:
            return owner
        number, taker = (earlier[-1] if earlier else 0) + 1, this_process()
        file = workplace / f"{LEASE}{number}"
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(json.dumps(asdict(taker)))
        except (
            FileExistsError,
            FileNotFoundError,
        ):  # another process was first, or has removed the workplace
            continue
        except OSError:  # a full disk: an empty lease would count as somebody's
            file.unlink(missing_ok=True)
            raise
        if list_lease_numbers(workplace)[-1:] != [
            number
        ]:  # a later one was there already when this number became free
            file.unlink(missing_ok=True)
            continue
        for old in earlier:
            (workplace / f"{LEASE}{old}").unlink(missing_ok=True)
        return Lease(workplace, number, taker)


def should_wait() -> bool:
    """Whether a process that finds a live lease waits for it: not in a batch allocation, whose
    hours are paid for.
    """
    return "SLURM_JOB_ID" not in os.environ or sys.stdin is not None and sys.stdin.isatty()


def held_by(name: str, holder: Holder) -> str:
    return f"{name} is held by {holder}: rerun the same command to resume when that has ended"


def waits_for(name: str, holder: Holder) -> str:
    return f"{name}: held by {holder}; waiting"


@contextmanager
def hold_lease(workplace: Path, name: str, wait: bool | None = None) -> Iterator[Lease]:
    """Take the lease of a run as soon as no other process holds it.

    Args:
        wait: wait for the lease; null: as should_wait decides.

    Raises:
        Held: another process holds it, and this process should not wait.
    """
    reported = False
    while isinstance(lease := take_lease(workplace), Holder):
        if not (should_wait() if wait is None else wait):
            raise Held(held_by(name, lease))
        if not reported:
            print(waits_for(name, lease), file=sys.stderr, flush=True)
        reported = True
        time.sleep(LOOK)
    try:
        yield lease
    finally:
        lease.release()
