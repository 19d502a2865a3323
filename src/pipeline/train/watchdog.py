"""A training that is looked after: signals stop it in good order, a stall ends it."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.runs import resume
from pipeline.train.checkpoints import Checkpoints, Save, print_above_bar

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


@contextmanager
def supervised(
    trainer: Any, run: Run[TrainStage], tracker: Tracker, save: Save, base: Path | None = None
) -> Iterator[Checkpoints]:
    """A training that is looked after: train inside, with `resume_from_checkpoint=checkpoints.resume_from`.

    SIGTERM and SIGUSR1 (as Slurm sends them before the end) stop it after the step with a resume point and
    the exit status resume.UNFINISHED; no step for sft.stall_minutes ends it likewise, with the stacks of all threads.
    """
    stacks = run.work / f"stalled-{trainer.args.process_index}.txt"
    try:
        checkpoints = Checkpoints(trainer, run, tracker, save, base)
        trainer.add_callback(checkpoints)
        with stopped_by_signals(checkpoints), ended_by_a_stall(checkpoints, stacks):
            yield checkpoints
    except PipelineError as error:
        record = resume.usable(run)
        if record is None:
            raise
        raise PipelineError(f"{error}; the resume point after step {record['step']} stays in {run.work}") from error
    finally:
        for bar in (getattr(callback, "bar", None) for callback in trainer.callback_handler.callbacks):
            if bar is not None:
                bar.close()  # so that what is said next begins a line


@contextmanager
def stopped_by_signals(checkpoints: Checkpoints) -> Iterator[None]:
    """A signal of resume.STOPPING asks for a stop after the step; handlers are those of before when it is over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        checkpoints.asked_to_stop = signal.Signals(number).name

    earlier = {number: signal.signal(number, ask) for number in resume.STOPPING}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_a_stall(checkpoints: Checkpoints, stacks: Path) -> Iterator[None]:
    """End the process where no step, validation batch or save is done within sft.stall_minutes."""
    over, minutes = threading.Event(), checkpoints.sft.stall_minutes
    if minutes is not None:
        threading.Thread(target=watch, args=(checkpoints, minutes, stacks, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def watch(checkpoints: Checkpoints, minutes: float, stacks: Path, over: threading.Event) -> None:
    """Until it is over; `stacks`: the file for those of all threads."""
    while not over.wait(min(15 * minutes, 10)):
        if time.monotonic() - checkpoints.beat > 60 * minutes:
            then = "goes on from its resume point" if checkpoints.can_go_on else "begins anew: it has no resume point"
            print_above_bar(
                f"{checkpoints.run.name}: no step for sft.stall_minutes={minutes}; the stacks of all threads are in "
                f"{stacks}; the same command {then}"
            )
            with open(stacks, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            os._exit(resume.UNFINISHED)  # a thread that hangs in a library hears nothing softer
