"""A real Slurm of two nodes on this machine's loopback, with fake GPUs.

Up in a second, gone whatever happens.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={at}/run/munge.sock,cred_expire=5
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool.%n
SlurmctldPidFile={at}/run/slurmctld.pid
SlurmdPidFile={at}/run/slurmd.%n.pid
SlurmctldLogFile={at}/log/slurmctld.log
SlurmdLogFile={at}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=200
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=600
SlurmdTimeout=60
MaxArraySize={largest_array}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={at}/log/jobcomp.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=4 RealMemory={memory} Gres=gpu:4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=4 RealMemory={memory} Gres=gpu:4 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0 OverSubscribe=NO
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


# Ends the daemons, and what their jobs left, when the process of the tests closes its end or dies,
# however that is.
REAPER = """
import os, shutil, signal, sys, time
from pathlib import Path
sys.stdin.read()
at = Path(sys.argv[1])
pids = []
for name in ("slurmctld", "slurmd.n1", "slurmd.n2", "munged"):
    try:
        pids.append(int((at / f"run/{name}.pid").read_text()))
        os.kill(pids[-1], signal.SIGTERM)
    except (OSError, ValueError):
        pass
for turn in range(60):
    time.sleep(0.05)
    for pid in list(pids):
        try:
            os.kill(pid, signal.SIGKILL if turn == 59 else 0)
        except OSError:
            pids.remove(pid)
for folder in Path("/proc").glob("[0-9]*"):
    try:
        if f"SLURM_CONF={at}/".encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(at, ignore_errors=True)
"""


class Cluster:
    """Its daemons and its commands. SLURM_CONF in the environment of every client names it."""

    def __init__(self, largest_array: int) -> None:
        self.at, self.host = Path(tempfile.mkdtemp()), socket.gethostname().partition(".")[0]
        self.at.chmod(0o755)  # munged wants its socket reachable for all
        at = self.at
        for name in ("munge", "state", "spool.n1", "spool.n2", "log", "run"):
            (at / name).mkdir(parents=True, exist_ok=True)
        (at / "munge").chmod(0o700)
        (at / "run").chmod(0o755)
        (at / "munge/key").write_bytes(os.urandom(1024))
        (at / "munge/key").chmod(0o600)
        first, self.one, self.two = free_ports(3)
        memory = min(4000, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20)
        told = dict(host=self.host, at=at, port=first, one=self.one, two=self.two, memory=memory)
        (at / "slurm.conf").write_text(CONF.format(**told, largest_array=largest_array))
        gres = "".join(
            f"NodeName={node} Name=gpu File=/dev/{file}\n"
            for node in ("n1", "n2")
            for file in ("null", "zero", "full", "urandom")
        )
        (at / "gres.conf").write_text("AutoDetect=off\n" + gres)
        ours = {"SLURM_CONF": str(at / "slurm.conf"), "PIPELINE_PYTHON": sys.executable}
        self.environment = {**os.environ, **ours}

    def up(self) -> None:
        at = self.at
        self.reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, str(at)], stdin=-1, start_new_session=True
        )
        self.run(
            "munged",
            f"--key-file={at}/munge/key",
            f"--socket={at}/run/munge.sock",
            f"--pid-file={at}/run/munged.pid",
            f"--seed-file={at}/munge/seed",
            f"--log-file={at}/log/munged.log",
        )
        self.run("slurmctld", "-c")
        self.node_up("n1"), self.node_up("n2")
        self.until(
            lambda: self.run("sinfo", "-h", "-p", "debug", "-o", "%T").split() == ["idle"], 30
        )

    def node_up(self, node: str) -> None:
        self.run("slurmd", "-c", "-N", node)

    def run(self, *command: str, status: int | None = 0, **more: str) -> str:
        done = subprocess.run(
            command, env={**self.environment, **more}, capture_output=True, text=True, timeout=120
        )
        assert status is None or done.returncode == status, (
            f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        )
        return done.stdout

    def call(self, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this program and return its status and output, never a traceback."""
        done = subprocess.run(
            words, env={**self.environment, **more}, capture_output=True, text=True, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def jobs(self) -> dict[str, str]:
        """Job -> state, of all that wait or run."""
        lines = self.run("squeue", "-h", "--array", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def idle(self, seconds: float) -> None:
        """Wait until the queue is empty."""
        self.until(lambda: not self.jobs(), seconds, every=0.2)

    def until(
        self,
        what: Callable[[], Any],
        seconds: float = 120,
        logs: Path | None = None,
        every: float = 0.05,
    ) -> Any:
        """Return what `what` gives as soon as it is something.

        The files of the folder `logs` are shown if this never happens.
        """
        deadline = time.monotonic() + seconds
        while not (found := what()):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {seconds} s:\n{self.told(logs)}")
            time.sleep(every)
        return found

    def told(self, logs: Path | None) -> str:
        """Return what Slurm says of its jobs and nodes, and the ends of its logs."""
        parts = [self.run("squeue", "--array", "-o", "%i %T %r %S %E", status=None)]
        parts += [self.run("sinfo", "-N", status=None)]
        for log in [*(self.at / "log").glob("*.log"), *(logs.glob("*.log") if logs else ())]:
            parts += [f"{log.name}: ...{log.read_text(errors='replace')[-1500:]}"]
        return "\n".join(parts)

    def ended(self, job: str) -> list[str]:
        """Return the states with which a job ended, one for each time."""
        log = self.at / "log/jobcomp.log"
        lines = log.read_text().splitlines() if log.is_file() else []
        found = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
        return [one["JobState"] for one in found if one["JobId"] == job]

    def down(self) -> None:
        assert self.reaper.stdin is not None
        self.reaper.stdin.close()
        self.reaper.wait(60)


@contextmanager
def two_nodes(largest_array: int = 1001) -> Iterator[Cluster]:
    """Start a cluster of two nodes; clients find it by SLURM_CONF."""
    made = Cluster(largest_array)
    try:
        made.up()
        yield made
    finally:
        made.down()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def installed() -> bool:
    return (
        all(shutil.which(name) for name in ("sbatch", "slurmctld", "slurmd", "munged"))
        and os.geteuid() == 0
    )
