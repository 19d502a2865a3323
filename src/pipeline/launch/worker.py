"""A process that computes runs one after another and keeps libraries and models in memory.

`python -m pipeline.launch.worker FOLDER GPUS` works on the runs of a session that use so many GPUs,
or any number with GPUS=0, until a signal ends it. `... worker task FOLDER LEVEL KIND` is one task
of a Slurm array. The output of a run goes to its log. The first run imports the libraries, so a
task without work ends at once.
"""

from __future__ import annotations

from pipeline.runs.stop import UNFINISHED, answer_early, handle_signals, stop_signal_name

if __name__ == "__main__":
    answer_early()

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import Held, PipelineError
from pipeline.hub.addresses import masked_output
from pipeline.launch.plan_file import Task
from pipeline.launch.slurm_commands import run_command, seconds_left
from pipeline.launch.work import LOOK, Session, work
from pipeline.merge.resident import keep_models_resident
from pipeline.progress import quiet, redirected, say
from pipeline.runs.folders import folder_of
from pipeline.runs.lease import slurm_job


@contextmanager
def logged(task: Task) -> Iterator[None]:
    """Append all output of this process and its subprocesses to the log of a task.

    Warnings are also printed on the terminal.
    """
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with open(task.log, "ab", buffering=0) as output:
        size_before = output.tell()
        try:
            with redirected(output.fileno(), 1, 2):
                yield
        finally:
            with suppress(OSError), open(task.log, encoding="utf-8", errors="replace") as log:
                log.seek(size_before)
                for line in log:
                    if line.startswith("warning: "):
                        say(f"{task.name}: {line.rstrip()}")


def compute(task: Task, begin: Callable[[], None]) -> None:
    """Compute the run of a task, and write its output and any failure to its log.

    Raises:
        Held: another process computes the run.
        PipelineError: the run failed, with the reason.
    """
    from pipeline.launch.in_process import make_run, reason_of

    with logged(task):
        try:
            make_run(task.run(), task.seconds, begin)
        except Held:
            raise
        except Exception as error:
            reason = reason_of(error)
            with suppress(OSError):
                print(f"failed: {reason}", file=sys.stderr)
            raise PipelineError(reason) from error


def end_with_the_parent() -> None:
    """Receive SIGTERM when the parent process dies (Linux: PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(UNFINISHED)


def work_here(folder: Path, gpus: int) -> int:
    """Compute runs for the parent process until it ends this worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_the_parent()
    with handle_signals(), keep_models_resident():
        work(Session(folder), compute, lambda task: gpus in (0, task.gpus), stay=True)
    return 0


def work_in_job(folder: Path, level: int, kind: str) -> int:
    """Compute the free runs of a level and kind, and of the levels before it.

    Args:
        folder: the session.
        level: the level of the Slurm array.
        kind: the name of the array's resources.

    Returns:
        The exit status: 1 if a run of this job failed, otherwise 0.

    Raises:
        SystemExit: with status 75 after a signal, or before a training that may need more time than
            is left, so that the job is requeued.
    """
    session, tasks_made = Session(folder), list[Task]()

    def fits(task: Task) -> bool:
        return task.level <= level and task.kind == kind

    def compute_in_job(task: Task, begin: Callable[[], None]) -> None:
        if tasks_made and task.stage in ("sft", "cpt") and not has_time_for(task):
            raise SystemExit(UNFINISHED)
        tasks_made.append(task)
        with suppress(OSError, subprocess.TimeoutExpired):  # job names are run names
            run_command(["scontrol", "update", f"JobId={slurm_job()}", f"JobName={task.label}"])
        wait_for_parents(task)
        compute(task, begin)

    try:
        with handle_signals(), keep_models_resident():
            if stop_signal_name():
                task = next(filter(fits, session.left), None)
                if task:
                    from pipeline.launch.attempts import count_attempt

                    with count_attempt(task.run()):  # the signal arrived before a run began
                        pass
            work(session, compute_in_job, fits=fits)
    finally:
        session.look()
        failed = [task for task in tasks_made if task.hash in session.failed]
        for task in failed:
            print(f"{task.label} failed: {session.failed[task.hash]}", file=sys.stderr)
        print(
            f"{len(tasks_made)} runs: {len(failed)} failed", file=sys.stderr
        )  # marks the end in the job's log
    return int(bool(failed))


def has_time_for(task: Task) -> bool:
    """Return True if this job has twice the expected time of a run left."""
    return task.seconds is not None and 2 * task.seconds < seconds_left(str(slurm_job()))


def wait_for_parents(task: Task) -> None:
    """Wait until this node sees the parents that other nodes have finished.

    NFS clients cache directory listings for up to a minute.
    """
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if all(folder_of(key, task.runs_dir) for key in task.needs):
            return
        time.sleep(LOOK)


@masked_output()
def main(*arguments: str) -> int:
    quiet()
    if arguments[0] == "task":
        _, folder, level, kind = arguments
        return work_in_job(Path(folder), int(level), kind)
    folder, gpus = arguments
    return work_here(Path(folder), int(gpus))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
