"""How long a run takes on this machine, by its work.

A run's work in rows, tokens, steps and questions becomes seconds by the formulas of
estimate/flops.py on a GPU, and of estimate/cpu.py on a CPU. An unknown duration is None, shown as
"?" and left out of sums.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile

from pipeline.config.stages import DataStage, EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.flops import Gpu, cards
from pipeline.estimate.gpu_budget import (
    dtype_of,
    memory_of,
    scoring_work,
    training_work,
)
from pipeline.estimate.models import Evaluation, Training, shape_for
from pipeline.estimate.training_rows import source_files
from pipeline.files import cores
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.rows import bytes_of_largest_parent
from pipeline.train.memory import LIBRARIES, WIDTH

ON_GPU = "a100_80"  # the card that any GPU of this machine is assumed to be
STEP = 0.04  # seconds of a step besides its products: Python, its log and the optimizer's launches
DATA = 1.0  # seconds of a data run that downloads nothing (assumed)
DISK = 1e9  # bytes of a merge that are read or written a second (assumed)
# Seconds a byte of the weights, on a GPU or not: they are read, saved and hashed after the first
# step and at the end, and reloaded (1.7 measured with an H100, files in memory;
# results/bench/check_h100_full.json).
FILES = {True: 3 / 1e9, False: 12 / 1e9}
BASE_ALONE = 0.2  # the share of FILES for an adapter, whose base is only read
DAY = 86400.0
UNKNOWN = (PipelineError, KeyError, OSError, ValueError)  # a shape is unknown, a file is missing


def gpu_here() -> Gpu | None:
    """Return the hardware profile that matches this machine's GPU, or None without a GPU."""
    if visible_gpus():
        return cards()[ON_GPU]
    return None


def total_seconds(runs: Sequence[Run], workers: int = 1) -> tuple[float, int]:
    """Return the seconds that runs take together, and the number of runs of unknown duration.

    A training on several GPUs occupies as many workers.
    """
    work, longest, unknown = 0.0, 0.0, 0
    for run in runs:
        seconds = guess(run)
        if seconds is None:
            unknown += 1
            continue
        gpus = run.config.sft.processes if isinstance(run.config, TrainStage) else 1
        longest = max(longest, seconds)
        work += seconds * min(gpus, workers)
    return max(work / workers, longest), unknown


def guess(run: Run, gpu: Callable[[], Gpu | None] = gpu_here) -> float | None:
    """Return the seconds of a run's work on a GPU or this CPU, or None if the work is unknown."""
    config = run.config
    with suppress(*UNKNOWN):
        if isinstance(config, EvalStage) and is_bundle(run):
            return 0.2  # averages of scores take almost no time
        if isinstance(config, TrainStage | EvalStage):
            machine = gpu() or cpu.cpu(shape_for(run), config.threads or cores())
            if isinstance(config, TrainStage):
                return training_seconds(run, machine)
            return evaluation_seconds(run, machine)
        if isinstance(config, DataStage):
            if "data_root" in run.parents or not config.expert.sources or source_files(run):
                return DATA
            return None  # a download
        if config.stage in ("merge", "analyze"):
            size = bytes_of_largest_parent(run) or 4.0 * shape_for(run).parameters
            files = len(run.parents) + 1  # each parent is read, and the result is written
            return 1 + files * size / DISK
    if config.stage == "select":
        return 1.0
    return None


# --- trainings ---


def training_seconds(run: Training, machine: Gpu) -> float:
    """Return the seconds of a training's steps, and of loading and saving.

    Raises:
        PipelineError: The training's work is not known yet.
    """
    sft = run.config.sft
    steps, seconds = training_work(run, machine)
    files = FILES[not machine.is_cpu] * shape_for(run).parameters * WIDTH[sft.weights]
    if sft.adapter == "lora":
        files = files * BASE_ALONE
    return 1 + seconds + STEP * steps + files


def memory_here(run: Run, on_gpu: bool = False, row: float | None = None) -> float | None:
    """Return the bytes that a training or evaluation needs, or None if they are unknown.

    Other stages have None.

    Args:
        run: The run.
        on_gpu: Return the bytes of each GPU, instead of this machine's bytes for all processes.
        row: The longest row, as in `memory_of`.
    """
    with suppress(*UNKNOWN):
        if isinstance(run.config, TrainStage):
            memory = memory_of(run, on_gpu, row)
            if not on_gpu:
                memory *= run.config.sft.processes
            return memory
        if isinstance(run.config, EvalStage):
            return shape_for(run).parameters * WIDTH[dtype_of(run)] + LIBRARIES
    return None


# --- scores ---


def evaluation_seconds(run: Evaluation, machine: Gpu) -> float:
    """Return the seconds of loading a model and scoring it. A GPU does not wait for loading."""
    loading = FILES[False] * machine.is_cpu * shape_for(run).parameters
    return 0.3 + loading + scoring_work(run, machine)


# --- this machine ---


@lru_cache(maxsize=1)
def listed_gpus() -> list[str]:
    """Return the MiB of memory of each GPU that nvidia-smi lists. It may take seconds."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()
    return []


def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that nvidia-smi lists, or None if they are unknown."""
    sizes = [int(memory) for memory in listed_gpus() if memory.isdigit()]
    if not sizes:
        return None
    return min(sizes) * 2**20


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that this process may use, without importing torch.

    Reads CUDA_VISIBLE_DEVICES like CUDA: an invalid id, such as -1, ends the list.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(len(listed_gpus()))]
    ids = map(str.strip, listed.split(","))
    return list(takewhile(lambda gpu: re.match(r"\w", gpu), ids))
