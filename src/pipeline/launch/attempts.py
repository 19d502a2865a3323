"""Attempts at a run that a signal ended: counted, so that a job which never gets further is not requeued forever.

`stops` in state.json holds the step of the resume point (None: there is none) of each attempt since the run last got
further. An attempt counts from before its libraries are imported. SIGTERM does not count: it is a requeue or a
preemption.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.launch.slurm_commands import seconds_left
from pipeline.runs import resume, state, stop
from pipeline.runs.lease import job
from pipeline.runs.run import Run

MOST = 3  # attempts at the same step


class NoProgress(SystemExit):
    """Ends a job that would get no further if it were requeued: exit status 1."""


@contextmanager
def counted(run: Run) -> Iterator[None]:
    """Count the attempt inside where a signal ends it.

    Raises:
        NoProgress: in a job of Slurm, when MOST attempts got no further, or when the time limit of one came before the
            first resume point of a training: the next one would have the same limit.
    """
    before = last_step(run)
    try:
        stop.check()  # a signal that came while libraries were imported
        yield
    except SystemExit as error:
        if error.code == stop.UNFINISHED and stop.asked() not in ("SIGTERM", "SIGHUP", "SIGINT"):
            count(run, before)
        raise


def last_step(run: Run) -> int | None:
    """The step of the run's resume point."""
    record = resume.read(run.work)
    return None if record is None else int(record["step"])


def count(run: Run, before: int | None) -> None:
    """Add an attempt to the state of its run. Raises NoProgress."""
    step, training = last_step(run), isinstance(run.config, TrainStage)
    stops = [*(state.read(run.workplace).get("stops", []) if step == before else []), step][-MOST:]
    reason = None
    if training and step is None and stop.asked() == "SIGUSR1":
        reason = f"its first resume point was not reached{before_the_limit()}"
    elif len(stops) == MOST and step == before:
        reason = f"{MOST} attempts ended {f'after step {step}' if step else 'before its end'} without getting further"
    with suppress(OSError):
        run.workplace.mkdir(parents=True, exist_ok=True)
    if reason is None or job() is None:
        state.write(run.workplace, stops=stops)
        return
    told = f"{reason}: give a longer time limit (launcher.time, sbatch --time); it is not requeued"
    state.write(run.workplace, stops=[], state="failed", last_line=told, job=job())
    print(f"{run.name}: {told}", file=sys.stderr)
    raise NoProgress(1)


def before_the_limit() -> str:
    """In words, when the signal came; empty where squeue does not say."""
    left = None
    with suppress(PipelineError):
        left = seconds_left(os.environ.get("SLURM_JOB_ID", ""))
    return "" if left is None else f" when the job was asked to stop, {left:.0f} s before its time limit"
