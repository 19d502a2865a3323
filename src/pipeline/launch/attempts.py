"""Counts the attempts at a run that were ended by a signal.

Without the count, a job without progress would be requeued forever. `stops` in state.json holds the
step of the resume point (None without one) for each attempt since the last progress. An attempt
starts before its libraries are imported. SIGTERM, SIGHUP and SIGINT do not count: a requeue, a
preemption or a user ends the attempt with them.
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
    """Count the attempt at the enclosed run if a signal ends it.

    Raises:
        NoProgress: in a Slurm job, after MAX_ATTEMPTS attempts without progress, or if a training
            reached the time limit before its first resume point. The next attempt would have the
            same limit.
    """
    start_step = last_step(run)
    try:
        stop.raise_if_signalled()  # a signal may arrive while libraries are imported
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
    """Return the step of the run's resume point, or None without one."""
    record = resume.read_resume_point(run.work)
    if record is None:
        return None
    return int(record["step"])


def add_attempt(run: Run, start_step: int | None) -> None:
    """Record an attempt that a signal ended in the state of its run.

    Raises:
        NoProgress: the run must not be requeued, as in `count_attempt`.
    """
    if not run.config.redo and why_not_finished(run) is None:
        return  # the signal arrived after publication: no state may stay behind
    step, training = last_step(run), isinstance(run.config, TrainStage)
    stops: list[int | None] = []
    if step == start_step:
        stops += state.read_state(run.workplace).get("stops", [])
    stops = [*stops, step][-MAX_ATTEMPTS:]
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
