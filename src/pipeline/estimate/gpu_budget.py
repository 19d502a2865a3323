"""What the runs of a plan cost on a card: hours, memory and disk, and what cannot fit it.

By the formulas of estimate/flops.py, train/memory.py and train/disk.py. Assumed besides what these say: a training row
of the tokens of flops.ROW (a joint set's is the mean of both), a document that fills a packed row, weights scored as
bfloat16 unless eval.dtype says otherwise. Data, merges and choices are of the CPU and not counted, nor are resume
points, which go when their training ends.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from pipeline.config import conf
from pipeline.config.data import Expert
from pipeline.config.stages import EvalStage, Plan, SelectStage, TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.estimate.flops import (
    GPUS,
    MGSM,
    ROW,
    Asked,
    Gpu,
    asked,
    host_memory,
    scoring_memory,
    scoring_seconds,
    training_seconds,
)
from pipeline.evaluate.selection import compared
from pipeline.models.shape import SHAPES, Shape, shape_in
from pipeline.runs.graph import unfinished
from pipeline.runs.run import External, Parent, Run, Snapshot, runs_behind
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.steps import expected_steps
from pipeline.train.disk import written
from pipeline.train.memory import (
    Trained,
    changed,
    everything,
    one_side,
    overrides,
    possible,
    remedies,
    trained_parameters,
    training_memory,
)
from pipeline.train.steps import snapshots_at_once


@dataclass
class Cost:
    """Of one run: hours of its GPUs together, bytes on each of them, of the host, and on the disk."""

    run: Run
    shape: Shape
    hours: float
    memory: float
    host: float
    weights: int = 0
    snapshots: int = 0


@dataclass
class Bill:
    """What is not finished of a plan. unknown: why a run is not reckoned; causes: why one cannot be made."""

    plan: Plan
    kinds: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    disk: float = 0.0
    unknown: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def hours(self, kind: str) -> float:
        return sum(one.hours for one in self.kinds[kind])

    def lines(self) -> list[str]:
        """GPU-hours by kind, days on so many cards, the most memory, the disk; what is not known."""
        plan = self.plan
        if not self.kinds:
            return [f"{plan.gpu}: ? (no cost estimate for this plan: {self.unknown[0]})"] if self.unknown else []
        total = sum(map(self.hours, self.kinds))
        told = ", ".join(f"{kind} {self.hours(kind):.1f}" for kind in self.kinds)
        lines = [f"{plan.gpu}: {total:.1f} GPU-hours ({told}), {total / plan.gpus / 24:.1f} days on {plan.gpus}"]
        for kind, costs in self.kinds.items():
            most = max(costs, key=lambda one: one.memory)
            lines.append(f"memory of {kind}: up to {most.memory / 1e9:.0f} GB a GPU ({most.run.name})")
        host = max(one.host for costs in self.kinds.values() for one in costs)
        lines.append(f"host memory: up to {host / 1e9:.0f} GB; disk of trainings: {self.disk / 1e12:.2f} TB")
        return [*lines, f"not included: {len(self.unknown)} runs, ? ({self.unknown[0]})"] if self.unknown else lines


def bill(runs: list[Run], plan: Plan, free_snapshots: bool = False, waiting: Sequence[Run] = ()) -> Bill:
    """What those of these runs cost that are not finished, and scores like `waiting`, of models still to be chosen.

    What selections compare is a kind of its own, `selection`.
    """
    assert plan.gpu is not None
    found, left, gpu = Bill(plan), unfinished(runs), GPUS[plan.gpu]
    selections = [run for run in runs if run.hash in left and isinstance(run.config, SelectStage)]
    behind = [one for run in selections for one in runs_behind(run.parents)]
    scored = {one.hash for run in behind for one in [run, *runs_behind(run.parents)]}  # a bundle, and its scoring runs
    asked_for = [run for run in runs if run.hash in left and isinstance(run.config, TrainStage | EvalStage)]
    asked_for = [run for run in asked_for if not is_bundle(run)]  # whose scores are runs of their own
    for run in [*asked_for, *waiting]:
        try:
            cost = training(run, gpu) if isinstance(run.config, TrainStage) else scoring(run, gpu)
        except (PipelineError, KeyError) as error:
            found.unknown.append(str(error).strip("'"))
            continue
        kind = "selection" if isinstance(run.config, EvalStage) and run.hash in scored else run.config.stage
        found.kinds[kind].append(cost)
    found.disk = disk([one for kind in ("sft", "cpt") for one in found.kinds.get(kind, [])], selections, free_snapshots)
    found.causes = [told for kind, costs in found.kinds.items() for told in cannot(kind, costs, plan)]
    return found


def disk(trainings: list[Cost], selections: list[Run], free_snapshots: bool) -> float:
    """Bytes of weights and snapshots. Where these are freed once they are ranked, those of one selection are there at a
    time, and of each selection the one that it chose."""
    total = float(sum(one.weights + one.snapshots for one in trainings))
    if not free_snapshots:
        return total
    by_hash = {one.run.hash: one for one in trainings}
    ranked = [
        {one.run.hash: by_hash[one.run.hash] for one in compared(run) if one.run.hash in by_hash} for run in selections
    ]
    gone = sum(one.snapshots for one in {key: one for costs in ranked for key, one in costs.items()}.values())
    at_once = max((sum(one.snapshots for one in costs.values()) for costs in ranked), default=0)
    return total - gone + at_once + sum(max((one.weights for one in costs.values()), default=0) for costs in ranked)


# ---------------------------------------------------------------------------------------------------- trainings


def training(run: Run[TrainStage], gpu: Gpu) -> Cost:
    """Simultaneous training is its two sides, half the steps each."""
    config, sft, shape = run.config, run.config.sft, shape_for(run)
    steps = expected_steps(run)
    if steps is None:
        raise PipelineError(f"the rows of {run.name} are not known before its data run is made: give data.size")
    lora = sft.lora_rank if sft.adapter == "lora" else 0
    parts = trained_parts(run, shape)
    seconds = sum(
        training_seconds(
            shape, part, steps // len(parts) * sft.batch_size, row_tokens(config.expert, side, sft),
            sft.batch_size, gpu, gpus=sft.processes, checkpointing=sft.gradient_checkpointing, lora_rank=lora,
            weights=sft.weights, optimizer=sft.optimizer, precision=sft.precision,
        )
        for side, part in parts
    )  # fmt: skip
    files = written(sft, shape.parameters, moved(run, shape), snapshots_at_once(sft, steps), points=0)
    return Cost(
        run, shape, seconds * sft.processes / 3600, memory_of(run, shape, sft),
        host_memory(shape.parameters, "float32", sft.processes), files["weights"], files["snapshots"],
    )  # fmt: skip


def trained_parts(run: Run[TrainStage], shape: Shape) -> list[tuple[str, Trained]]:
    """(side of the rows, what they move): simultaneous training is two, all else one."""
    sft, expert, partition = run.config.sft, run.config.expert, run.config.partition
    if partition is None:
        return [(expert.side, everything(shape))]
    if sft.method == "partial":
        return [(expert.side, one_side(shape, partition, sft.side or expert.side))]
    return [(side, one_side(shape, partition, side)) for side in ("math", "language")]


def moved(run: Run[TrainStage], shape: Shape) -> int:
    sft = run.config.sft
    lora = sft.lora_rank if sft.adapter == "lora" else 0
    return sum(trained_parameters(shape, part, lora) for _, part in trained_parts(run, shape))


def memory_of(run: Run[TrainStage], shape: Shape, sft: Sft) -> float:
    """Bytes a GPU; a micro-batch's longest row is taken to be of twice the mean."""
    mean = row_tokens(run.config.expert, run.config.expert.side, sft)
    return sum(training_memory(shape, moved(run, shape), min(sft.seq_length, 2 * mean), sft).values())


def row_tokens(expert: Expert, side: str, sft: Sft) -> float:
    """Mean tokens of a training row, as assumed; of a joint set's rows of one side, or of both; packed: full."""
    if sft.packing:
        return sft.seq_length
    names = [expert.name]
    if expert.side == "both":
        math, _, language = expert.name.partition("_")
        names = {"math": [math], "language": [language], "both": [math, language]}[side]
    if unknown := [name for name in names if name not in ROW]:
        raise PipelineError(f"tokens a row of expert={unknown[0]} are not known: there are {', '.join(ROW)}")
    return statistics.fmean(min(ROW[name], sft.seq_length) for name in names)


# ---------------------------------------------------------------------------------------------------- scoring


def scoring(run: Run[EvalStage], gpu: Gpu) -> Cost:
    """A batch is halved until it fits, so that one row is the least that must."""
    config, dtype, shape = run.config, dtype_of(run), shape_for(run)
    seconds = sum(scoring_seconds(shape, questions(run), gpu, dtype, config.eval.batch_size))
    return Cost(run, shape, seconds / 3600, least_memory(run, shape, dtype), host_memory(shape.parameters, dtype))


def questions(run: Run[EvalStage]) -> list[Asked]:
    found: list[Asked] = []
    for task in run.config.eval.tasks:
        for language in run.config.languages:
            if language not in MGSM:
                raise PipelineError(f"tokens of {task.task} in {language} are not known")
            found += asked(task.task, task.num_fewshot, language)
    return found


def least_memory(run: Run[EvalStage], shape: Shape, dtype: str) -> float:
    return max(sum(scoring_memory(shape, kind, dtype, 1).values()) for kind in questions(run))


def dtype_of(run: Run[EvalStage]) -> str:
    return "bfloat16" if run.config.eval.dtype == "auto" else run.config.eval.dtype


# ---------------------------------------------------------------------------------------------------- what cannot fit


def cannot(kind: str, costs: list[Cost], plan: Plan) -> Iterator[str]:
    """A sentence for each cause why runs of a kind cannot be made there: which, what they need, what would do."""
    trained = [one for one in costs if isinstance(one.run.config, TrainStage)]
    most = max(trained, key=lambda one: one.run.config.sft.processes, default=None)
    if most and (count := most.run.config.sft.processes) > plan.gpus:
        many = sum(one.run.config.sft.processes > plan.gpus for one in trained)
        yield f"{many} runs of {kind} need up to {count} GPUs ({most.run.name}), more than plan.gpus={plan.gpus}"
    room = GPUS[plan.gpu or ""].memory
    large = [one for one in costs if one.memory > room]
    if not large:
        return
    most = max(large, key=lambda one: one.memory)
    found = smaller(kind, large, room, plan)
    for name, other in GPUS.items():
        if other.memory > room:
            found += [f"plan.gpu={name} {one}".strip() for one in smaller(kind, large, other.memory, plan)[:1]]
    told = f"{len(large)} runs of {kind} need up to {most.memory / 1e9:.0f} GB a GPU ({most.run.name})"
    remedy = f"{', or '.join(found)} makes them fit" if found else "no knob here makes them fit"
    yield f"{told}, and {plan.gpu} has {room / 1e9:.0f}: {remedy}"


def smaller(kind: str, large: list[Cost], room: float, plan: Plan) -> list[str]:
    """Words that make all of these runs fit into so many bytes a GPU, each tried; an empty one where they do."""
    if all(one.memory <= room for one in large):
        return [""]
    if not isinstance(large[0].run.config, TrainStage):
        fit = all(least_memory(one.run, one.shape, "bfloat16") <= room for one in large)
        knob = "every.select.eval.dtype" if kind == "selection" else "every.eval.dtype"
        return [f"{knob}=bfloat16 for all rows"] if fit else []
    alike = {repr((one.shape, one.memory, one.run.config.sft)): one for one in large}.values()

    def fits(knobs: Mapping[str, Any]) -> bool:
        return possible(
            lambda: all(memory_of(one.run, one.shape, changed(one.run.config.sft, knobs)) <= room for one in alike)
        )

    more = [(knobs, int(knobs.get("processes", 1))) for knobs in remedies(fits)]
    return [overrides(knobs, "every.") + (f" plan.gpus={gpus}" if gpus > plan.gpus else "") for knobs, gpus in more]


# ---------------------------------------------------------------------------------------------------- shapes


def shape_for(run: Run) -> Shape:
    """The shape of the model that a run trains or scores, by its base: a known one, or a folder that is here."""
    for one in behind(run):
        name = one.config.model.name if isinstance(one, Run) and isinstance(one.config, TrainStage) else ""
        if name in SHAPES:
            return SHAPES[name]
        if isinstance(one, External) and one.hub and by_hub(one.hub) in SHAPES:
            return SHAPES[by_hub(one.hub)]
        if (one.folder / "config.json").is_file():
            return shape_in(one.folder)
    raise PipelineError(f"the shape of the model of {run.label} is not known before it is here")


def behind(run: Parent, seen: set[str] | None = None) -> Iterator[Parent]:
    """A run and what it was made from, models first, each once."""
    seen = set() if seen is None else seen
    if run.hash in seen:
        return
    seen.add(run.hash)
    yield run
    for parent in models_of(run):
        yield from behind(parent, seen)


def models_of(run: Parent) -> list[Parent]:
    """What a run was made from, its data aside."""
    if isinstance(run, Snapshot):
        return [run.run]
    roles = run.parents.items() if isinstance(run, Run) else ()
    return [parent for role, parent in roles if role not in ("data", "data_root", "benchmarks", "spm_model")]


@lru_cache(maxsize=64)
def by_hub(hub: str) -> str:
    """The option of conf/model that names a model on the Hub."""
    for option in conf.options("model"):
        if OmegaConf.select(OmegaConf.load(str(conf.file("model", option))), "path") == f"hub:{hub.partition('@')[0]}":
            return option
    return ""
