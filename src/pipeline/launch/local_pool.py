"""Computes the runs of a plan on this machine, in this process or in several: each ready run goes to an idle worker.

Of several workers, runs on the longest path to the end start first; evaluations of one model go to the worker that has
it in memory. A failed run fails what depends on it; a worker that dies is restarted and its run retried once. Workers
are in a session of their own, so that Ctrl-C reaches this process alone, which shuts them down.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from tqdm import tqdm

from pipeline.config.stages import trains
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History
from pipeline.launch.attempts import count_attempt
from pipeline.launch.in_process import make_run, outcome, reason_of, refuse_without_gpus
from pipeline.launch.run_json import element_of
from pipeline.launch.worker import log_of
from pipeline.progress import LOG_SECONDS, say
from pipeline.runs import state, stop
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import longest_paths, order_runs, reasons_unfinished
from pipeline.runs.make import why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.evaluation import source_models
from pipeline.text import shorten

TRIES = 2  # of a run whose worker died


@dataclass(eq=False)
class Here:
    """This process as the only worker: it computes a run when its answer is read."""

    run: Run | None = None
    begun: float = 0.0
    seconds: float | None = None  # as expected of the run
    models: tuple[str, ...] = ()  # models in its memory, of several workers: those of its last evaluation

    def start_run(self, run: Run, seconds: float | None) -> None:
        self.run, self.begun, self.seconds = run, time.monotonic(), seconds

    def read_answer(self) -> dict[str, Any] | None:
        """How its run ended; None if it died."""
        assert self.run is not None
        return outcome(partial(make_run, self.run, self.seconds))


@dataclass(eq=False)
class Worker(Here):
    """A worker process and the run that it computes. gpu: the GPUs that it sees, null: all."""

    gpu: str | None = None
    process: Any = None
    log_from: int = 0  # bytes of the run's log before this run

    @classmethod
    def start(cls, gpu: str | None) -> Worker:
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-m", "pipeline.launch.worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **visible},
        )  # fmt: skip
        return cls(gpu=gpu, process=process)

    def start_run(self, run: Run, seconds: float | None) -> None:
        super().start_run(run, seconds)
        element = element_of(run)
        self.models, log = source_models(run), log_of(element)
        self.log_from = log.stat().st_size if log.is_file() else 0
        with suppress(BrokenPipeError):  # it died while idle: noticed when its answer is read
            self.process.stdin.write(json.dumps({**element, "predicted_seconds": seconds}) + "\n")
            self.process.stdin.flush()

    def read_answer(self) -> dict[str, Any] | None:
        """Prints the warnings of the run's log here too."""
        line, run = self.process.stdout.readline(), self.run
        assert run is not None
        with suppress(OSError), open(log_of(element_of(run)), encoding="utf-8", errors="replace") as log:
            log.seek(self.log_from)
            for logged in log:
                if logged.startswith("warning: "):
                    say(f"{run.name}: {logged.rstrip()}")
        return json.loads(line) if line.endswith("\n") else None


@dataclass
class Pool:
    """Workers, which are kept between calls. gpus: of each; null: this process is the only one."""

    gpus: Sequence[str | None] | None = None
    later: Callable[[], Sequence[Run]] = tuple  # runs of later calls, as far as known now: for the remaining time
    aloud: bool = True  # print each failure, where the caller does not
    workers: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.gpus or [None])

    def execute(self, targets: list[Run], earlier_failures: Mapping[str, str] | None = None) -> dict[str, str]:
        """Compute the unfinished runs; after a failure, continue with those that do not depend on it. Returns the
        failures: run name -> reason. An unexpected exception is a failure too, after its traceback.

        earlier_failures: of an earlier call, which are not retried.

        Raises:
            Held: when all else is done, for a run that another process holds.
        """
        return Round(self, targets, earlier_failures or {}).finish()

    def idle_worker(self) -> Here | None:
        idle = next((worker for worker in self.workers if worker.run is None), None)
        if idle is None and len(self.workers) < self.size:
            idle = Worker.start(self.gpus[len(self.workers)]) if self.gpus else Here()
            self.workers.append(idle)
        return idle

    def answering(self, busy: Sequence[Here]) -> list[Here]:
        """The busy workers that have an answer, within a second."""
        if not self.gpus:
            return list(busy)
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[attr-defined]
            return [key.data for key, _ in selector.select(1.0)]

    def replace_dead(self, dead: Worker) -> int:
        """Start a worker in place of one that died. Returns the exit status of the dead one."""
        status = int(dead.process.wait())
        self.workers[self.workers.index(dead)] = Worker.start(dead.gpu)
        return status

    def close(self, gently: bool) -> None:
        """Close the workers' input, which ends idle ones; if not gently, send SIGTERM, and the others checkpoint."""
        for worker in self.workers:
            with suppress(BrokenPipeError):
                worker.process.stdin.close()
            if not gently:
                worker.process.send_signal(signal.SIGTERM)
        try:
            for worker in self.workers:
                worker.process.wait()
        except BaseException:  # interrupted a second time
            for worker in self.workers:
                worker.process.kill()
            raise


class Round:
    """Computes the unfinished runs among some targets and their parents."""

    def __init__(self, pool: Pool, targets: list[Run], earlier_failures: Mapping[str, str]) -> None:
        self.pool, self.failed = pool, dict(earlier_failures)
        self.held: dict[str, str] = {}  # run hash -> who holds its lease
        self.runs = order_runs(targets)
        self.history = History(finished_manifests(self.runs[0].runs_dir) if self.runs else ())
        reasons = reasons_unfinished(self.runs, targets)
        self.remaining = {run.hash: run for run in self.runs if run.hash in reasons and run.name not in self.failed}
        self.later: Sequence[Run] = ()
        if unfinished := list(self.remaining.values()):
            check_writable(self.runs[0].runs_dir)
            refuse_without_gpus(unfinished)
            self.later = pool.later()
            if stop.stop_signal_name():
                # before the first run: the attempt is counted for the training, which takes longest
                with count_attempt(next((run for run in unfinished if trains(run.config)), unfinished[0])):
                    pass
        self.waiting = dict(self.remaining)
        if pool.gpus:
            paths = longest_paths(self.runs, {run.hash: self.history.predict(run) or 0.0 for run in self.runs})
            self.waiting = dict(sorted(self.waiting.items(), key=lambda item: -paths[item[0]]))
        self.tries: dict[str, int] = {}
        self.begun = len(self.runs) - len(self.remaining)
        self.told, self.told_until = ("", ""), 0.0  # the time left, and until when it is not computed again
        for run in self.runs:
            if run.hash not in self.remaining and run.name not in self.failed and not self.is_blocked(run):
                self.check_finished(run)

    def check_finished(self, run: Run) -> None:
        """Mark a finished run as failed if its files were changed since."""
        try:
            check_unchanged(run.folder, weights=False)
        except Exception as error:
            self.mark_failed(run, reason_of(error))

    def is_blocked(self, run: Run) -> bool:
        """Whether a parent failed, so that this run fails too; names are looked up on the disk, which takes longer than
        small runs."""
        parents = parent_runs(run.parents) if self.failed else ()
        if blocked := next((parent.name for parent in parents if parent.name in self.failed), None):
            self.failed[run.name] = f"its parent {blocked} failed"
            self.drop_run(run)
        return blocked is not None

    def mark_failed(self, run: Run, reason: str) -> None:
        self.failed[run.name] = reason
        if self.pool.aloud:
            say(f"{run.name} failed: {reason}")
        self.drop_run(run)

    def drop_run(self, run: Run) -> None:
        self.remaining.pop(run.hash, None)
        self.waiting.pop(run.hash, None)

    def ready_runs(self) -> Iterator[Run]:
        """Runs whose parents are finished; drops those whose parents failed or are held."""
        for run in list(self.waiting.values()):
            if self.is_blocked(run):
                continue
            parents = parent_runs(run.parents)
            if held_parent := next((parent for parent in parents if parent.hash in self.held), None):
                self.held[run.hash] = self.held[held_parent.hash]
                self.drop_run(run)
            elif not any(parent.hash in self.remaining for parent in parents):
                yield run

    def unfinished(self, run: Run) -> bool:
        """Whether a run is still to be computed: another process may have finished it since it was planned."""
        try:
            if why_not_finished(run) is not None:
                return True
        except PipelineError as error:
            self.mark_failed(run, reason_of(error))
            return False
        self.begun += 1
        self.drop_run(run)
        self.check_finished(run)
        return False

    def hand_out(self) -> None:
        stop.raise_if_signalled()
        while (run := next(ready := self.ready_runs(), None)) and (worker := self.pool.idle_worker()):
            if worker.models and source_models(run):
                run = next((other for other in chain([run], ready) if source_models(other) == worker.models), run)
            if not run.config.redo and not self.unfinished(run):
                continue
            del self.waiting[run.hash]
            self.begun += 1
            seconds = self.history.predict(run)
            next_run = next(iter(self.waiting.values()), None)
            following, (left, more) = "", self.time_left()
            if next_run and not self.pool.gpus:
                following = f"; next {next_run.name}"
            say(f"{self.head()} {run.name} ({run.config.stage}), {left} left in all{more}{following}")
            worker.start_run(run, None if seconds is None else round(seconds, 1))

    def head(self) -> str:
        return f"[{self.begun}/{len(self.runs)}]"

    def time_left(self) -> tuple[str, str]:
        """The expected time until the end, and what is not in it; a training that runs is measured by its steps.
        Computed again when twenty times as long has passed as it took: of a thousand small runs it takes longer than
        one of them."""
        asked = time.monotonic()
        if asked >= self.told_until:
            left: dict[str, float] = {}
            for worker in self.pool.workers:
                if run := worker.run:
                    seconds = seconds_of_steps_left(run)
                    if seconds is None and (expected := self.history.predict(run)) is not None:
                        seconds = max(0.0, expected - (asked - worker.begun))
                    left |= {} if seconds is None else {run.hash: seconds}
            total, unknown = self.history.sum([*self.remaining.values(), *self.later], self.pool.size, left)
            self.told = total, f", not including {unknown}" if unknown else ""
            self.told_until = asked + 20 * (time.monotonic() - asked)
        return self.told

    def progress_line(self, columns: int | None = None) -> str:
        """One line of text: the run and step of each busy worker, and what is next; names are shortened to fit."""
        named = []
        for worker in self.pool.workers:
            if worker.run is not None:
                now = state.read_state(worker.run.workplace)
                step = f" {now['step']}/{now['steps']}" if now.get("step") and now.get("steps") else ""
                named.append(("", worker.run.label, f"{step} {time.monotonic() - worker.begun:.0f} s"))
        named += [("next ", run.label, "") for run in list(self.waiting.values())[:1]]
        left, more = self.time_left()
        head = f"{len(self.remaining)} runs and {left} left{more}"
        room = columns - len(head) - sum(len(f" | {before}{after}") for before, _, after in named) if columns else 10**9
        width = max(12, room // max(1, len(named)))
        return " | ".join([head, *(f"{before}{shorten(label, width)}{after}" for before, label, after in named)])

    def finish(self) -> dict[str, str]:
        of_several = bool(self.pool.gpus)
        hidden = not (of_several and sys.stderr.isatty())
        line = tqdm(bar_format="{desc}", file=sys.stderr, leave=False, disable=hidden)
        try:
            printed_at = time.monotonic()
            self.hand_out()
            while busy := [worker for worker in self.pool.workers if worker.run is not None]:
                for worker in self.pool.answering(busy):
                    self.handle_answer(worker)
                self.hand_out()
                if not line.disable:
                    line.set_description_str(self.progress_line(shutil.get_terminal_size().columns - 1))
                elif of_several and time.monotonic() - printed_at >= LOG_SECONDS:
                    printed_at = time.monotonic()
                    say(self.progress_line())
        finally:
            line.close()
        if self.held:
            error = Held(next(iter(self.held.values())))
            error.failed = self.failed
            raise error
        return self.failed

    def handle_answer(self, worker: Any) -> None:
        """Record how a worker's run ended, or that the worker died."""
        run, answer = worker.run, worker.read_answer()
        worker.run = None
        if answer is None:
            status = self.pool.replace_dead(worker)
            self.tries[run.hash] = self.tries.get(run.hash, 1) + 1
            death = f"its worker ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
            if self.tries[run.hash] > TRIES:
                self.mark_failed(run, f"{death}, {TRIES} times: see {log_of(element_of(run))}")
                return
            say(f"{run.name}: {death}; another begins it again")
            self.begun -= 1
            self.waiting[run.hash] = run
        elif answer["ended"] == "failed":
            self.mark_failed(run, answer["reason"])
        elif answer["ended"] == "held":
            if self.pool.aloud:
                say(answer["reason"])
            self.held[run.hash] = answer["reason"]
            self.drop_run(run)
        elif answer["ended"] == "stopped":  # the worker itself received a signal
            self.pool.replace_dead(worker)
            self.held[run.hash] = f"{run.name} was stopped: rerun the same command to resume"
            self.drop_run(run)
        else:
            say(f"{run.name if self.pool.gpus else self.head()} done in {answer['seconds']:.1f} s")
            self.drop_run(run)
            if manifest := read_manifest(run.folder):
                self.history.add(manifest)


def execute_here(targets: list[Run], aloud: bool = True, later: Callable[[], Sequence[Run]] = tuple) -> dict[str, str]:
    """Compute runs in this process, as Pool.execute does."""
    return Pool(later=later, aloud=aloud).execute(targets)


def seconds_of_steps_left(run: Run) -> float | None:
    """Seconds of the steps that a training has left, by those that it has done; None where none is measured."""
    now = state.read_state(run.workplace)
    if now.get("state") != "running" or not now.get("seconds_a_step"):
        return None
    return float((now["steps"] - now["step"]) * now["seconds_a_step"])
