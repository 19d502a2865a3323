"""Computes runs on this machine: the loop of work.py in this process, or in several that it starts
and watches.

Workers are in a session of their own, so that Ctrl-C reaches this process alone, which shuts them
down. One that dies is replaced, and its run begun again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from pipeline.config.stages import trains
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History
from pipeline.launch.attempts import count_attempt
from pipeline.launch.cards import VISIBLE, places_of
from pipeline.launch.in_process import make_run, reason_of, refuse_without_gpus
from pipeline.launch.plan_file import Task, plan_name, publish_plan, tasks_of
from pipeline.launch.preflight import refuse_too_large
from pipeline.launch.work import BLOCKED, LOOK, Session, work
from pipeline.progress import LOG_SECONDS, say
from pipeline.runs import state, stop
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import longest_paths, order_runs, reasons_unfinished
from pipeline.runs.lease import Holder, held_by, live_holder, should_wait, waits_for
from pipeline.runs.make import clear_workplace
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.unchanged import check_unchanged
from pipeline.text import pluralize

Failures = dict[str, str]  # run name -> reason


class Local:
    """Computes runs by `count` processes, which stay between calls; one: this process.

    Prints what becomes of them.

    cards: the GPUs that they share. later: runs of later calls, as far as known now, for the time
    left. aloud: whether failures are printed, where the caller does not. planned: whether
    stage=status is to know of the runs.
    """

    def __init__(
        self,
        count: int = 1,
        cards: Sequence[str] = (),
        later: Callable[[], Sequence[Run]] = tuple,
        aloud: bool = True,
        planned: bool = False,
    ) -> None:
        self.count, self.later, self.aloud, self.planned = count, later, aloud, planned
        if cards and count > 1:
            self.places = places_of(cards, count)
        else:
            self.places = []
        self.workers: dict[int, subprocess.Popen[bytes]] = {}  # by number

    def __enter__(self) -> Local:
        self.folder = TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True)
        self.session = Session(Path(self.folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM to the workers: idle ones end, others checkpoint."""
        try:
            for worker in self.workers.values():
                worker.terminate()
            for worker in self.workers.values():
                worker.wait()
        except BaseException:  # interrupted a second time
            for worker in self.workers.values():
                worker.kill()
            raise
        finally:
            self.folder.cleanup()

    def execute(self, targets: list[Run], earlier: Mapping[str, str] | None = None) -> Failures:
        """Compute the unfinished runs among some targets and their parents; after a failure,
        continue with those that do not depend on it. Returns the failures. An unexpected exception
        is a failure too, after its traceback.

        earlier: failures of an earlier call, which are not retried.

        Raises:
            PipelineError: before anything is computed, for a run that does not fit this machine, or
                cannot be written.
            Held: when all else is done, for a run that another process holds.
        """
        runs, failed = order_runs(targets), dict(earlier or {})
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
            # a signal before the first run is an attempt at the training, which takes longest
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
        history = History(finished_manifests(runs_dir))
        remaining = []
        for run in unfinished:
            if run.name not in failed:
                remaining.append(run)
        self.watch(remaining, history, len(runs))
        tasks = tasks_of(remaining, history.predict)
        if (
            self.count > 1
        ):  # the longest path to the end first; parents stay before, as their paths are no shorter
            paths = longest_paths(remaining, {task.hash: task.seconds or 0.0 for task in tasks})
            tasks.sort(key=lambda task: -paths[task.hash])
        self.session.add(tasks)
        if self.planned and tasks:
            publish_plan(runs_dir, plan_name(targets), self.session.tasks)
        if self.count > 1:
            held = self.watch_workers()
        else:
            held = work(self.session, self.compute, tell=self.tell)
        failed |= {
            task.name: self.session.failed[task.hash]
            for task in tasks
            if task.hash in self.session.failed
        }
        if held:
            error = Held(held[0])
            error.failed = failed
            raise error
        return failed

    def compute(self, task: Task, begin: Callable[[], None]) -> None:
        """Make the run of a task in this process."""

        def begin_aloud() -> None:
            begin()
            self.tell()

        make_run(self.runs[task.hash], task.seconds, begin_aloud)

    # --- workers ---

    def watch_workers(self) -> list[str]:
        """Have workers make the runs of the session.

        Returns why those that are left cannot be made now.
        """
        session, announced = self.session, False
        places_needed = sum(
            -(-task.gpus // len(self.places[0])) if self.places else 1 for task in session.left
        )
        for number in set(range(min(self.count, places_needed))) - self.workers.keys():
            self.start(number)
        with tqdm(
            bar_format="{desc}", file=sys.stderr, leave=False, disable=not sys.stderr.isatty()
        ) as line:
            while session.left and self.workers:
                stop.raise_if_signalled()
                session.look()
                for number, worker in list(self.workers.items()):
                    if worker.poll() is not None:
                        self.replace(number)
                self.tell()
                self.show(line)
                held = self.held_by_others()
                if held and not should_wait():
                    return list(starmap(held_by, held.items()))
                if held and not announced:
                    say(waits_for(*next(iter(held.items()))))
                    announced = True
                time.sleep(LOOK)
        return ["its workers were stopped: rerun the same command"] * len(session.left)

    def held_by_others(self) -> dict[str, Holder]:
        """Name -> holder of the runs that are ready, if other processes than the workers hold all
        of them; else empty.
        """
        pids, held = {worker.pid for worker in self.workers.values()}, {}
        for task in self.session.ready():
            holder = live_holder(task.workplace)
            if holder is None or holder.pid in pids:
                return {}
            held[task.name] = holder
        return held

    def start(self, number: int) -> None:
        """Start a worker, in a session of its own."""
        visible = {}
        if self.places:
            visible = {VISIBLE: ",".join(self.places[number % len(self.places)])}
        command = [
            sys.executable,
            "-m",
            "pipeline.launch.worker",
            self.folder.name,
            json.dumps(self.places),
        ]
        self.workers[number] = subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env={
                **os.environ,
                **visible,
                "PYTHONSAFEPATH": "1",
            },  # no library from the working directory
        )

    def replace(self, number: int) -> None:
        """Start a worker in the place of one that died of a run; not after a signal to it alone.

        Raises:
            PipelineError: it was the last, and had begun none.
        """
        dead = self.workers.pop(number)
        status = dead.wait()
        self.session.look()
        death = f"ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
        for task in self.session.left:
            if dead.pid in self.session.begun_by(task):
                say(f"{task.name}: its worker {death}; another begins it again")
                self.start(number)
        if not self.workers and status != stop.UNFINISHED:
            raise PipelineError(
                f"a worker {death} before it began a run: its output above says why"
            )

    # --- what is printed ---

    def watch(self, runs: Sequence[Run], history: History, total: int) -> None:
        """Begin to print what becomes of these runs. total: of the plan, finished ones included."""
        self.runs, self.history, self.total = {run.hash: run for run in runs}, history, total
        self.later_runs = self.later() if runs else ()
        self.started: dict[str, float] = {}  # when each run that is being made was begun
        self.ended: set[str] = set()
        self.told, self.told_until = (
            ("", ""),
            0.0,
        )  # the time left, and until when it is not computed again
        self.shown_at = time.monotonic()

    def tell(self) -> None:
        """Print the runs that have begun or ended since the last call."""
        session = self.session
        self.started = {key: begun for key, begun in self.started.items() if key in session.begun}
        for key in [key for key in self.runs if key not in self.ended]:
            name = session.names[key]
            if key in session.begun and key not in self.started:
                self.started[key] = time.monotonic()
                left, more = self.time_left()
                say(
                    f"{self.head()} {name} ({self.runs[key].config.stage}), {left} left in"
                    f" all{more}"
                )
            if key in session.failed:
                self.tell_failure(name, session.failed[key])
            elif key in session.done:
                ended_at = time.monotonic()
                seconds = ended_at - self.started.get(key, ended_at)
                say(f"{name if self.count > 1 else self.head()} done in {seconds:.1f} s")
                manifest = read_manifest(self.runs[key].folder)
                if manifest:
                    self.history.add(manifest)
            else:
                continue
            self.started.pop(key, None)
            self.ended.add(key)

    def tell_failure(self, name: str, reason: str) -> None:
        if self.aloud and not reason.startswith(BLOCKED):
            say(f"{name} failed: {reason}")

    def head(self) -> str:
        begun = self.total - len(self.runs) + len(self.ended | self.started.keys())
        return f"[{begun}/{self.total}]"

    def show(self, line: Any) -> None:
        """Show how far the runs are: at a terminal in its last line, elsewhere in a line every
        LOG_SECONDS.
        """
        if not line.disable:
            line.set_description_str(self.progress_line()[: shutil.get_terminal_size().columns - 1])
        elif time.monotonic() - self.shown_at >= LOG_SECONDS:
            self.shown_at = time.monotonic()
            say(self.progress_line())

    def time_left(self) -> tuple[str, str]:
        """Return the expected time until the end, and what is not in it.

        A training that runs is measured by its steps. The time is computed again when twenty times
        as long has passed as the computation took.
        """
        asked_at = time.monotonic()
        if asked_at >= self.told_until:
            left: dict[str, float] = {}
            for key, begun in self.started.items():
                seconds = seconds_of_steps_left(self.runs[key])
                if seconds is None:
                    expected = self.history.predict(self.runs[key])
                    if expected is not None:
                        seconds = max(0.0, expected - (asked_at - begun))
                if seconds is not None:
                    left[key] = seconds
            remaining = []
            for task in self.session.left:
                if task.hash in self.runs:
                    remaining.append(self.runs[task.hash])
            total, unknown = self.history.sum([*remaining, *self.later_runs], self.count, left)
            self.told = total, f", not including {unknown}" if unknown else ""
            self.told_until = asked_at + 20 * (time.monotonic() - asked_at)
        return self.told

    def progress_line(self) -> str:
        """One line of text: what is left, and each run that is being made, its step and its
        time.
        """
        left, more = self.time_left()
        parts = [f"{pluralize(len(self.session.left), 'run')} and {left} left{more}"]
        for key, begun in self.started.items():
            record = state.read_state(self.runs[key].workplace)
            step = ""
            if record.get("steps"):
                step = f" {record['step']}/{record['steps']}"
            parts.append(f"{self.runs[key].label}{step} {time.monotonic() - begun:.0f} s")
        return " | ".join(parts)


def execute_here(targets: list[Run], aloud: bool = True) -> Failures:
    """Compute runs in this process, as Local.execute does."""
    with Local(aloud=aloud) as pool:
        return pool.execute(targets)


def why_failed(run: Run, failed: Mapping[str, str], finished: bool) -> str | None:
    """Why a run fails before any is computed: by a parent, or as its files were changed since it
    was finished.
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


def seconds_of_steps_left(run: Run) -> float | None:
    """Seconds of the steps that a training has left, by those that it has done; None where none is
    measured.
    """
    record = state.read_state(run.workplace)
    if record.get("state") != "running" or not record.get("seconds_a_step"):
        return None
    return float((record["steps"] - record["step"]) * record["seconds_a_step"])
