"""Counts the attempts at a run that a signal ended, so that a job without progress is not requeued
forever.

`stops` in state.json holds the step of the resume point (None: there is none) of each attempt since
the run last made progress. An attempt starts before its libraries are imported. SIGTERM does not
count: it is a requeue or a preemption.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipeline.config.stages import TrainStage
from pipeline.runs import resume, state, stop
from pipeline.runs.lease import slurm_job
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run

MAX_ATTEMPTS = 3  # attempts at the same step


@contextmanager
def count_attempt(run: Run) -> Iterator[None]:
    """Context in which the run is computed; counts the attempt if a signal ends it.

    Raises:
        NoProgress: in a Slurm job, after MAX_ATTEMPTS attempts without progress, or when the time
            limit was reached before the first resume point of a training: the next attempt would
            have the same limit.
    """
    start_step = last_step(run)
    try:
        stop.raise_if_signalled()  # a signal that came while libraries were imported
        yield
    except SystemExit as error:
        if error.code == stop.UNFINISHED and stop.stop_signal_name() not in (
            "SIGTERM",
            "SIGHUP",
            "SIGINT",
        ):
            add_attempt(run, start_step)
        raise


def last_step(run: Run) -> int | None:
    """Step of the run's resume point; None if there is none."""
    record = resume.read_resume_point(run.work)
    if record is None:
        return None
    return int(record["step"])


def add_attempt(run: Run, start_step: int | None) -> None:
    """Add an attempt to the state of its run. Raises NoProgress if it should not be requeued."""
    if not run.config.redo and why_not_finished(run) is None:
        return  # the signal came after it was published: it would leave a state behind
    step, training = last_step(run), isinstance(run.config, TrainStage)
    stops = [
        *(state.read_state(run.workplace).get("stops", []) if step == start_step else []),
        step,
    ][-MAX_ATTEMPTS:]
    reason = None
    if training and step is None and stop.stop_signal_name() == "SIGUSR1":
        reason = "its first resume point was not reached when the job was asked to stop"
    elif len(stops) == MAX_ATTEMPTS and step == start_step:
        progress = "before its end"
        if step:
            progress = f"after step {step}"
        reason = f"{MAX_ATTEMPTS} attempts ended {progress} without getting further"
    with suppress(OSError):
        run.workplace.mkdir(parents=True, exist_ok=True)
    if reason is None or slurm_job() is None:
        state.update_state(run.workplace, stops=stops)
        return
    text = f"{reason}: give a longer time limit (launcher.time, sbatch --time); it is not requeued"
    state.update_state(run.workplace, stops=[], state="failed", last_line=text, job=slurm_job())
    print(f"{run.name}: {text}", file=sys.stderr)
    raise stop.NoProgress(text)
