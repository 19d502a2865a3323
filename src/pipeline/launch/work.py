"""The loop of every process that computes a plan.

This process, each local worker and each task of a Slurm array run the same `work`: take the first
run that is ready and free, compute it, and repeat. The lease of a run decides which process
computes it.

A session is one call of a command, or one submission. Its folder holds `plan.jsonl` and, for each
run, `<hash>.begun` and later `.done` or `.failed`. In one session a failed run is not retried, and
runs that depend on it are not computed.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from pipeline.errors import Held, PipelineError
from pipeline.files import write_atomically
from pipeline.launch.plan_file import Task, read_plan, write_plan
from pipeline.progress import say
from pipeline.runs import state, stop
from pipeline.runs.lease import Holder, held_by, live_holder, should_wait, slurm_job, waits_for

Compute = Callable[[Task, Callable[[], None]], Any]  # computes the run of a task; see `work`
PLAN = "plan.jsonl"
LOOK = 0.2  # seconds between two checks of a waiting worker
TRIES = 3  # attempts at a run whose workers died
BLOCKED = "its parent "  # begins the reason of a run whose parent failed


class Session:
    """The tasks of a session and their states.

    `left` lists the tasks that are neither done nor failed. `failed` maps a hash to the reason.
    """

    def __init__(self, folder: Path, tasks: Sequence[Task] = ()) -> None:
        self.folder, self.plan_bytes = folder, 0
        self.tasks: list[Task] = []
        self.left: list[Task] = []
        self.names: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        if tasks:
            write_plan(folder / PLAN, tasks)
        self.look()

    def add(self, tasks: Sequence[Task]) -> None:
        """Add tasks to the plan, and forget how earlier attempts at them ended.

        The workers see new tasks at their next `look`.
        """
        for task in tasks:
            for kind in ("begun", "done", "failed"):
                self._file(task, kind).unlink(missing_ok=True)
        if tasks:
            write_plan(self.folder / PLAN, [*self.tasks, *tasks])
        self.look()

    def look(self) -> None:
        """Read what the processes of the session have written."""
        plan = self.folder / PLAN
        if plan.is_file():
            size = plan.stat().st_size
            if size != self.plan_bytes:
                self.plan_bytes, new = size, read_plan(plan)[len(self.tasks) :]
                self.tasks, self.left = self.tasks + new, self.left + new
                self.names |= {task.hash: task.name for task in new}
        states = defaultdict[str, set[str]](set)  # kind of file -> hashes
        for name in os.listdir(self.folder):
            key, _, kind = name.partition(".")
            states[kind].add(key)
        self.begun, self.done, failed = states["begun"], states["done"], states["failed"]
        for task in self.left:
            blocked = next((parent for parent in task.needs if parent in self.failed), None)
            if task.hash in failed:
                self.failed[task.hash] = self._file(task, "failed").read_text(encoding="utf-8")
            elif blocked:
                self.failed[task.hash] = f"{BLOCKED}{self.names[blocked]} failed"
        ended = self.done | self.failed.keys()
        self.left = [task for task in self.left if task.hash not in ended]

    def failures(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Return the reasons of the failed runs among some tasks, by run name."""
        failures = {}
        for task in tasks:
            if task.hash in self.failed:
                failures[task.name] = self.failed[task.hash]
        return failures

    def ready(self, models: Sequence[str] = ()) -> list[Task]:
        """Return the tasks whose dependencies are finished, in the order to run them.

        Evaluations of the models in memory come first, then evaluations of models that no other
        worker has loaded.
        """
        left = {task.hash for task in self.left}
        ready = [task for task in self.left if left.isdisjoint(task.needs)]
        if ready and ready[0].models:
            busy = [task.models for task in self.left if task.models and task.hash in self.begun]
            ready.sort(key=lambda task: (task.models != models, task.models in busy))
        return ready

    def begun_by(self, task: Task) -> list[int]:
        """Return the process ids of workers that began a run and did not end it normally."""
        with suppress(FileNotFoundError):
            return [int(pid) for pid in self._file(task, "begun").read_text().split()]
        return []

    def begin(self, task: Task) -> None:
        """Record that this process begins a run.

        Raises:
            PipelineError: TRIES workers have died of this run.
        """
        pids = self.begun_by(task)
        if len(pids) == TRIES:
            raise PipelineError(f"its worker ended without a word, {TRIES} times. See {task.log}.")
        pids.append(os.getpid())
        self._write(task, "begun", " ".join(map(str, pids)))
        self.begun.add(task.hash)

    def leave(self, task: Task) -> None:
        """Record that this process stops computing a run, so that another worker can begin it."""
        pids = [pid for pid in self.begun_by(task) if pid != os.getpid()]
        if pids:
            self._write(task, "begun", " ".join(map(str, pids)))
        else:
            self._file(task, "begun").unlink(missing_ok=True)

    def finish(self, task: Task) -> None:
        self._write(task, "done", "")

    def fail(self, task: Task, reason: str) -> None:
        if slurm_job():  # stage=status also shows a run that failed before it began
            task.workplace.mkdir(parents=True, exist_ok=True)
            state.update_state(
                task.workplace, name=task.name, stage=task.stage, state="failed", last_line=reason
            )
        self._write(task, "failed", reason)

    def has_ended(self, task: Task) -> bool:
        """Return True if a run is done or has failed since the last `look`.

        Looks only at the files of this run, because listing a large folder is slow.
        """
        return any(self._file(task, kind).is_file() for kind in ("done", "failed"))

    def _file(self, task: Task, kind: str) -> Path:
        return self.folder / f"{task.hash}.{kind}"

    def _write(self, task: Task, kind: str, text: str) -> None:
        write_atomically(self._file(task, kind), text, durable=False)


def work(
    session: Session,
    compute: Compute,
    fits: Callable[[Task], bool] = lambda task: True,
    stay: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> list[str]:
    """Compute runs of a session until this worker finds no more.

    Args:
        session: the tasks and their states.
        compute: computes the run of a task, or raises an error with the reason. It calls its second
            argument before it computes.
        fits: returns True for tasks that this worker may compute.
        stay: whether to wait for new tasks until a signal arrives.
        tell: called in each round, to print what has changed.

    Returns:
        One reason for each run that could not be computed now.
    """
    models: list[str] = []
    refused: dict[str, str] = {}  # hash -> why a run without a holder cannot be computed now
    announced = False
    while True:
        stop.raise_if_signalled()
        session.look()
        tell()
        held: dict[str, Holder] = {}
        tried = stay
        ready = [task for task in session.ready(models) if fits(task)]
        for task in ready:
            if task.hash in refused and not stay:
                continue
            holder = live_holder(task.workplace)
            if holder:
                held[task.name] = holder
                continue
            tried = True
            if not session.has_ended(task) and make(session, task, compute, refused):
                models = task.models
                break
        else:
            if not tried and not (held and should_wait()):
                return [*refused.values(), *starmap(held_by, held.items())]
            if not tried and not announced:
                say(waits_for(*next(iter(held.items()))))
                announced = True
            time.sleep(LOOK)


def make(session: Session, task: Task, compute: Compute, refused: dict[str, str]) -> bool:
    """Compute a run and record how it ended.

    Returns:
        False if the run cannot be computed now. If no process computes it either, `refused` gets
            the reason.
    """
    try:
        compute(task, partial(session.begin, task))
    except Held as error:
        if live_holder(task.workplace) is None:
            refused[task.hash] = str(error)
        return False
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, stop.NoProgress):
            session.fail(task, error.reason)
        session.leave(task)
        raise
    except Exception as error:
        from pipeline.launch.in_process import reason_of

        session.fail(task, reason_of(error))
    else:
        session.finish(task)
    return True
