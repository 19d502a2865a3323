"""What the runs of a job array request of Slurm: GPUs, cores, and time by their estimate."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task
from pipeline.launch.slurm_commands import parse_time_limit
from pipeline.progress import format_duration
from pipeline.runs import state
from pipeline.runs.run import Run
from pipeline.text import pluralize

WORKERS = 64  # tasks of an array at most, where launcher.workers does not say
# seconds of work for each of them: a job takes about a minute to start and to load its model
LEAST = 300
EARLY, LEAD = (
    60,
    600,
)  # seconds before its time limit that a job is asked to stop; of a training that writes 96 GB


@dataclass(frozen=True)
class Resources:
    """What a run requests of sbatch.

    lead: seconds before the time limit at which it receives SIGUSR1.
    """

    gpus: int
    cpus: int | None
    lead: int = EARLY

    @property
    def name(self) -> str:
        name = f"{self.gpus}gpu"
        if self.cpus:
            name += f"-{self.cpus}cpu"
        if self.lead > EARLY:
            name += "-long"
        return name


def resources_of(run: Run, launcher: Launcher) -> Resources:
    """GPUs by the run's processes, cores by its threads, and the time that a training takes to
    write a resume point.

    Raises:
        PipelineError: launcher.gpus=0 without threads, or launcher.time is too short for a
            training.
    """
    config, gpus, processes, lead = run.config, int(isinstance(run.config, EvalStage)), 1, EARLY
    if launcher.gpus == 0 and config.threads is None and isinstance(config, TrainStage | EvalStage):
        raise PipelineError(
            "launcher.gpus=0 needs threads=N: results of CPUs depend on the number of threads, and"
            " the cores of nodes differ (threads=8; of a table every.threads=8)"
        )
    if isinstance(config, TrainStage):
        gpus = processes = config.sft.processes
        if launcher.time:
            limit = parse_time_limit(launcher.time)
        else:
            limit = 4 * LEAD
        lead = int(min(LEAD, limit / 4))
        if lead < EARLY:
            raise PipelineError(
                f"launcher.time={launcher.time} is {limit:.0f} s: a job of {run.name} needs"
                f" {4 * EARLY} s to start and to write one resume point; give a longer"
                " launcher.time"
            )
    cpus = None
    if config.threads:
        cpus = config.threads * processes
    return Resources(gpus if launcher.gpus is None else min(gpus, launcher.gpus), cpus, lead)


def one_job_for(tasks: Sequence[Task], kinds: Collection[Resources]) -> Resources | None:
    """Return what a job requests that makes all of these runs.

    None if they take longer than LEAST, or their GPUs differ.
    """
    most = max(kinds, key=lambda kind: (kind.cpus or 0, kind.lead))
    seconds = seconds_of_all(tasks)
    differ = any(kind.gpus != most.gpus for kind in kinds)
    if differ or seconds is None or seconds >= LEAST:
        return None
    return most


def number_of_workers(tasks: Sequence[Task], limit: int | None) -> int:
    """The tasks of an array: launcher.workers, or as many as have LEAST seconds of work each, at
    most WORKERS.
    """
    work = sum(LEAST if task.seconds is None else task.seconds for task in tasks)
    return min(len(tasks), limit or min(WORKERS, max(1, math.ceil(work / LEAST))))


def seconds_of_all(tasks: Sequence[Task]) -> float | None:
    """How long runs take together; None unless it is known of all."""
    seconds = []
    for task in tasks:
        if task.seconds is not None:
            seconds.append(task.seconds)
    if len(seconds) == len(tasks):
        return sum(seconds)
    return None


def time_limit(tasks: Sequence[Task], workers: int, longest: str | None) -> str | None:
    """The time limit of an array's jobs: twice what each worker has to do, up to the next hour, at
    most launcher.time.

    That alone where it is shorter, the time of a run is not known, or one was begun before: its
    estimate may be wrong.
    """
    seconds = seconds_of_all(tasks)
    if longest is None or not seconds or any(state.read_state(task.workplace) for task in tasks):
        return longest
    hours = math.ceil(2 * max(seconds / workers, *(task.seconds or 0.0 for task in tasks)) / 3600)
    if hours * 3600 < parse_time_limit(longest):
        return f"{hours}:00:00"
    return longest


def describe_work(tasks: Sequence[Task], workers: int, gpus: int) -> str:
    """Describe the GPUs of an array's jobs, and how long its runs take together if that is known of
    all.
    """
    seconds = seconds_of_all(tasks)
    gpus_text = f"{pluralize(gpus, 'GPU')} each" + (
        f" ({gpus * workers} at once)" if gpus and workers > 1 else ""
    )
    if seconds is None:
        return gpus_text
    return f"{gpus_text}, about {format_duration(seconds)} in all"
