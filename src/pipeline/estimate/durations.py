"""How long a run takes on this machine, by its work and by the durations of finished runs.

A run's work in rows, tokens, steps and questions becomes seconds by the formulas of
estimate/flops.py on a GPU, and of estimate/cpu.py on a CPU. If runs of the same kind are finished,
the prediction is the median of their durations. An unknown duration is None, shown as "?" and left
out of sums.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

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
from pipeline.estimate.training_rows import expected_size, source_files
from pipeline.files import cores
from pipeline.progress import format_duration
from pipeline.runs.folders import label_in
from pipeline.runs.graph import longest_paths
from pipeline.runs.manifest import Manifest
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.rows import bytes_of_largest_parent
from pipeline.text import pluralize
from pipeline.train.memory import LIBRARIES, WIDTH

ON_GPU = "a100_80"  # the card that any GPU of this machine is assumed to be
STEP = 0.04  # seconds of a step besides its products: Python, its log and the optimizer's launches
DISK = 1e9  # bytes of a merge that are read or written a second (assumed)
# Seconds a byte of the weights, on a GPU or not: they are read, saved and hashed after the first
# step and at the end, and reloaded (1.7 measured with an H100, files in memory;
# results/bench/check_h100_full.json).
FILES = {True: 3 / 1e9, False: 12 / 1e9}
BASE_ALONE = 0.2  # the share of FILES for an adapter, whose base is only read
DAY = 86400.0
MODULE = Path("/proc/driver/nvidia/version")
# a run needs more than a day or the CPU's memory; a table needs more than a month
NEEDS_GPU = "needs a GPU"
UNKNOWN = (PipelineError, KeyError, OSError, ValueError)  # a shape is unknown, a file is missing
Kind = tuple[Any, ...]
WORK = {  # settings that decide how long runs of one name take
    "model": ("path",),
    "sft": ("steps", "epochs", "batch_size", "seq_length", "precision", "processes"),
    "eval": ("limit", "max_gen_toks", "dtype", "backend"),
}


def gpu_here() -> Gpu | None:
    """Return the hardware profile that matches this machine's GPU, or None without a GPU."""
    if visible_gpus():
        return cards()[ON_GPU]
    return None


def kind_of(stage: str, label: str, knobs: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Return a key that is equal for runs that take about as long.

    It has the stage, the beginning of the label, and the work.

    Args:
        stage: The stage.
        label: The run's label.
        knobs: Group -> knob -> value.
    """
    work = []
    for group, names in WORK.items():
        values = knobs.get(group, {})
        work += [values.get(name) for name in names]
    return (stage, *label.split("-")[:2], *work)


class History:
    """The durations of finished runs, by kind.

    `gpu` returns the GPU that will compute unfinished runs, or None for this machine's CPU.
    """

    def __init__(
        self, manifests: Iterable[Manifest] = (), gpu: Callable[[], Gpu | None] = gpu_here
    ) -> None:
        self.gpu = gpu
        self.seconds: dict[Kind, list[float]] = defaultdict(list)
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        """Record how long a finished run took.

        An evaluation does not count if its answers were stored.
        """
        facts = manifest.facts.get("harness", {})
        if not facts.get("found_again"):
            kind = kind_of(manifest.stage, label_in(manifest.name), manifest.config)
            self.seconds[kind].append(manifest.seconds)

    def predict(self, run: Run) -> float | None:
        """Return a run's seconds, or None if they are unknown.

        They are the median of finished runs of its kind, otherwise computed from its work.
        """
        knobs = {}
        for group in WORK:
            if hasattr(run.config, group):
                knobs[group] = vars(getattr(run.config, group))
        kind = kind_of(run.config.stage, run.label, knobs)
        if kind in self.seconds:
            return statistics.median(self.seconds[kind])
        return guess(run, self.gpu)

    def seconds_text(self, run: Run) -> str:
        """Return a run's seconds in the form of a plan."""
        seconds = self.predict(run)
        if self.needs_gpu(run, seconds):
            return NEEDS_GPU
        if seconds is None:
            return "?"
        return f"~{seconds:.0f}"

    def needs_gpu(self, run: Run, seconds: float | None) -> bool:
        """Return True if a run is predicted to take too long on this CPU, or exceeds its memory."""
        if not isinstance(run.config, TrainStage | EvalStage) or self.gpu():
            return False
        return (seconds or 0.0) > DAY or (memory_here(run, row=0) or 0.0) > cpu.memory()

    def sum(self, runs: Sequence[Run], workers: int = 1) -> tuple[str, str]:
        """Return the time that runs take together, and a text about the runs that it leaves out.

        The time is "?" if no run's time is known.

        Args:
            runs: The runs, with parents before children if there are several workers.
            workers: The number of workers.
        """
        known: list[tuple[Run, float]] = []
        for run in runs:
            seconds = self.predict(run)
            if seconds is not None and not self.needs_gpu(run, seconds):
                known.append((run, seconds))
        omitted = ""
        if len(known) < len(runs):
            unknown = pluralize(len(runs) - len(known), "run")
            omitted = f"{unknown} that cannot be estimated or need a GPU"
        if not known:
            return "?", omitted
        total = sum(seconds for _, seconds in known)
        if total > 30 * DAY and not self.gpu():
            return NEEDS_GPU, ""
        if workers > 1:
            total = _elapsed(runs, known, workers)
        return f"about {format_duration(total)}", omitted


def _elapsed(runs: Sequence[Run], known: Sequence[tuple[Run, float]], workers: int) -> float:
    """Return the time of runs with several workers, each with a GPU.

    A training on several GPUs occupies as many workers.
    """
    work = []
    for run, seconds in known:
        gpus = run.config.sft.processes if isinstance(run.config, TrainStage) else 1
        work.append(seconds * gpus)
    longest = longest_paths(runs, {run.hash: seconds for run, seconds in known})
    return max([sum(work) / workers, *longest.values()])


# --- first guesses ---


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
            return data_seconds(run)
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


def describe_training(run: Training, options: Mapping[str, str]) -> str:
    """Return a line that describes a training: recipe, mixture, rows, steps, tokens, and time.

    The time is that on this machine. Jobs have other machines.

    Args:
        run: The training.
        options: The keys and values of its command.
    """
    rows, steps, tokens = (
        "?" if count is None else f"{count:,.0f}" for count in expected_size(run)
    )
    recipe = options.get("recipe", "default")
    mixture = options.get("mixture", "all")
    about = (
        f"{run.label}: recipe={recipe} mixture={mixture}, {rows} rows in {steps} steps,"
        f" {tokens} tokens"
    )
    seconds = guess(run)
    if run.config.launcher.name == "slurm" or seconds is None:
        return about
    return f"{about}; about {format_duration(seconds)} here"


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


def data_seconds(run: Run[DataStage]) -> float | None:
    """Return the seconds of a data run, or None if it reads from the Hub."""
    expert, root = run.config.expert, run.parents.get("data_root")
    of_world = isinstance(root, Run) and root.config.expert.world is not None
    if of_world or expert.world or expert.items or expert.union:
        return 1.0
    if source_files(run, readable=False):
        return 1.0
    return None


# --- this machine ---


@lru_cache(maxsize=1)
def listed_gpus() -> list[tuple[str, str]]:
    """Return the driver's version and the MiB of memory of each GPU that nvidia-smi lists.

    It may take seconds.
    """
    fields = "--query-gpu=driver_version,memory.total"
    query = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    gpus = []
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        for line in done.stdout.splitlines():
            driver, memory = line.split(", ")
            gpus.append((driver, memory))
        return gpus
    return []


@lru_cache(maxsize=1)
def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without a driver.

    Reads the kernel module's file, otherwise asks nvidia-smi.
    """
    with suppress(OSError):
        text = MODULE.read_text(encoding="utf-8")
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
        if match:
            return match[1]
    return next((driver for driver, _ in listed_gpus()), None)


def gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that nvidia-smi lists, or None if they are unknown."""
    sizes = [int(memory) for _, memory in listed_gpus() if memory.isdigit()]
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
