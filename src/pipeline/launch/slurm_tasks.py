"""Which tasks of Slurm compute the runs of a plan, and the resources that they request."""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.durations import History
from pipeline.estimate.gpu_budget import moved, written_bytes
from pipeline.estimate.models import shape_for
from pipeline.launch.slurm_commands import parse_time_limit, run_slurm
from pipeline.runs.folders import finished_manifests
from pipeline.runs.run import Run, parent_runs
from pipeline.stages.evaluation import source_models

LARGEST_ARRAY = 1000  # tasks, where a cluster's limit is not known: Slurm's own default is 1001
START = 120.0  # seconds from a job's start to its first step: libraries and an 8B model from a shared file system
EARLY = 60.0  # Slurm looks at time limits once a minute
LEAD_STEP = 1.25  # longer leads are rounded up to its powers, so that trainings of one kind share an array
PROBE = 2**26  # bytes that are written to measure a file system


@dataclass(frozen=True)
class Resources:
    """Resources of a run that sbatch requests."""

    gpus: int
    cpus: int | None
    lead: int  # seconds before the time limit at which it receives SIGUSR1


@dataclass
class Array:
    """Tasks that are submitted together: each computes some runs, one after the other."""

    level: int
    resources: Resources
    tasks: list[list[Run]]


def arrays_of(runs: Sequence[Run], launcher: Launcher, largest: int) -> list[Array]:
    """Arrays by level and resource class; runs of a class share a task up to launcher.batch_minutes."""
    history = History(finished_manifests(runs[0].runs_dir) if runs else (), on_gpu=launcher.gpus != 0)
    levels: dict[str, int] = {}
    classes: dict[tuple[int, Resources], list[Run]] = defaultdict(list)
    for run in runs:
        levels[run.hash] = 1 + max((levels.get(parent.hash, -1) for parent in parent_runs(run.parents)), default=-1)
        classes[levels[run.hash], resources_of(run, launcher)].append(run)
    arrays = []
    for (level, resources), members in sorted(classes.items(), key=lambda entry: (entry[0][0], str(entry[0][1]))):
        tasks: list[list[Run]] = []
        full = 0.0
        for run in sorted(members, key=source_models):  # evaluations of one model are adjacent
            seconds = history.predict(run) or math.inf  # one that cannot be estimated is a task of its own
            if not tasks or full + seconds > 60 * launcher.batch_minutes or isinstance(run.config, TrainStage):
                tasks.append([])
                full = 0.0
            tasks[-1].append(run)
            full += seconds
        chunks = [tasks[start : start + largest] for start in range(0, len(tasks), largest)]
        arrays += [Array(level, resources, chunk) for chunk in chunks]
    return arrays


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
        point = bytes_of_resume_point(run)
        lead += point / write_speed(run.runs_dir) if point > PROBE else 0
        lead = EARLY * LEAD_STEP ** math.ceil(math.log(lead / EARLY, LEAD_STEP))
        if launcher.time:
            check_limit(run, lead, parse_time_limit(launcher.time), f"launcher.time={launcher.time}")
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


def check_limit(run: Run, lead: float, limit: float, source: str) -> None:
    """Raise PipelineError for a time limit (seconds) too short for a training to start and write one resume point."""
    if limit < START + lead:
        raise PipelineError(
            f"{source} is {limit:.0f} s: a job of {run.name} needs {START + lead:.0f} s to start and to write one "
            "resume point; give a longer launcher.time"
        )
