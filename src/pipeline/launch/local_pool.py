"""launcher=local: the runs of a plan by several processes of this machine, each ready run to the next that is free.

What lies on the longest way to the end begins first; scores of one model go to the worker that holds it. A run that
fails costs what depends on it, a worker that dies is started again and its run tried once more. Workers are in a
session of their own, so that Ctrl-C reaches this process alone, which ends them in good order.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History, cores, visible_gpus
from pipeline.launch import in_process, plan_files
from pipeline.launch.run_json import element_of
from pipeline.launch.worker import log_of
from pipeline.progress import EVERY, draw, duration, say
from pipeline.runs import state
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished
from pipeline.runs.graph import ordered, unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, runs_behind
from pipeline.runs.unchanged import check_unchanged

TRIES = 2  # of a run whose worker died


@dataclass(eq=False)
class Worker:
    """One process, and what it is at."""

    gpu: str | None
    process: subprocess.Popen[str]
    run: Run | None = None
    begun: float = 0.0
    log_from: int = 0  # bytes of the run's log that were there before
    models: tuple[str, ...] = ()  # what it holds in memory: the sources of its last score

    @classmethod
    def start(cls, gpu: str | None) -> Worker:
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-m", "pipeline.launch.worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **visible},
        )  # fmt: skip
        return cls(gpu, process)

    def give(self, run: Run, seconds: float) -> None:
        element = element_of(run)
        self.run, self.begun, self.models = run, time.monotonic(), sources(run)
        log = log_of(element)
        self.log_from = log.stat().st_size if log.is_file() else 0
        with suppress(BrokenPipeError):  # it died while idle: seen when its answer is read
            self.pipe(self.process.stdin).write(json.dumps({**element, "predicted_seconds": round(seconds, 1)}) + "\n")
            self.pipe(self.process.stdin).flush()

    def answer(self) -> dict[str, Any] | None:
        """Its next line; None where it died."""
        line = self.pipe(self.process.stdout).readline()
        return json.loads(line) if line.endswith("\n") else None

    @staticmethod
    def pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def sources(run: Run) -> tuple[str, ...]:
    """The models that an evaluation reads; of another run none."""
    if not isinstance(run.config, EvalStage):
        return ()
    return tuple(sorted(parent.hash for role, parent in run.parents.items() if role != "data_root"))


@dataclass
class Pool:
    """Workers that stay between calls, and the order in which they get their runs."""

    gpus: Sequence[str | None]
    workers: list[Worker] = field(default_factory=list)

    def execute(self, targets: list[Run], before: Mapping[str, str] | None = None) -> dict[str, str]:
        """As study.execute.execute: makes what is not finished, and gives the failures, run name -> reason."""
        return Round(self, targets, before or {}).finish()

    def free(self) -> Worker | None:
        idle = next((worker for worker in self.workers if worker.run is None), None)
        if idle is None and len(self.workers) < len(self.gpus):
            idle = Worker.start(self.gpus[len(self.workers)])
            self.workers.append(idle)
        return idle

    def replace(self, dead: Worker) -> int:
        """Start another in the place of one that died. Gives the status that it died with."""
        status = dead.process.wait()
        self.workers[self.workers.index(dead)] = Worker.start(dead.gpu)
        return status

    def close(self, gently: bool) -> None:
        """Idle workers end when nothing more can come; others are asked to, and write a resume point before."""
        for worker in self.workers:
            with suppress(BrokenPipeError):
                Worker.pipe(worker.process.stdin).close()
            if not gently:
                worker.process.send_signal(signal.SIGTERM)
        try:
            for worker in self.workers:
                worker.process.wait()
        except BaseException:  # asked again
            for worker in self.workers:
                worker.process.kill()
            raise


class Round:
    """The runs behind some targets, on their way to be made."""

    def __init__(self, pool: Pool, targets: list[Run], before: Mapping[str, str]) -> None:
        self.pool, self.failed, self.held = pool, dict(before), {}  # type: ignore[var-annotated]
        self.runs = ordered(targets)
        self.history = History(finished(self.runs[0].runs_dir) if self.runs else ())
        reasons = unfinished(self.runs)
        self.left = {run.hash: run for run in self.runs if run.hash in reasons and run.name not in self.failed}
        if self.left:
            check_writable(self.runs[0].runs_dir)
        self.waiting = dict(self.left)
        self.tries: dict[str, int] = {}
        self.begun = len(self.runs) - len(self.left)
        self.rest: dict[str, float] = {}  # seconds on the longest way from a run's start to the end
        for run in reversed(self.runs):
            self.rest[run.hash] = self.rest.get(run.hash, 0.0) + self.seconds(run)
            for parent in runs_behind(run.parents):
                self.rest[parent.hash] = max(self.rest.get(parent.hash, 0.0), self.rest[run.hash])
        for run in self.runs:
            if run.hash not in self.left and run.name not in self.failed:
                self.attempt(run)

    def seconds(self, run: Run) -> float:
        """What a run is expected to take; of one that cannot be estimated nothing is counted."""
        return self.history.predict(run) or 0.0

    def attempt(self, run: Run) -> None:
        """A finished run that was changed since is a failure as well."""
        try:
            check_unchanged(run.folder)
        except Exception as error:
            self.fail(run, in_process.reason_of(error))

    def fail(self, run: Run, reason: str) -> None:
        self.failed[run.name] = reason
        print(f"{run.name} failed: {reason}", file=sys.stderr)
        self.drop(run)

    def drop(self, run: Run) -> None:
        self.left.pop(run.hash, None)
        self.waiting.pop(run.hash, None)

    def ready(self) -> list[Run]:
        """Those whose parents are finished, the longest way first; drops those whose parents never will be."""
        failed, found = set(self.failed), []
        for run in list(self.waiting.values()):
            parents = runs_behind(run.parents)
            if blocked := next((one for one in parents if one.name in failed), None):
                self.failed[run.name] = f"its parent {blocked.name} failed"
                failed.add(run.name)
                self.drop(run)
            elif held := next((one for one in parents if one.hash in self.held), None):
                self.held[run.hash] = self.held[held.hash]
                self.drop(run)
            elif not any(one.hash in self.left for one in parents):
                found.append(run)
        return sorted(found, key=lambda run: -self.rest[run.hash])

    def hand_out(self) -> None:
        while (ready := self.ready()) and (worker := self.pool.free()):
            run = ready[0]
            if sources(run):
                run = next((one for one in ready if sources(one) == worker.models), run)
            del self.waiting[run.hash]
            self.begun += 1
            worker.give(run, self.seconds(run))
            told = f"[{self.begun}/{len(self.runs)}] {run.name} ({run.config.stage})"
            say(f"{told}, about {duration(self.seconds_left())} left in all")

    def seconds_left(self) -> float:
        """By what finished runs took: all that is left shared out, and no less than the longest way."""
        left = self.left.values()
        shared = sum(map(self.seconds, left)) / len(self.pool.gpus)
        return max(shared, max((self.rest[run.hash] for run in left), default=0.0))

    def finish(self) -> dict[str, str]:
        shown = time.monotonic()
        self.hand_out()
        while busy := [worker for worker in self.pool.workers if worker.run is not None]:
            with selectors.DefaultSelector() as selector:
                for worker in busy:
                    selector.register(Worker.pipe(worker.process.stdout), selectors.EVENT_READ, worker)
                found = [key.data for key, _ in selector.select(1.0)]
            for worker in found:
                self.take(worker)
            self.hand_out()
            if sys.stderr.isatty():
                draw(view(self.pool.workers, len(self.left)))
            elif time.monotonic() - shown >= EVERY:
                shown = time.monotonic()
                say(view(self.pool.workers, len(self.left)))
        if self.held:
            held = Held(next(iter(self.held.values())))
            held.failed = self.failed
            raise held
        return self.failed

    def take(self, worker: Worker) -> None:
        """The answer of a worker to its run, or its death."""
        run, answer = worker.run, worker.answer()
        assert run is not None
        worker.run = None
        self.warn(worker, run)
        if answer is None:
            status = self.pool.replace(worker)
            self.tries[run.hash] = self.tries.get(run.hash, 1) + 1
            told = f"its worker ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
            if self.tries[run.hash] > TRIES:
                self.fail(run, f"{told}, {TRIES} times: see {log_of(element_of(run))}")
                return
            say(f"{run.name}: {told}; another begins it again")
            self.begun -= 1
            self.waiting[run.hash] = run
        elif answer["ended"] == "failed":
            self.fail(run, answer["reason"])
        elif answer["ended"] == "held":
            say(answer["reason"])
            self.held[run.hash] = answer["reason"]
            self.drop(run)
        elif answer["ended"] == "stopped":  # somebody asked the worker itself
            self.pool.replace(worker)
            self.held[run.hash] = f"{run.name} was stopped: the same command goes on"
            self.drop(run)
        else:
            say(f"{run.name} done in {answer['seconds']:.1f} s")
            self.drop(run)
            if manifest := read_manifest(run.folder):
                self.history.add(manifest)

    def warn(self, worker: Worker, run: Run) -> None:
        """What the run warned of, which is in its log, stands here too."""
        with suppress(OSError), open(log_of(element_of(run)), encoding="utf-8", errors="replace") as log:
            log.seek(worker.log_from)
            for line in log:
                if line.startswith("warning: "):
                    say(f"{run.name}: {line.rstrip()}")


def view(workers: Sequence[Worker], left: int) -> str:
    """One line: what each worker is at."""
    told = []
    for worker in workers:
        if worker.run is not None:
            now = state.read(worker.run.workplace)
            step = f" {now['step']}/{now['steps']}" if now.get("step") and now.get("steps") else ""
            told.append(f"{worker.run.label}{step} {time.monotonic() - worker.begun:.0f} s")
    return f"{left} left | " + " | ".join(told)


# ---------------------------------------------------------------------------------------------------- how many


@contextmanager
def makers(launcher: Launcher, targets: Sequence[Run]) -> Iterator[Any]:
    """What makes the runs of a plan here: a function of targets and earlier failures that gives the failures.

    One worker is this process; more are processes of their own.
    """
    plan_files.leave(plan_files.name_of(targets), ordered(list(targets)), {})
    gpus = visible_gpus()
    count = launcher.workers or default_workers(ordered(list(targets)), len(gpus))
    if count == 1:
        from pipeline.merge.resident import resident

        with resident():
            yield in_process.execute
        return
    if gpus:
        refuse_several_gpus(targets, count)
    pool = Pool([gpus[index % len(gpus)] if gpus else None for index in range(count)])
    gently = False
    try:
        yield pool.execute
        gently = True
    finally:
        pool.close(gently)


def refuse_several_gpus(targets: Sequence[Run], workers: int) -> None:
    """Each of several workers has one GPU."""
    runs = ordered(list(targets))
    left = unfinished(runs)
    for run in runs:
        knob, asked = in_process.gpus_asked(run)
        if asked > 1 and run.hash in left:
            raise PipelineError(
                f"{knob}={asked} ({run.name}), but launcher.workers={workers} gives a run one GPU: "
                "give launcher.workers=1"
            )


def default_workers(runs: Sequence[Run], gpus: int) -> int:
    """One a GPU; without, cores // threads of a run. One where a run takes all, or starts processes of its own."""
    several = any(
        run.config.sft.processes > 1 if isinstance(run.config, TrainStage) else run.config.eval.shards > 1
        for run in runs
        if isinstance(run.config, TrainStage | EvalStage)
    )
    if several:
        return 1
    heavy = [run.config.threads for run in runs if isinstance(run.config, TrainStage | EvalStage)]
    return gpus or max(1, cores() // max((threads or cores() for threads in heavy), default=cores()))
