"""How long a run takes on this machine: by its work, and by what finished runs took for theirs.

A run's work in rows, tokens, steps and questions becomes seconds by the formulas of
estimate/flops.py on a GPU, and of estimate/cpu.py on a CPU; where runs of its kind are finished, it
is the median of what they took. What is not known is None, shown as "?" and left out of sums.
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

from pipeline.config.defaults import card_of
from pipeline.config.stages import HARDWARE, DataStage, EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.flops import Gpu, cards
from pipeline.estimate.gpu_budget import (
    dtype_of,
    memory_of,
    scoring_work,
    training_cost,
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

ON_GPU = "a100_80"  # where there are GPUs, none is asked which it is
STEP = 0.04  # seconds of a step besides its products: Python, its log and the optimizer's launches
DISK = 1e9  # bytes of a merge that are read or written a second: assumed
READ_RATE = 3e6  # bytes of rows that are read and compared a second
# seconds a byte of the weights: read, saved and hashed after the first step and at the end,
# reloaded (1.7 measured with an H100, files in memory; results/bench/check_h100_full.json)
FILES = {True: 3 / 1e9, False: 12 / 1e9}  # on a GPU or not
BASE_ALONE = 0.2  # of that, where nothing but the base of an adapter is read
DAY = 86400.0
MODULE = Path("/proc/driver/nvidia/version")
# on a CPU more than a day for a run, or more than its memory; a month for a table
NEEDS_GPU = "needs a GPU"
UNKNOWN = (
    PipelineError,
    KeyError,
    OSError,
    ValueError,
)  # a shape that is not known, a file that is not there
Kind = tuple[Any, ...]
WORK = {  # knobs that decide how long runs of one name take
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
    """Return a key that is equal for runs that take about as long: stage, beginning of the label,
    and work.

    Args:
        knobs: group -> knob -> value.
    """
    work = []
    for group, names in WORK.items():
        for name in names:
            work.append(knobs.get(group, {}).get(name))
    return (stage, *label.split("-")[:2], *work)


class History:
    """What finished runs took, by kind.

    gpu: returns the GPU on which what is still to be made will run, None for this machine's CPU.
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
        """Seconds: the median of finished runs of its kind, else those of its work; None where
        neither is known.
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
        """Return a run's seconds as a plan shows them."""
        seconds = self.predict(run)
        if self.needs_gpu(run, seconds):
            return NEEDS_GPU
        if seconds is None:
            return "?"
        return f"~{seconds:.0f}"

    def needs_gpu(self, run: Run, seconds: float | None) -> bool:
        """Whether a run is too long for this machine's CPU, as predicted, or too large for its
        memory.
        """
        if not isinstance(run.config, TrainStage | EvalStage) or self.gpu():
            return False
        return (seconds or 0.0) > DAY or (memory_here(run, row=0) or 0.0) > cpu.memory()

    def sum(
        self, runs: Sequence[Run], workers: int = 1, left: Mapping[str, float] = {}
    ) -> tuple[str, str]:
        """Two texts: the time that runs take together with these workers, "?" if no time is known,
        and which runs it leaves out. With several workers runs are given parents first. left: run
        hash -> seconds of those that run.
        """
        predicted = [
            (run, left[run.hash] if run.hash in left else self.predict(run)) for run in runs
        ]
        feasible = []
        for run, seconds in predicted:
            if not self.needs_gpu(run, seconds):
                feasible.append((run.hash, seconds))
        predictions = []
        for key, seconds in feasible:
            if seconds is not None:
                predictions.append((key, seconds))
        needing, unknown = len(runs) - len(feasible), len(feasible) - len(predictions)
        total = sum(seconds for _, seconds in predictions)
        if total > 30 * DAY and not self.gpu():
            return NEEDS_GPU, ""
        omitted = []
        if needing:
            omitted = [f"{pluralize(needing, 'run')} that need{'s' * (needing == 1)} a GPU"]
        if unknown:
            omitted += [f"{pluralize(unknown, 'run')} that cannot be estimated"]
        if omitted and not predictions:
            return "?", " and ".join(omitted)
        if workers > 1:  # one a GPU: a training of several holds as many
            gpus = {}
            for run in runs:
                if isinstance(run.config, TrainStage):
                    gpus[run.hash] = run.config.sft.processes
            shared = sum(seconds * gpus.get(key, 1) for key, seconds in predictions) / workers
            total = max([shared, *longest_paths(runs, dict(predictions)).values()])
        return f"about {format_duration(total)}", " and ".join(omitted)


# --- first guesses ---


def guess(run: Run, gpu: Callable[[], Gpu | None] = gpu_here) -> float | None:
    """Seconds of its work on a GPU, or on this machine's CPU; None where its work is not known
    before.
    """
    config = run.config
    with suppress(*UNKNOWN):
        if isinstance(config, EvalStage) and is_bundle(run):
            return 0.2  # averages of scores take almost none
        if isinstance(config, TrainStage | EvalStage):
            machine = gpu() or cpu.cpu(shape_for(run), config.threads or cores())
            if isinstance(config, TrainStage):
                return training_seconds(run, machine)
            return evaluation_seconds(run, machine)
        if isinstance(config, DataStage):
            return data_seconds(run)
        if config.stage in ("merge", "analyze"):
            size = bytes_of_largest_parent(run) or 4.0 * shape_for(run).parameters
            return 1 + (len(run.parents) + 1) * size / DISK  # each is read, and the result written
    if config.stage == "select":
        return 1.0
    return None


# --- trainings ---


def training_seconds(run: Training, machine: Gpu) -> float:
    """Seconds of its steps; then loading and saving.

    Raises PipelineError where its work is not known yet.
    """
    sft = run.config.sft
    steps, seconds = training_work(run, machine)
    files = FILES[not machine.is_cpu] * shape_for(run).parameters * WIDTH[sft.weights]
    return 1 + seconds + STEP * steps + files * (BASE_ALONE if sft.adapter == "lora" else 1)


def describe_training(run: Training, options: Mapping[str, str]) -> str:
    """Return a line that describes a training: recipe, mixture, rows, steps, tokens, and cost.

    The cost is for the GPU of hardware=, otherwise for this CPU if the training fits, otherwise for
    an A100.

    Args:
        options: key -> value of its command.
    """
    launcher, processes = run.config.launcher, run.config.sft.processes
    rows, steps, tokens = (
        "?" if count is None else f"{count:,.0f}" for count in expected_size(run)
    )
    named = (
        f"{run.label}: recipe={options.get('recipe', 'default')}"
        f" mixture={options.get('mixture', 'all')}"
    )
    about = f"{named}, {rows} rows in {steps} steps, {tokens} tokens"
    gpu = card_of(options.get(HARDWARE))
    by_job = launcher.name == "slurm" and launcher.gpus != 0  # on a node's GPUs
    bytes_here = memory_here(run)
    fits_here = HARDWARE in options or (bytes_here or 0.0) <= cpu.memory()
    if not (gpu or by_job or visible_gpus()) and fits_here:
        seconds = guess(run, lambda: None)
        if seconds is None:
            time = "?"
        else:
            time = f"about {format_duration(seconds)}"
        return (
            f"{about}; on this CPU: {'?' if bytes_here is None else f'{bytes_here / 1e9:.1f}'} GB,"
            f" {time}"
        )
    gpu, takes, hours = gpu or ON_GPU, "? GB a GPU", "?"
    with suppress(*UNKNOWN):
        card = cards()[gpu]
        memory = memory_of(run, card=card.memory)
        above = f", more than its {card.memory / 1e9:.0f}: see hardware=" * (memory > card.memory)
        takes = f"{memory / 1e9:.0f} GB a GPU{above}"
        hours = f"{training_cost(run, card).hours:.1f}"
    return f"{about}; on {f'{processes} x ' * (processes > 1)}{gpu}: {takes}, {hours} GPU-hours"


def memory_here(run: Run, on_gpu: bool = False, row: float | None = None) -> float | None:
    """Bytes that a training, with rows as in `memory_of`, takes of each GPU or, in all processes,
    of this machine, or that a score takes of this machine; None for others and unknown models.
    """
    with suppress(*UNKNOWN):
        if isinstance(run.config, TrainStage):
            return memory_of(run, on_gpu, row) * (1 if on_gpu else run.config.sft.processes)
        if isinstance(run.config, EvalStage):
            return shape_for(run).parameters * WIDTH[dtype_of(run)] + LIBRARIES
    return None


# --- scores ---


def evaluation_seconds(run: Evaluation, machine: Gpu) -> float:
    """Seconds of loading a model, which a GPU does not wait for, and of scoring it."""
    return (
        0.3 + FILES[False] * machine.is_cpu * shape_for(run).parameters + scoring_work(run, machine)
    )


def data_seconds(run: Run[DataStage]) -> float | None:
    """By the bytes of the files that are read, but for what is unpacked or copied, and the few of
    the small world.
    """
    expert, root = run.config.expert, run.parents.get("data_root")
    of_world = isinstance(root, Run) and root.config.expert.world is not None
    if expert.world or expert.items or expert.union or of_world:
        return 1.0
    sizes = [file.stat().st_size for _, _, file in source_files(run, readable=False)]
    if sizes:
        return 0.7 + sum(sizes) / READ_RATE
    return None


# --- this machine ---


@lru_cache(maxsize=1)
def listed_gpus() -> list[tuple[str, str]]:
    """Return the driver's version and the MiB of memory of each GPU that nvidia-smi lists.

    It may take seconds.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,memory.total",
        "--format=csv,noheader,nounits",
    ]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        listed = subprocess.run(
            query, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        return [
            (driver, memory)
            for driver, memory in (line.split(", ") for line in listed.splitlines())
        ]
    return []


@lru_cache(maxsize=1)
def driver_version() -> str | None:
    """Version of the NVIDIA driver, by its kernel module, else by nvidia-smi; None without."""
    with suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", MODULE.read_text(encoding="utf-8"))
        if match:
            return match[1]
    return next((driver for driver, _ in listed_gpus()), None)


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU that nvidia-smi lists; None where it lists none, or not its
    memory.
    """
    return min(
        (int(memory) * 2**20 for _, memory in listed_gpus() if memory.isdigit()), default=None
    )


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that this process may use, without importing torch.

    Reads CUDA_VISIBLE_DEVICES as CUDA does: an invalid id, such as -1, ends the list.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return list(takewhile(lambda gpu: re.match(r"\w", gpu), map(str.strip, listed.split(","))))
    return [str(index) for index in range(len(listed_gpus()))]
