"""What the runs of a plan cost on a card: hours, memory and disk, by the formulas of study/cost.py.

Assumed besides what these say: a training row of the tokens of cost.ROW (a joint set's is the mean of both), weights
scored as bfloat16 unless eval.dtype says otherwise. Data, merges and choices are of the CPU and not counted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config import conf
from pipeline.config.stages import EvalStage, Plan, TrainStage
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import read_json
from pipeline.models.shape import SHAPES, Shape, shape_of
from pipeline.runs.run import External, Parent, Run, Snapshot
from pipeline.study.build.evaluation import is_bundle
from pipeline.study.build.steps import planned_steps
from pipeline.study.cost import (
    GPUS,
    MGSM,
    ROW,
    Trained,
    asked,
    everything,
    host_memory,
    one_side,
    scoring_memory,
    scoring_seconds,
    snapshot_count,
    trained_parameters,
    training_disk,
    training_memory,
    training_seconds,
)
from pipeline.study.graph import unfinished
from pipeline.train.memory import bytes_per_parameter, micro_batches


def bill(runs: list[Run], plan: Plan) -> list[str]:
    """Lines: GPU-hours by kind of what is not finished, days on so many cards, most memory, disk; what is not known."""
    assert plan.gpu is not None
    gpu, left = GPUS[plan.gpu], unfinished(runs)
    hours: dict[str, float] = defaultdict(float)
    most: dict[str, tuple[float, str]] = {}
    disk, host, unknown = 0.0, 0.0, []
    scored_or_trained = (run for run in runs if isinstance(run.config, TrainStage | EvalStage) and not is_bundle(run))
    for run in (run for run in scored_or_trained if run.hash in left):
        try:
            shape = shape_for(run)
            if isinstance(run.config, TrainStage):
                seconds, memory, written = training(run, shape, plan)
                disk += written
                host = max(host, host_memory(shape.parameters, "float32", run.config.sft.processes))
            else:
                seconds, memory = scoring(run, shape, plan)
                host = max(host, host_memory(shape.parameters, dtype_of(run)))
        except (PipelineError, KeyError) as error:
            unknown.append(str(error).strip("'"))
            continue
        kind = run.config.stage
        hours[kind] += seconds / 3600
        most[kind] = max(most.get(kind, (0.0, "")), (memory, run.name))
    if not hours:
        return [f"{plan.gpu}: nothing of this plan can be reckoned ({unknown[0]})"] if unknown else []
    total = sum(hours.values())
    told = ", ".join(f"{kind} {value:.1f}" for kind, value in hours.items())
    lines = [f"{plan.gpu}: {total:.1f} GPU-hours ({told}), {total / plan.gpus / 24:.1f} days on {plan.gpus}"]
    for kind, (memory, name) in most.items():
        fits = "" if memory <= gpu.memory else f", more than the card's {gpu.memory / 1e9:.0f}: {REMEDY[kind]}"
        lines.append(f"memory of {kind}: up to {memory / 1e9:.0f} GB a GPU ({name}){fits}")
    lines.append(f"host memory: up to {host / 1e9:.0f} GB; disk of trainings: {disk / 1e12:.2f} TB")
    return [*lines, f"not reckoned: {len(unknown)} runs ({unknown[0]})"] if unknown else lines


REMEDY = {
    "sft": "every.sft.micro_batch_size=1 every.sft.gradient_checkpointing=true, fewer bytes a parameter, or fsdp2",
    "cpt": "every.sft.micro_batch_size=1 every.sft.gradient_checkpointing=true, fewer bytes a parameter, or fsdp2",
    "eval": "every.eval.dtype=bfloat16, for all rows",
}


def training(run: Run[TrainStage], shape: Shape, plan: Plan) -> tuple[float, float, float]:
    """(seconds, bytes on each GPU, bytes on the disk). Simultaneous training is its two sides, half the rows each."""
    config, sft = run.config, run.config.sft
    steps = planned_steps(run)
    if steps is None:
        raise PipelineError(f"the rows of {run.name} are not known before its data run is made")
    tokens = row_tokens(config.expert.name, config.expert.side, sft.seq_length)
    lora = sft.lora_rank if sft.adapter == "lora" else 0
    how: dict[str, Any] = {"lora_rank": lora, "weights": sft.weights, "optimizer": sft.optimizer}
    rows, parts = steps * sft.batch_size, trained_parts(run, shape)
    seconds = sum(
        training_seconds(
            shape, part, rows // len(parts), tokens, sft.batch_size, GPUS[plan.gpu or ""], gpus=sft.processes,
            checkpointing=sft.gradient_checkpointing, precision=sft.precision, **how,
        )
        for part in parts
    )  # fmt: skip
    moved = sum(trained_parameters(shape, part, lora) for part in parts)
    micro, passes = micro_batches(sft)
    memory = training_memory(
        shape, moved, micro * min(sft.seq_length, 2 * tokens), checkpointing=sft.gradient_checkpointing,
        precision=sft.precision, accumulated=passes > 1, shards=sft.processes if sft.parallel == "fsdp2" else 1, **how,
    )  # fmt: skip
    held = 2 if sft.weights == "bfloat16" and not lora else 4
    saved = 2 if sft.save_dtype == "bfloat16" else held
    snapshots = snapshot_count(sft.snapshot_every, rows, sft.batch_size, sft.snapshot_keep)
    moments = bytes_per_parameter(sft) - 2 * held
    written = training_disk(moved if lora else shape.parameters, moved, held, saved, moments, 0, snapshots)
    return seconds * sft.processes, sum(memory.values()), float(sum(written.values()))


def trained_parts(run: Run[TrainStage], shape: Shape) -> list[Trained]:
    sft, partition = run.config.sft, run.config.partition
    if partition is None:
        return [everything(shape)]
    sides = [sft.side or run.config.expert.side] if sft.method == "partial" else ["math", "language"]
    return [one_side(shape, partition, side) for side in sides]


def row_tokens(expert: str, side: str, most: int) -> float:
    """Mean tokens of a training row, as assumed."""
    if side == "both":
        first, _, second = expert.partition("_")
        return statistics.fmean(row_tokens(one, "", most) for one in (first, second))
    if expert not in ROW:
        raise PipelineError(f"tokens a row of expert={expert} are not known: there are {', '.join(ROW)}")
    return min(ROW[expert], most)


def scoring(run: Run[EvalStage], shape: Shape, plan: Plan) -> tuple[float, float]:
    gpu, config, dtype = GPUS[plan.gpu or ""], run.config, dtype_of(run)
    seconds = memory = 0.0
    for task in config.eval.tasks:
        for language in config.languages:
            if language not in MGSM:
                raise PipelineError(f"tokens of {task.task} in {language} are not known")
            kinds = asked(task.task, task.num_fewshot, language)
            seconds += sum(scoring_seconds(shape, kinds, gpu, dtype, config.eval.batch_size))
            least = (scoring_memory(shape, kind, dtype, 1) for kind in kinds)  # batches are halved until they fit
            memory = max(memory, *(sum(one.values()) for one in least))
    return seconds, memory


def dtype_of(run: Run[EvalStage]) -> str:
    return "bfloat16" if run.config.eval.dtype == "auto" else run.config.eval.dtype


# ---------------------------------------------------------------------------------------------------- shapes


def shape_for(run: Run) -> Shape:
    """The shape of the model that a run trains or scores, by its base: a known one, or a config.json that is here."""
    for one in behind(run):
        name = one.config.model.name if isinstance(one, Run) and isinstance(one.config, TrainStage) else ""
        if name in SHAPES:
            return SHAPES[name]
        if isinstance(one, External) and one.hub and by_hub(one.hub) in SHAPES:
            return SHAPES[by_hub(one.hub)]
        if (one.folder / "config.json").is_file():
            return shape_of(read_json(one.folder / "config.json"))
    raise PipelineError(f"the shape of the model of {run.label} is not known before it is here")


def behind(run: Parent) -> Iterator[Parent]:
    """A run and what it was made from, models first."""
    yield run
    if isinstance(run, Snapshot):
        yield from behind(run.run)
    elif isinstance(run, Run):
        for role, parent in run.parents.items():
            if role not in ("data", "data_root", "benchmarks", "spm_model"):
                yield from behind(parent)


@lru_cache(maxsize=64)
def by_hub(hub: str) -> str:
    """The option of conf/model that names a model of the Hub."""
    for path in sorted((Path(conf.folder()) / "model").glob("*.yaml")):
        if OmegaConf.select(OmegaConf.load(path), "path") == f"hub:{hub.partition('@')[0]}":
            return path.stem
    return ""
