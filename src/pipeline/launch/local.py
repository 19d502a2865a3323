"""Computes runs on this machine, in this process or in several workers.

All run the loop of work.py. Workers have separate process sessions, so Ctrl-C reaches only this
process, which shuts them down. A worker that dies is replaced, and its run begins again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.config.stages import trains
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import guess
from pipeline.launch.attempts import count_attempt
from pipeline.launch.in_process import make_run, reason_of, refuse_without_gpus
from pipeline.launch.plan_file import Task, plan_name, publish_plan, tasks_of
from pipeline.launch.preflight import refuse_too_large
from pipeline.launch.work import BLOCKED, LOOK, Session, work
from pipeline.progress import LOG_SECONDS, format_duration, say
from pipeline.runs import state, stop
from pipeline.runs.disk import check_writable
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.lease import Holder, held_by, live_holder, should_wait, waits_for
from pipeline.runs.make import clear_workplace
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.unchanged import check_unchanged
from pipeline.text import pluralize

Failures = dict[str, str]  # run name -> reason
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local:
    """Computes runs with `count` processes that stay between calls, and prints the progress.

    With count=1 this process computes the runs. A worker sees as many GPUs as its runs use. Runs
    that use another number of GPUs wait until no run of the current number is ready. The workers
    then start again.

    Args:
        count: number of processes.
        cards: the GPUs of the processes.
        aloud: whether failures are printed and the plan is published for stage=status. False if
            the caller prints them.
    """

    def __init__(
        self,
        count: int = 1,
        cards: Sequence[str] = (),
        aloud: bool = True,
    ) -> None:
        self.count, self.aloud = count, aloud
        self.cards, self.gpus = cards, 1  # gpus: how many each worker sees
        self.workers: dict[int, subprocess.Popen[bytes]] = {}  # by number
        self.failed: Failures = {}  # of all calls
        self.shown_at = 0.0

    def __enter__(self) -> Local:
        self.folder = TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True)
        self.session = Session(Path(self.folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_workers()
        finally:
            self.folder.cleanup()

    def stop_workers(self) -> None:
        """Send SIGTERM to the workers and wait until they end. Trainings checkpoint first."""
        try:
            for worker in self.workers.values():
                worker.terminate()
            for worker in self.workers.values():
                worker.wait()
        except BaseException:  # a second interrupt
            for worker in self.workers.values():
                worker.kill()
            raise
        self.workers.clear()

    def execute(self, targets: list[Run]) -> Failures:
        """Compute the unfinished runs among targets and their parents.

        After a failure, runs that do not depend on the failed run are still computed. An unexpected
        exception counts as a failure, after its traceback is printed.

        Failures of an earlier call are not retried.

        Returns:
            The failures of all calls.

        Raises:
            PipelineError: a run does not fit this machine or cannot be written. Nothing has been
                computed.
            Held: another process computes a run, and all other runs are done.
        """
        runs, failed = order_runs(targets), self.failed
        if not runs:
            return failed
        runs_dir, reasons = runs[0].runs_dir, reasons_unfinished(runs, targets)
        unfinished = []
        for run in runs:
            if run.hash in reasons and run.name not in failed:
                unfinished.append(run)
        if unfinished:
            check_writable(runs_dir)
            refuse_without_gpus(unfinished)
            # A signal before the first run counts as an attempt at the training, which takes
            # longest.
            with count_attempt(
                next((run for run in unfinished if trains(run.config)), unfinished[0])
            ):
                pass
            refuse_too_large(unfinished)
        for run in runs:
            finished = run.hash not in reasons
            if finished:
                clear_workplace(run)
            if run.name not in failed:
                reason = why_failed(run, failed, finished)
                if reason:
                    failed[run.name] = reason
                    self.tell_failure(run.name, reason)
        remaining = [run for run in unfinished if run.name not in failed]
        self.runs = {run.hash: run for run in remaining}
        tasks = tasks_of(remaining, guess)
        self.watch(tasks, len(runs))
        if self.count > 1:  # the longest first, so that no worker is left alone with it
            tasks.sort(key=lambda task: (task.level, -(task.seconds or 0.0)))
        self.session.add(tasks)
        if self.aloud and tasks:
            publish_plan(runs_dir, plan_name(targets), self.session.tasks)
        if self.count > 1:
            held = self.watch_workers()
        else:
            held = work(self.session, self.compute, tell=self.tell)
        failed.update(self.session.failures(tasks))
        if held:
            error = Held(held[0])
            error.failed = failed
            raise error
        return failed

    def compute(self, task: Task, begin: Callable[[], None]) -> None:
        """Compute the run of a task in this process."""

        def begin_aloud() -> None:
            begin()
            self.tell()

        make_run(self.runs[task.hash], task.seconds, begin_aloud)

    # --- workers ---

    def watch_workers(self) -> list[str]:
        """Let the workers compute the runs of the session.

        Returns:
            One reason for each run that cannot be computed now.
        """
        session, announced = self.session, False
        self.start_workers()
        while session.left and self.workers:
            stop.raise_if_signalled()
            session.look()
            if self.cards:
                self.share_cards()
            for number, worker in list(self.workers.items()):
                if worker.poll() is not None:
                    self.replace(number)
            self.tell()
            if time.monotonic() - self.shown_at >= LOG_SECONDS:
                self.shown_at = time.monotonic()
                say(self.progress_line())
            held = self.held_by_others()
            if held and not should_wait():
                return list(starmap(held_by, held.items()))
            if held and not announced:
                say(waits_for(*next(iter(held.items()))))
                announced = True
            time.sleep(LOOK)
        return ["its workers were stopped: rerun the same command"] * len(session.left)

    def held_by_others(self) -> dict[str, Holder]:
        """Return the holders of the ready runs, by name, if other processes hold all of them.

        Returns an empty dictionary if a worker of this process can go on.
        """
        pids, held = {worker.pid for worker in self.workers.values()}, {}
        for task in self.session.ready():
            holder = live_holder(task.workplace)
            if holder is None or holder.pid in pids:
                return {}
            held[task.name] = holder
        return held

    def share_cards(self) -> None:
        """Start the workers again if the ready runs use another number of GPUs."""
        gpus = {task.gpus for task in self.session.ready()}
        if gpus and self.gpus not in gpus:
            self.stop_workers()
            self.gpus = max(gpus)
            self.start_workers()

    def start_workers(self) -> None:
        """Start the missing workers. Only runs of one GPU share a GPU."""
        count = min(self.count, len(self.session.left))
        if self.gpus > 1:
            count = min(count, len(self.cards) // self.gpus)
        for number in set(range(count)) - self.workers.keys():
            self.start(number)

    def start(self, number: int) -> None:
        """Start a worker in its own process session."""
        # PYTHONSAFEPATH: no library comes from the working directory.
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        gpus = 0  # any number
        if self.cards:
            gpus = self.gpus
            first = gpus * number % len(self.cards)
            environment[VISIBLE] = ",".join(self.cards[first : first + gpus])
        command = [sys.executable, "-m", "pipeline.launch.worker", self.folder.name, str(gpus)]
        self.workers[number] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env=environment,
        )

    def replace(self, number: int) -> None:
        """Start a worker in place of a worker that died while computing a run.

        A worker that was stopped by a signal between runs is not replaced.

        Raises:
            PipelineError: the last worker died before it began a run.
        """
        dead = self.workers.pop(number)
        status = dead.wait()
        self.session.look()
        death = f"ended with status {status}"
        if status < 0:
            death = f"ended with {signal.Signals(-status).name}"
        for task in self.session.left:
            if dead.pid in self.session.begun_by(task):
                say(f"{task.name}: its worker {death}. Another worker begins the run again.")
                self.start(number)
        if not self.workers and status != stop.UNFINISHED:
            raise PipelineError(
                f"A worker {death} before it began a run. Its output above says why."
            )

    # --- what is printed ---

    def watch(self, tasks: Sequence[Task], total: int) -> None:
        """Begin to print the progress of tasks.

        `total` is the number of runs in the plan, including finished runs.
        """
        self.waiting = list(tasks)  # whose end is not printed
        self.total = total
        self.begun = total - len(tasks)  # the number of runs that are finished or have begun
        self.started: dict[str, float] = {}  # start times of the runs that are being computed
        self.shown_at = time.monotonic()

    def tell(self) -> None:
        """Print the runs that have begun or ended since the last call."""
        session, waiting = self.session, []
        for task in self.waiting:
            key = task.hash
            # another command may have computed a run that is done
            has_begun = key in session.begun or key in session.done
            if key in self.started and not has_begun:  # its worker was stopped
                del self.started[key]
                self.begun -= 1
            if has_begun and key not in self.started:
                self.started[key] = time.monotonic()
                self.begun += 1
                say(f"{self.head()} {task.name} ({task.stage}), {self.time_left()} left in all")
            if key in session.failed:
                self.tell_failure(task.name, session.failed[key])
            elif key in session.done:
                which = task.name if self.count > 1 else self.head()
                say(f"{which} done in {time.monotonic() - self.started[key]:.1f} s")
            else:
                waiting.append(task)
                continue
            self.started.pop(key, None)
        self.waiting = waiting

    def tell_failure(self, name: str, reason: str) -> None:
        if self.aloud and not reason.startswith(BLOCKED):
            say(f"{name} failed: {reason}")

    def head(self) -> str:
        return f"[{self.begun}/{self.total}]"

    def time_left(self) -> str:
        """Return the predicted time of the runs that have not ended, less what they have taken."""
        now = time.monotonic()
        seconds_left = []
        for task in self.session.left:
            if task.seconds is not None:
                elapsed = now - self.started.get(task.hash, now)
                seconds_left.append(max(0.0, task.seconds - elapsed))
        if not seconds_left:
            return "unknown time"
        seconds = max(*seconds_left, sum(seconds_left) / self.count)
        return f"about {format_duration(seconds)}"

    def progress_line(self) -> str:
        """Return a line with the remaining runs and time, and the progress of each run."""
        parts = [f"{pluralize(len(self.session.left), 'run')} and {self.time_left()} left"]
        for task in self.waiting:
            if task.hash not in self.started:
                continue
            record = state.read_state(task.workplace)
            step = ""
            if record.get("steps"):
                step = f" {record['step']}/{record['steps']}"
            seconds = time.monotonic() - self.started[task.hash]
            parts.append(f"{task.label}{step} {seconds:.0f} s")
        return " | ".join(parts)


def execute_here(targets: list[Run], aloud: bool = True) -> Failures:
    """Compute runs in this process, as Local.execute does."""
    with Local(aloud=aloud) as pool:
        return pool.execute(targets)


def why_failed(run: Run, failed: Mapping[str, str], finished: bool) -> str | None:
    """Return why a run fails before any run is computed, or None.

    Either a parent has failed, or a file of the finished run was changed.
    """
    parents = parent_runs(run.parents) if failed else ()  # names are looked up on the disk
    blocked = next((parent.name for parent in parents if parent.name in failed), None)
    if blocked:
        return f"{BLOCKED}{blocked} failed"
    try:
        if finished:
            check_unchanged(run.folder, weights=False)
    except Exception as error:
        return reason_of(error)
    return None
