"""The loop of every process that computes a plan: take the first run that is ready and nobody
computes, make it, again.

This process, each of the workers of a machine, and each task of a Slurm array runs the same `work`;
the lease of a run decides who makes it. What became of the runs is written to the folder of the
session, which is one call of a command, or one submission: `plan.jsonl`, and of each run
`<hash>.begun`, then `.done` or `.failed`. A failed run is not tried again in its session, nor is
what depends on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from pipeline.errors import Held, PipelineError
from pipeline.files import write_atomically
from pipeline.launch.cards import Cards
from pipeline.launch.plan_file import Task, read_plan, write_plan
from pipeline.progress import say
from pipeline.runs import state, stop
from pipeline.runs.lease import Holder, held_by, live_holder, should_wait, slurm_job, waits_for

Compute = Callable[[Task, Callable[[], None]], Any]  # makes the run of a task, as `work` has it
PLAN = "plan.jsonl"
LOOK = 0.2  # seconds between two looks of a worker that waits for others
TRIES = 3  # of a run whose workers died
BLOCKED = "its parent "  # begins the reason of a run that failed by another


class Session:
    """The tasks of a session and what became of them.

    left: neither done nor failed; failed: hash -> reason.
    """

    def __init__(self, folder: Path, tasks: Sequence[Task] = ()) -> None:
        self.folder, self.plan_bytes = folder, 0
        self.tasks: list[Task] = []
        self.left: list[Task] = []
        self.names: dict[str, str] = {}
        self.begun: set[str] = set()
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        if tasks:
            write_plan(folder / PLAN, tasks)
        self.look()

    def add(self, tasks: Sequence[Task]) -> None:
        """Add tasks to the plan, which its workers see when they look; one that was made before is
        made again.
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
        files = [name.partition(".") for name in os.listdir(self.folder)]
        self.begun, self.done, failed = (
            {key for key, _, kind in files if kind == wanted}
            for wanted in ("begun", "done", "failed")
        )
        for task in self.left:
            blocked = next((parent for parent in task.needs if parent in self.failed), None)
            if task.hash in failed:
                self.failed[task.hash] = self._file(task, "failed").read_text(encoding="utf-8")
            elif blocked:
                self.failed[task.hash] = f"{BLOCKED}{self.names[blocked]} failed"
        self.left = [
            task
            for task in self.left
            if task.hash not in self.done and task.hash not in self.failed
        ]

    def ready(self, models: Sequence[str] = ()) -> list[Task]:
        """Return the tasks that wait for nothing, the first to make first.

        Evaluations of the models in memory come first, then those of models that no other worker
        has.
        """
        left = {task.hash for task in self.left}
        ready = [task for task in self.left if left.isdisjoint(task.needs)]
        if ready and ready[0].models:
            busy = [task.models for task in self.left if task.models and task.hash in self.begun]
            ready.sort(key=lambda task: (task.models != models, task.models in busy))
        return ready

    def begun_by(self, task: Task) -> list[int]:
        """Return the process ids of the workers that have begun a run and not ended it in good
        order.
        """
        with suppress(FileNotFoundError):
            return [int(pid) for pid in self._file(task, "begun").read_text().split()]
        return []

    def begin(self, task: Task) -> None:
        """Record that this process begins a run.

        Raises PipelineError after TRIES workers that died of it.
        """
        pids = self.begun_by(task)
        if len(pids) == TRIES:
            raise PipelineError(f"its worker ended without a word, {TRIES} times: see {task.log}")
        self._write(task, "begun", " ".join(map(str, [*pids, os.getpid()])))
        self.begun.add(task.hash)

    def leave(self, task: Task) -> None:
        """Record that this process no longer computes a run, for another to begin it."""
        pids = []
        for pid in self.begun_by(task):
            if pid != os.getpid():
                pids.append(pid)
        if pids:
            self._write(task, "begun", " ".join(map(str, pids)))
        else:
            self._file(task, "begun").unlink(missing_ok=True)

    def finish(self, task: Task) -> None:
        self._write(task, "done", "")

    def fail(self, task: Task, reason: str) -> None:
        if slurm_job():  # for stage=status, also of what failed before it began
            task.workplace.mkdir(parents=True, exist_ok=True)
            state.update_state(
                task.workplace, name=task.name, stage=task.stage, state="failed", last_line=reason
            )
        self._write(task, "failed", reason)

    def is_free(self, task: Task) -> bool:
        """Whether nobody has made a run, or makes it now.

        Of its files alone: a list of all takes long where it is long.
        """
        ended = any(self._file(task, kind).is_file() for kind in ("done", "failed"))
        return not ended and live_holder(task.workplace) is None

    def _file(self, task: Task, kind: str) -> Path:
        return self.folder / f"{task.hash}.{kind}"

    def _write(self, task: Task, kind: str, text: str) -> None:
        write_atomically(self._file(task, kind), text, durable=False)


def work(
    session: Session,
    compute: Compute,
    cards: Cards | None = None,
    fits: Callable[[Task], bool] = lambda task: True,
    stay: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> list[str]:
    """Make runs of a session until none is left to this worker.

    Returns why it did not make those that are.

    Args:
        compute: makes the run of a task, or raises why not; calls its second argument once it has
            its lease.
        cards: those that it may use, of several workers.
        fits: whether a task is one for this worker.
        stay: whether it waits for more tasks where none is left, until a signal ends it.
        tell: called whenever something may have changed.
    """
    models: list[str] = []
    refused: dict[
        str, str
    ] = {}  # runs that no process holds and that cannot be made now: hash -> why
    announced = False
    while True:
        stop.raise_if_signalled()
        session.look()
        tell()
        held: dict[str, Holder] = {}
        tried = stay
        ready = [task for task in session.ready(models) if fits(task)]
        for task in () if cards and cards.give_way() else ready:
            if task.hash in refused and not stay:
                continue
            holder = live_holder(task.workplace)
            if holder:
                held[task.name] = holder
                continue
            tried = True
            with (
                cards.taken(task.gpus, partial(session.is_free, task))
                if cards
                else nullcontext(True)
            ) as taken:
                if taken and session.is_free(task) and make(session, task, compute, refused):
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
    """Make a run and record how it ended.

    False: it could not get its lease; `refused` gets the reason where no process holds it.
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
