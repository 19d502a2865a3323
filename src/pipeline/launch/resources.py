"""The GPUs, cores and time that the runs of a job array request of Slurm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task
from pipeline.launch.slurm_commands import parse_time_limit
from pipeline.runs.run import Run

WORKERS = 64  # default maximum of tasks in an array (launcher.workers)
# Minimum seconds of work per task. A job takes about a minute to start and load its model.
LEAST = 300
EARLY, LEAD = (
    60,
    600,
)  # seconds between SIGUSR1 and the time limit; LEAD for trainings, which may write 96 GB


@dataclass(frozen=True)
class Resources:
    """The resources that a run requests from sbatch.

    `lead` is the number of seconds between SIGUSR1 and the time limit.
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
    """Return the resources of a run.

    Trainings get one GPU per process, and the time to write a resume point. Evaluations get one
    GPU. Runs with `threads` get cores for them.

    Raises:
        PipelineError: launcher.gpus=0 without threads, or launcher.time is too short for a
            training.
    """
    config = run.config
    gpus = int(isinstance(config, EvalStage))
    processes, lead = 1, EARLY
    if launcher.gpus == 0 and config.threads is None and isinstance(config, TrainStage | EvalStage):
        raise PipelineError(
            "launcher.gpus=0 needs threads=N, because results on CPUs depend on the number of"
            " threads and nodes differ in cores. Set for example threads=8, or every.threads=8 for"
            " a table."
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
                f"launcher.time={launcher.time} is {limit:.0f} s, but a job of {run.name} needs"
                f" {4 * EARLY} s to start and to write one resume point. Set a longer"
                " launcher.time."
            )
    cpus = None
    if config.threads:
        cpus = config.threads * processes
    return Resources(gpus if launcher.gpus is None else min(gpus, launcher.gpus), cpus, lead)


def number_of_workers(tasks: Sequence[Task], limit: int | None) -> int:
    """Return the number of tasks of an array.

    `launcher.workers` has priority. Otherwise each task has at least LEAST seconds of work, and
    there are at most WORKERS tasks.
    """
    work = sum(LEAST if task.seconds is None else task.seconds for task in tasks)
    by_work = max(1, math.ceil(work / LEAST))
    return min(len(tasks), limit or min(WORKERS, by_work))
