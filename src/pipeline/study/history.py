"""How long a run takes on this machine: by its work, and by what finished runs took for theirs.

A run's work in rows, tokens, steps and questions becomes seconds by the formulas of study/cost.py, at assumed rates of
this kind of machine (CPU, ON_GPU). Finished runs correct them: what they took over what was guessed of them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipeline.config.stages import DataStage, EvalStage, EvalTask, RunStage, TrainStage
from pipeline.data import benchmark_files
from pipeline.errors import PipelineError
from pipeline.models.shape import Shape, shape_of
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run, runs_behind
from pipeline.study.bill import dtype_of, shape_for, trained_parts
from pipeline.study.build.evaluation import is_bundle
from pipeline.study.build.steps import planned_rows
from pipeline.study.cost import GPUS, LONGEST, MGSM, QUESTIONS, ROW, Gpu, asked, merge_seconds, scoring_seconds
from pipeline.study.cost import training_seconds as seconds_of_training
from pipeline.study.stages import RUN_STAGES, bytes_of_merge

# Of one thread; measured on the small world's models: a core reaches more on large ones. Memory is not the limit here.
CPU = Gpu(bf16=3.5e10, fp32=3.5e10, bandwidth=8e9, memory=2**50, bf16_share=1, fp32_share=1)
ON_GPU = GPUS["a100_80"]  # where there are GPUs, none is asked which it is
STEP = 0.04  # seconds of a step besides its products: Python, its log and the optimizer's launches
READ, WORLD_ROWS = 3e6, 9000.0  # bytes of rows that are read and compared a second; rows of a small world written
TOKEN, WORLD_ROW = 4.0, 200  # bytes of text: of a token, of a row of the small world
Kind = tuple[str, ...]


class History:
    """What finished runs took, by stage, and by stage and the first two words of their names.

    on_gpu: whether what is still to be made will run on a GPU; null: where this machine has one.
    """

    def __init__(self, manifests: Iterable[Manifest] = (), on_gpu: bool | None = None) -> None:
        self.on_gpu = on_gpu
        self.ratios: dict[Kind, list[float]] = defaultdict(list)  # seconds over those guessed
        self.seconds: dict[Kind, list[float]] = defaultdict(list)
        self.medians: dict[int, dict[Kind, float]] = {}
        self.guesses: dict[str, float] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        guessed = manifest.cost.get("guessed_seconds")
        for kind in ((manifest.stage,), (manifest.stage, *manifest.name.split("-")[:2])):
            self.seconds[kind].append(manifest.seconds)
            if guessed:
                self.ratios[kind].append(manifest.seconds / guessed)
        self.medians.clear()

    def predict(self, run: Run) -> float:
        """Seconds: what is guessed of its work, times what finished runs like it took over theirs, else those of its
        stage; where nothing was guessed of them, what they took; where there are none, what is guessed."""
        kinds = ((run.config.stage, *run.label.split("-")[:2]), (run.config.stage,))
        guess = self.guess(run)
        for known, times in ((self.ratios, guess), (self.seconds, 1.0)):
            if kind := next((kind for kind in kinds if kind in known), None):
                return times * self.median(known, kind)
        return guess

    def median(self, known: dict[Kind, list[float]], kind: Kind) -> float:
        medians = self.medians.setdefault(id(known), {})
        if kind not in medians:
            medians[kind] = statistics.median(known[kind])
        return medians[kind]

    def guess(self, run: Run) -> float:
        """Once its parents are made, more is known of it."""
        key = f"{run.hash} {all(read_manifest(one.folder) for one in runs_behind(run.parents))}"
        if key not in self.guesses:
            self.guesses[key] = guess(run, self.on_gpu)
        return self.guesses[key]


# ---------------------------------------------------------------------------------------------------- first guesses


def guess(run: Run, on_gpu: bool | None = None) -> float:
    """Seconds of its work on this machine; where its work is not known before, those of its stage's row."""
    try:
        found = work_seconds(run, machine(run.config, on_gpu))
    except (PipelineError, KeyError, OSError, ValueError):  # a shape that is not known, a file that is not there
        found = None
    return RUN_STAGES[run.config.stage].seconds if found is None else found


def work_seconds(run: Run, here: Gpu) -> float | None:
    config = run.config
    if isinstance(config, TrainStage):
        return training_seconds(run, here)
    if isinstance(config, EvalStage):
        return evaluation_seconds(run, here)
    if isinstance(config, DataStage):
        return data_seconds(run)
    if config.stage in ("merge", "analyze"):
        size = bytes_of_merge(run)["weights"]
        return (1 + merge_seconds(len(run.parents) * size, size, copy=1e9)) if size else None
    return None


def machine(config: RunStage, on_gpu: bool | None = None) -> Gpu:
    """What its threads, or a GPU, do a second."""
    if on_gpu or (on_gpu is None and visible_gpus()):
        return ON_GPU
    threads = config.threads or cores()
    return replace(CPU, bf16=CPU.bf16 * threads, fp32=CPU.fp32 * threads)


def training_seconds(run: Run[TrainStage], here: Gpu) -> float | None:
    """Rows of the mean length that the data run's file says, once it is made."""
    config, sft, shape, data = run.config, run.config.sft, shape_here(run), run.parents["data"]
    rows = planned_rows(data) if isinstance(data, Run) else None
    if rows is None and sft.steps is None:
        return None
    rows = rows or 0  # of which nothing hangs where the steps are given
    file = data.folder / "train.jsonl"
    each = file.stat().st_size / TOKEN / max(rows, 1) if file.is_file() else ROW.get(config.expert.name, sft.seq_length)
    if sft.packing:
        rows, each = round(rows * each / sft.seq_length), sft.seq_length
    steps = sft.steps or rows * sft.epochs // sft.batch_size
    parts = trained_parts(run, shape)
    seconds = sum(
        seconds_of_training(
            shape, part, steps // len(parts) * sft.batch_size, min(each, sft.seq_length), sft.batch_size,
            here, gpus=sft.processes, checkpointing=sft.gradient_checkpointing,
            lora_rank=sft.lora_rank if sft.adapter == "lora" else 0, weights=sft.weights, optimizer="adamw",
            precision=sft.precision,
        )
        for _, part in parts
    )  # fmt: skip
    return 1 + seconds + STEP * steps


def evaluation_seconds(run: Run[EvalStage], here: Gpu) -> float | None:
    """Of one task in one language; averages of several take none. Tokens as in MGSM's languages, else as in English."""
    if is_bundle(run):
        return 0.2
    config, seconds, shape = run.config, 0.3, shape_here(run)
    for task in config.eval.tasks:
        for language in config.languages:
            known = language if language in MGSM else "en"
            room = config.eval.max_gen_toks_of.get(language, config.eval.max_gen_toks)
            count = questions(run, task, language)
            kinds = [
                replace(one, questions=min(one.questions, count), room=min(one.room, room or one.room))
                for one in asked(task.task, task.num_fewshot, known)
            ]
            seconds += sum(scoring_seconds(shape, kinds, here, dtype_of(run), config.eval.batch_size))
            written = sum(one.questions * min(one.room, LONGEST * one.answer) for one in kinds)
            seconds += 2 * shape.parameters * written / here.rate(dtype_of(run))  # of a CPU products are the limit too
    return seconds


def questions(run: Run[EvalStage], task: EvalTask, language: str) -> int:
    """Of a task in a language: as its file below data_root has them, or will, else the benchmark's own."""
    config, root = run.config, run.parents.get("data_root")
    most = config.eval.limit or QUESTIONS.get(task.task, 1012)
    name = task.task.partition("_")[0] if task.task.startswith("mgsm") else task.task
    if isinstance(root, Run) and not root.folder.is_dir():
        return min(most, root.config.expert.questions(config.eval.split) or most)
    if root is None:
        return most
    names = {"test": ("test", "devtest"), "dev": ("development", "dev")}[config.eval.split]
    files = {path.stem: path for path in benchmark_files.files(root.folder, name, language)}
    found = next((files[one] for one in names if one in files), None)
    return min(most, lines(found)) if found else most


@lru_cache(maxsize=4096)
def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def data_seconds(run: Run[DataStage]) -> float | None:
    """By the rows of a small world that are written, or the bytes of the files that are read."""
    expert, root = run.config.expert, run.parents.get("data_root")
    if world := expert.world:
        return 1.5 + (world.math_rows + 3 * world.language_rows + world.documents + world.last_documents) / WORLD_ROWS
    if expert.items or expert.union:
        return 1.0
    if isinstance(root, Run) and not root.folder.is_dir() and root.config.expert.world:
        return 0.7 + WORLD_ROW * (root.config.expert.world.math_rows + root.config.expert.world.language_rows) / READ
    if root is None or not root.folder.is_dir():
        return None
    read = sum((root.folder / source.file).stat().st_size for source in expert.sources.values())
    return 0.7 + read / READ


def shape_here(run: Run) -> Shape:
    """Of the model that a run trains or scores, one that is made from nothing included."""
    if isinstance(run.config, TrainStage) and run.config.model.init == "random":
        model = run.config.model
        return shape_of({"vocab_size": model.vocab_size, **model.architecture})
    for one in runs_behind(run.parents):
        if isinstance(one.config, TrainStage | EvalStage) or one.config.stage in ("merge", "select"):
            return shape_here(one)
    return shape_for(run)


# ---------------------------------------------------------------------------------------------------- this machine


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def listed_gpus() -> int:
    """How many GPUs nvidia-smi lists."""
    try:
        found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


def visible_gpus() -> list[str]:
    """The ids of the GPUs that this process may use, without importing torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one for one in named.split(",") if one]
    return [str(index) for index in range(listed_gpus())]
