"""Supervision of a training: signals stop it in an orderly way, a stall ends it."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.progress import say
from pipeline.runs import resume, state
from pipeline.runs.stop import UNFINISHED, heard_by
from pipeline.train.checkpoints import Checkpoints, Save

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


@contextmanager
def supervised(
    trainer: Any, run: Run[TrainStage], tracker: Tracker, save: Save, base: Path | None = None
) -> Iterator[Checkpoints]:
    """Supervise a training inside the context; train with `resume_from_checkpoint=checkpoints.resume_from`.

    SIGTERM and SIGUSR1 (sent by Slurm before a job ends) stop it after the step with a resume point and the exit
    status UNFINISHED; no step for sft.stall_minutes ends it likewise, with the stacks of all threads.
    """
    stacks = run.work / f"stalled-{trainer.args.process_index}.txt"
    try:
        checkpoints = Checkpoints(trainer, run, tracker, save, base)
        trainer.add_callback(checkpoints)
        with heard_by(checkpoints.ask_to_stop), ending_on_stall(checkpoints, stacks):
            yield checkpoints
    except PipelineError as error:
        record = resume.usable_resume_point(run)
        if record is None:
            raise
        raise PipelineError(f"{error}; the resume point after step {record['step']} stays in {run.work}") from error
    finally:
        for bar in (getattr(callback, "bar", None) for callback in trainer.callback_handler.callbacks):
            if bar is not None:
                bar.close()  # so that the next message begins a line


@contextmanager
def ending_on_stall(checkpoints: Checkpoints, stacks: Path) -> Iterator[None]:
    """End the process where no step, validation batch or save is done within sft.stall_minutes."""
    over, minutes = threading.Event(), checkpoints.sft.stall_minutes
    if minutes is not None:
        threading.Thread(target=watch_for_stall, args=(checkpoints, minutes, stacks, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def watch_for_stall(checkpoints: Checkpoints, minutes: float, stacks: Path, over: threading.Event) -> None:
    """Watch until `over` is set; stacks: the file for the stacks of all threads. Growing files, as while a resume point
    is written, are a sign of life.

    The exit status is that of a failure if the previous attempt hung after the same step, so that it is not requeued.
    """
    run, written = checkpoints.run, 0
    while not over.wait(min(15 * minutes, 10)):
        if (now := work_bytes(run.work)) != written:
            written, checkpoints.beat = now, time.monotonic()
        if time.monotonic() - checkpoints.beat <= 60 * minutes:
            continue
        previous_state = state.read_state(run.workplace)
        step, earlier = checkpoints.trainer.state.global_step, previous_state.get("stalled_at")
        then = "resumes from its resume point" if checkpoints.can_resume else "starts over: it has no resume point"
        then = f"the same command {then}"
        if step == earlier:
            then = "the previous attempt hung there too, so no job is requeued for it"
        say(
            f"{run.name}: no step after {step} for sft.stall_minutes={minutes}; the stacks of all threads are in "
            f"{stacks}; {then}"
        )
        with open(stacks, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        ended = "failed" if step == earlier else "stopped"
        summary = f"no step after {step} for sft.stall_minutes={minutes}"
        stops = [*previous_state.get("stops", []), step][-3:]
        state.update_state(run.workplace, state=ended, step=step, stops=stops, stalled_at=step, last_line=summary)
        os._exit(1 if step == earlier else UNFINISHED)  # a thread that hangs in a library ignores anything softer


def work_bytes(work: Path) -> int:
    """Bytes under `work`, excluding wandb/, whose system metrics grow even while training hangs."""
    size = 0
    for folder, inner, names in os.walk(work):
        inner[:] = [name for name in inner if name != "wandb"]
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size
