"""launcher=local: several processes of this machine compute the runs of a plan; each ready run goes to an idle worker.

Runs on the longest path to the end start first; evaluations of one model go to the worker that has it in memory. A
failed run fails what depends on it; a worker that dies is restarted and its run retried once. Workers are in their own
session, so that Ctrl-C reaches this process alone, which shuts them down.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from tqdm import tqdm

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History, cores, visible_gpus
from pipeline.launch import in_process, plan_files
from pipeline.launch.preflight import refuse_too_large
from pipeline.launch.run_json import element_of
from pipeline.launch.worker import log_of
from pipeline.progress import LOG_SECONDS, format_duration, say
from pipeline.runs import state
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import longest_paths, order_runs, reasons_unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.evaluation import source_models
from pipeline.text import pluralize, shorten

TRIES = 2  # of a run whose worker died


@dataclass(eq=False)
class Worker:
    """One worker process and the run that it computes."""

    gpu: str | None
    process: subprocess.Popen[str]
    run: Run | None = None
    begun: float = 0.0
    log_from: int = 0  # bytes of the run's log before this run
    models: tuple[str, ...] = ()  # models in its memory: those of its last evaluation

    @classmethod
    def start(cls, gpu: str | None) -> Worker:
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-m", "pipeline.launch.worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **visible},
        )  # fmt: skip
        return cls(gpu, process)

    def start_run(self, run: Run, seconds: float) -> None:
        element = element_of(run)
        self.run, self.begun, self.models = run, time.monotonic(), source_models(run)
        log = log_of(element)
        self.log_from = log.stat().st_size if log.is_file() else 0
        with suppress(BrokenPipeError):  # it died while idle: noticed when its answer is read
            self.pipe(self.process.stdin).write(json.dumps({**element, "predicted_seconds": round(seconds, 1)}) + "\n")
            self.pipe(self.process.stdin).flush()

    def read_answer(self) -> dict[str, Any] | None:
        """Its next answer; None if it died."""
        line = self.pipe(self.process.stdout).readline()
        return json.loads(line) if line.endswith("\n") else None

    @staticmethod
    def pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@dataclass
class Pool:
    """Workers, which are kept between calls."""

    gpus: Sequence[str | None]
    workers: list[Worker] = field(default_factory=list)
    later: Callable[[], Sequence[Run]] = tuple  # runs of later calls, as far as known now

    def execute(self, targets: list[Run], earlier_failures: Mapping[str, str] | None = None) -> dict[str, str]:
        """As in_process.execute: computes the unfinished runs and returns the failures, run name -> reason."""
        return Round(self, targets, earlier_failures or {}).finish()

    def idle_worker(self) -> Worker | None:
        idle = next((worker for worker in self.workers if worker.run is None), None)
        if idle is None and len(self.workers) < len(self.gpus):
            idle = Worker.start(self.gpus[len(self.workers)])
            self.workers.append(idle)
        return idle

    def replace_dead(self, dead: Worker) -> int:
        """Start a worker in place of one that died. Returns the exit status of the dead one."""
        status = dead.process.wait()
        self.workers[self.workers.index(dead)] = Worker.start(dead.gpu)
        return status

    def close(self, gently: bool) -> None:
        """Close the workers' input, which ends idle ones; if not gently, send SIGTERM, and the others checkpoint."""
        for worker in self.workers:
            with suppress(BrokenPipeError):
                Worker.pipe(worker.process.stdin).close()
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
        self.pool, self.failed, self.held = pool, dict(earlier_failures), {}  # type: ignore[var-annotated]
        self.runs = order_runs(targets)
        self.history = History(finished_manifests(self.runs[0].runs_dir) if self.runs else ())
        reasons = reasons_unfinished(self.runs, targets)
        self.remaining = {run.hash: run for run in self.runs if run.hash in reasons and run.name not in self.failed}
        if self.remaining:
            check_writable(self.runs[0].runs_dir)
        self.waiting = dict(self.remaining)
        self.tries: dict[str, int] = {}
        self.beside: list[float] = []  # seconds of a worker on a run, beside those that the run records
        self.begun = len(self.runs) - len(self.remaining)
        self.told, self.told_until = "", 0.0  # the time left, and until when it is not computed again
        self.later = pool.later() if self.remaining else ()
        self.longest_path = longest_paths(self.runs, {run.hash: self.expected_seconds(run) or 0.0 for run in self.runs})
        for run in self.runs:
            if run.hash not in self.remaining and run.name not in self.failed:
                self.check_finished(run)

    def expected_seconds(self, run: Run) -> float | None:
        return self.history.predict(run)

    def check_finished(self, run: Run) -> None:
        """Mark a finished run as failed if its files were changed since."""
        try:
            check_unchanged(run.folder, weights=False)
        except Exception as error:
            self.mark_failed(run, in_process.reason_of(error))

    def mark_failed(self, run: Run, reason: str) -> None:
        self.failed[run.name] = reason
        say(f"{run.name} failed: {reason}")
        self.drop_run(run)

    def drop_run(self, run: Run) -> None:
        self.remaining.pop(run.hash, None)
        self.waiting.pop(run.hash, None)

    def ready_runs(self) -> list[Run]:
        """Runs whose parents are finished, longest path first; drops those whose parents failed or are held."""
        failed, runs = set(self.failed), []
        for run in list(self.waiting.values()):
            parents = parent_runs(run.parents)
            # names are looked up on the disk, which takes longer than small runs
            if failed and (blocked := next((parent for parent in parents if parent.name in failed), None)):
                self.failed[run.name] = f"its parent {blocked.name} failed"
                failed.add(run.name)
                self.drop_run(run)
            elif held_parent := next((parent for parent in parents if parent.hash in self.held), None):
                self.held[run.hash] = self.held[held_parent.hash]
                self.drop_run(run)
            elif not any(parent.hash in self.remaining for parent in parents):
                runs.append(run)
        return sorted(runs, key=lambda run: -self.longest_path[run.hash])

    def hand_out(self) -> None:
        while (ready := self.ready_runs()) and (worker := self.pool.idle_worker()):
            run = ready[0]
            if source_models(run):
                run = next((candidate for candidate in ready if source_models(candidate) == worker.models), run)
            del self.waiting[run.hash]
            self.begun += 1
            worker.start_run(run, self.expected_seconds(run) or 0.0)
            say(f"[{self.begun}/{len(self.runs)}] {run.name} ({run.config.stage}), {self.time_left()} left in all")

    def time_left(self) -> str:
        """Computed again when twenty times as long has passed as it took: of a thousand small runs it takes longer than
        one of them."""
        begun = time.monotonic()
        if begun >= self.told_until:
            seconds = self.seconds_left()
            self.told = "?" if seconds is None else f"about {format_duration(seconds)}"
            self.told_until = begun + 20 * (time.monotonic() - begun)
        return self.told

    def seconds_left(self) -> float | None:
        """Expected seconds until the end: the remaining work divided among workers, at least the longest path; then the
        runs of later calls. None if some run cannot be estimated.

        A training that runs is measured by its steps. How much slower than expected it is also holds for the stages of
        which no run is finished. What a worker needs beside a run's own seconds is the median of those finished here.
        """
        beside = statistics.median(self.beside) if self.beside else 0.0
        expected = {
            run.hash: None if (seconds := self.expected_seconds(run)) is None else seconds + beside
            for run in [*self.remaining.values(), *self.later]
        }
        left: dict[str, float] = {}
        paces = []
        for worker in self.pool.workers:
            if (run := worker.run) is None:
                continue
            elapsed, seconds = time.monotonic() - worker.begun, expected.get(run.hash)
            measured = seconds_of_steps_left(run)
            if measured is not None:
                paces += [(elapsed + measured) / seconds] if seconds else []
                left[run.hash] = measured
            elif seconds is not None:
                left[run.hash] = max(seconds - elapsed, 0.0)
        pace = statistics.median(paces) if paces else 1.0

        def still_needed(run: Run) -> float:
            seconds = expected[run.hash] or 0.0
            return left.get(run.hash, seconds * (1.0 if self.history.knows(run.config.stage) else pace))

        if any(seconds is None and name not in left for name, seconds in expected.items()):
            return None
        remaining = {run.hash: still_needed(run) for run in self.remaining.values()}
        shared = sum(remaining.values()) / len(self.pool.gpus)
        longest = max(longest_paths(self.runs, remaining).values(), default=0.0)
        return max(shared, longest) + sum(map(still_needed, self.later)) / len(self.pool.gpus)

    def progress_line(self, columns: int | None = None) -> str:
        """One line of text: the run and step of each busy worker, and what is next; names are shortened to fit."""
        named = []
        for worker in self.pool.workers:
            if worker.run is not None:
                now = state.read_state(worker.run.workplace)
                step = f" {now['step']}/{now['steps']}" if now.get("step") and now.get("steps") else ""
                named.append(("", worker.run.label, f"{step} {time.monotonic() - worker.begun:.0f} s"))
        waiting = [*self.ready_runs(), *self.waiting.values()]
        named += [("next ", run.label, "") for run in waiting[:1]]
        head = f"{len(self.remaining)} runs and {self.time_left()} left"
        room = columns - len(head) - sum(len(f" | {before}{after}") for before, _, after in named) if columns else 10**9
        width = max(12, room // max(1, len(named)))
        return " | ".join([head, *(f"{before}{shorten(label, width)}{after}" for before, label, after in named)])

    def finish(self) -> dict[str, str]:
        line = tqdm(bar_format="{desc}", file=sys.stderr, leave=False, disable=not sys.stderr.isatty())
        try:
            printed_at = time.monotonic()
            self.hand_out()
            while busy := [worker for worker in self.pool.workers if worker.run is not None]:
                with selectors.DefaultSelector() as selector:
                    for worker in busy:
                        selector.register(Worker.pipe(worker.process.stdout), selectors.EVENT_READ, worker)
                    answering = [key.data for key, _ in selector.select(1.0)]
                for worker in answering:
                    self.handle_answer(worker)
                self.hand_out()
                if not line.disable:
                    line.set_description_str(self.progress_line(shutil.get_terminal_size().columns - 1))
                elif time.monotonic() - printed_at >= LOG_SECONDS:
                    printed_at = time.monotonic()
                    say(self.progress_line())
        finally:
            line.close()
        if self.held:
            error = Held(next(iter(self.held.values())))
            error.failed = self.failed
            raise error
        return self.failed

    def handle_answer(self, worker: Worker) -> None:
        """Record how a worker's run ended, or that the worker died."""
        run, answer = worker.run, worker.read_answer()
        assert run is not None
        worker.run = None
        self.print_warnings(worker, run)
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
            say(answer["reason"])
            self.held[run.hash] = answer["reason"]
            self.drop_run(run)
        elif answer["ended"] == "stopped":  # the worker itself received a signal
            self.pool.replace_dead(worker)
            self.held[run.hash] = f"{run.name} was stopped: rerun the same command to resume"
            self.drop_run(run)
        else:
            say(f"{run.name} done in {answer['seconds']:.1f} s")
            self.drop_run(run)
            if manifest := read_manifest(run.folder):
                self.history.add(manifest)
                self.beside.append(max(0.0, time.monotonic() - worker.begun - manifest.seconds))

    def print_warnings(self, worker: Worker, run: Run) -> None:
        """Print the warnings of the run's log here too."""
        with suppress(OSError), open(log_of(element_of(run)), encoding="utf-8", errors="replace") as log:
            log.seek(worker.log_from)
            for line in log:
                if line.startswith("warning: "):
                    say(f"{run.name}: {line.rstrip()}")


def seconds_of_steps_left(run: Run) -> float | None:
    """Seconds of the steps that a training has left, by those that it has done; None where none is measured."""
    now = state.read_state(run.workplace)
    if now.get("state") != "running" or not now.get("seconds_a_step"):
        return None
    return (now["steps"] - now["step"]) * now["seconds_a_step"]


# ---------------------------------------------------------------------------------------------------- how many


@contextmanager
def local_executor(
    launcher: Launcher, targets: Sequence[Run], later: Callable[[], Sequence[Run]] = tuple
) -> Iterator[Any]:
    """A function that computes targets on this machine, given earlier failures, and returns the failures.

    later: runs of later calls, which count for the remaining time. A single worker is this process; several are
    subprocesses.
    """
    runs = order_runs(list(targets))
    reasons = reasons_unfinished(runs, targets)
    remaining = [run for run in runs if run.hash in reasons]
    refuse_too_large(remaining)
    plan_files.write_plan(plan_files.plan_name(targets), runs, {})
    gpus = visible_gpus()
    count = workers_of(launcher, runs)
    if count == 1:
        from pipeline.merge.resident import keep_models_resident

        with keep_models_resident():
            yield partial(in_process.execute, later=later)
        return
    gpus_each = max(1, len(gpus) // count)  # GPUs that a worker has
    if gpus:
        refuse_several_gpus(remaining, count, gpus_each)
    shares = [",".join(gpus[index * gpus_each % len(gpus) :][:gpus_each]) if gpus else None for index in range(count)]
    pool = Pool(shares, later=later)
    gently = False
    try:
        yield pool.execute
        gently = True
    finally:
        pool.close(gently)


def refuse_several_gpus(remaining: Sequence[Run], workers: int, gpus_each: int) -> None:
    """Raise PipelineError if an unfinished run needs more GPUs than each of several workers has."""
    for run in remaining:
        gpus = in_process.gpus_requested(run)
        if gpus > gpus_each:
            raise PipelineError(
                f"sft.processes={gpus} ({run.name}), but launcher.workers={workers} gives a run "
                f"{pluralize(gpus_each, 'GPU')}: give launcher.workers=1"
            )


def workers_of(launcher: Launcher, runs: Sequence[Run]) -> int:
    """Number of processes of this machine that compute a plan's runs."""
    return launcher.workers or default_workers(runs, len(visible_gpus()))


def default_workers(runs: Sequence[Run], gpus: int) -> int:
    """Number of workers: as many as GPUs can have a run of most processes each; without GPUs cores // threads of a run,
    and one if a run uses several processes."""
    processes = max((in_process.gpus_requested(run) for run in runs), default=1)
    if gpus or processes > 1:
        return max(1, gpus // processes)
    heavy = [run.config.threads for run in runs if isinstance(run.config, TrainStage | EvalStage)]
    return max(1, cores() // max((threads or cores() for threads in heavy), default=cores()))
