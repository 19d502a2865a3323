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
from pipeline.train.checkpoints import Life, Save, tell

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


# ---------------------------------------------------------------------------------------------------- around it


@contextmanager
def alive(trainer: Any, run: Run[TrainStage], tracker: Tracker, save: Save, base: Path | None = None) -> Iterator[Life]:
    """A training that is looked after: train inside, with `resume_from_checkpoint=life.resume_from`.

    SIGTERM and SIGUSR1 (as Slurm sends them before the end) stop it after the step with a resume point and
    the exit status resume.UNFINISHED; no step for sft.stall_minutes ends it likewise, with the stacks of all threads.
    """
    try:
        life = Life(trainer, run, tracker, save, base)
        trainer.add_callback(life)
        with stopped_by_signals(life), watched(life, run.work / f"stalled-{trainer.args.process_index}.txt"):
            yield life
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
def stopped_by_signals(life: Life) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        life.asked_to_stop = signal.Signals(number).name

    kept_handlers = {number: signal.signal(number, ask) for number in resume.STOPPING}
    try:
        yield
    finally:
        for number, handler in kept_handlers.items():
            signal.signal(number, handler)


@contextmanager
def watched(life: Life, stacks: Path) -> Iterator[None]:
    """End the process where no step, validation batch or save is done within sft.stall_minutes."""
    minutes, over = life.sft.stall_minutes, threading.Event()

    def watch() -> None:
        assert minutes is not None
        while not over.wait(min(15 * minutes, 10)):
            if time.monotonic() - life.beat > 60 * minutes:
                then = "goes on from its resume point" if life.can_go_on else "begins anew: it has no resume point"
                tell(
                    f"{life.run.name}: no step for sft.stall_minutes={minutes}; the stacks of all threads are in "
                    f"{stacks}; the same command {then}"
                )
                with open(stacks, "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                os._exit(resume.UNFINISHED)  # a thread that hangs in a library hears nothing softer

    if minutes is not None:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
