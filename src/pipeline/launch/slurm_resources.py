"""What the runs of a plan request of Slurm, and how long before the time limit a job is asked to stop."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.gpu_budget import moved, written_bytes
from pipeline.estimate.models import shape_for
from pipeline.launch.slurm_commands import parse_time_limit, run_slurm
from pipeline.runs.run import Run

LARGEST_ARRAY = 1000  # tasks, where a cluster's limit is not known: Slurm's own default is 1001
START = 120.0  # seconds from a job's start to its first step: libraries and an 8B model from a shared file system
EARLY = 60.0  # Slurm looks at time limits once a minute
LEAD_STEP = 1.25  # longer leads are rounded up to its powers, so that trainings of one kind share an array
LONG_LEAD = EARLY * LEAD_STEP**8  # of a model whose size is not known yet: six minutes
PROBE = 2**26  # bytes that are written to measure a file system


@dataclass(frozen=True)
class Resources:
    """Resources of a run that sbatch requests."""

    gpus: int
    cpus: int | None
    lead: int  # seconds before the time limit at which it receives SIGUSR1

    @property
    def name(self) -> str:
        cpus = f"-{self.cpus}cpu" if self.cpus else ""
        return f"{self.gpus}gpu{cpus}-{self.lead}s"


def resources_of(run: Run, launcher: Launcher) -> Resources:
    """GPUs by the run's processes, cores by its threads, lead by the time to write a resume point.

    Raises:
        PipelineError: launcher.gpus=0 without threads, or launcher.time is too short.
    """
    config, processes, lead = run.config, 1, EARLY
    gpus = 0
    if launcher.gpus == 0 and config.threads is None and isinstance(config, TrainStage | EvalStage):
        raise PipelineError(
            "launcher.gpus=0 needs threads=N: results of CPUs depend on the number of threads, and the cores of nodes "
            "differ (threads=8; of a table every.threads=8)"
        )
    if isinstance(config, TrainStage):
        gpus = processes = config.sft.processes
        try:
            point = bytes_of_resume_point(run)
            lead += point / write_speed(run.runs_dir) if point > PROBE else 0
            lead = EARLY * LEAD_STEP ** math.ceil(math.log(lead / EARLY, LEAD_STEP))
        except PipelineError:  # the shape of its model is not known before it is here
            lead = LONG_LEAD
        if launcher.time and (limit := parse_time_limit(launcher.time)) < START + lead:
            raise PipelineError(
                f"launcher.time={launcher.time} is {limit:.0f} s: a job of {run.name} needs {START + lead:.0f} s to "
                "start and to write one resume point; give a longer launcher.time"
            )
    elif isinstance(config, EvalStage):
        gpus = 1
    cpus = config.threads * processes if config.threads else None
    return Resources(gpus if launcher.gpus is None else min(gpus, launcher.gpus), cpus, int(lead))


def bytes_of_resume_point(run: Run[TrainStage]) -> int:
    """Size of a training's resume point, by the shape of its base, which need not be on this disk yet."""
    shape = shape_for(run)
    return written_bytes(run.config.sft, shape.parameters, moved(run, shape), snapshots=0, points=1)["resume points"]


@cache
def write_speed(folder: Path) -> float:
    """Bytes per second: half the measured rate of writing one file, as other jobs write too."""
    probe, numbers = folder / f".probe-{os.getpid()}", os.urandom(PROBE)  # slower to draw than a fast disk writes
    begun = time.perf_counter()
    try:
        with open(probe, "wb") as file:
            file.write(numbers)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    return PROBE / (time.perf_counter() - begun) / 2


def largest_array() -> int:
    """Largest number of array tasks: MaxArraySize of this cluster minus 1; LARGEST_ARRAY if it is not reported."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config"))
    return max(1, int(match[1]) - 1) if match else LARGEST_ARRAY
