"""The cost of a plan's runs on a card (hours, memory and disk), and the runs that do not fit.

Uses the formulas of estimate/flops.py and train/memory.py, with the rows and questions of
estimate/training_rows.py and estimate/questions.py. Scored weights are assumed to be bfloat16
unless eval.dtype is set. Data, merges and selections run on the CPU and are not counted. Resume
points are not counted either, because they are deleted when their training ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.config.stages import EvalStage, Plan, SelectStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.flops import (
    Gpu,
    cards,
    prompts_of,
    scoring_seconds,
    training_seconds,
)
from pipeline.estimate.models import Evaluation, Training, shape_for
from pipeline.estimate.questions import question_sets_of
from pipeline.estimate.training_rows import expected_steps, padded_row, row_tokens
from pipeline.evaluate.memory import scoring_memory
from pipeline.evaluate.selection import compared
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.text import pluralize
from pipeline.train.memory import (
    WIDTH,
    moment_bytes,
    trained_parameters,
    trained_parts,
    trained_width,
    training_memory,
)
from pipeline.train.steps import snapshot_steps


@dataclass
class Cost:
    """Cost of one run.

    Attributes:
        run: The run.
        hours: GPU-hours of all GPUs.
        memory: Peak bytes per GPU.
        gpus: The number of GPUs.
        weights: Bytes of the weights on disk.
        snapshots: Bytes of the snapshots on disk.
    """

    run: Run
    hours: float
    memory: float
    gpus: int = 1
    weights: int = 0
    snapshots: int = 0


@dataclass
class Bill:
    """Cost of the unfinished runs of a plan.

    Attributes:
        plan: The settings of the plan.
        costs: The costs of the runs.
        disk: Bytes on disk.
        freed: Bytes on disk with free_snapshots=true.
        unknown: The reasons why runs have no cost.
        causes: The reasons why runs do not fit.
    """

    plan: Plan
    costs: list[Cost] = field(default_factory=list)
    disk: float = 0.0
    freed: float = 0.0
    unknown: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        return sum(cost.hours for cost in self.costs)

    def left_out(self) -> list[str]:
        """Return how many runs have no cost, with the first reason."""
        if not self.unknown:
            return []
        total = len(self.unknown) + len(self.costs)
        return [f"{len(self.unknown):,} of {total:,} runs ({self.unknown[0]})"]


def estimate_costs(
    unfinished: list[Run],
    plan: Plan,
    free_snapshots: bool = False,
    waiting: Sequence[Run] = (),
) -> Bill:
    """Return the costs of the unfinished trainings and evaluations.

    Args:
        unfinished: The unfinished runs.
        plan: The settings of the plan.
        free_snapshots: Whether snapshots are deleted once they are ranked.
        waiting: Representative evaluations, for models that are not chosen yet.
    """
    assert plan.gpu is not None
    total = Bill(plan)
    gpu = cards()[plan.gpu]
    for run in [*unfinished, *waiting]:
        try:
            if isinstance(run.config, TrainStage):
                total.costs.append(training_cost(run, gpu))
            elif isinstance(run.config, EvalStage) and not is_bundle(run):
                total.costs.append(scoring_cost(run, gpu))
        except (PipelineError, KeyError) as error:
            total.unknown.append(str(error).strip("'"))
    selections = [run for run in unfinished if isinstance(run.config, SelectStage)]
    total.disk = disk_bytes(total.costs, selections, free_snapshots)
    total.freed = disk_bytes(total.costs, selections, True)
    total.causes += infeasibility_messages(total.costs, plan)
    return total


def disk_bytes(costs: list[Cost], selections: list[Run], free_snapshots: bool) -> float:
    """Return the bytes of weights and snapshots.

    If snapshots are freed once they are ranked, the disk has the snapshots of one selection at a
    time, and the chosen snapshot of each selection.
    """
    total = float(sum(cost.weights + cost.snapshots for cost in costs))
    if not free_snapshots:
        return total
    ranked: set[str] = set()
    at_once = chosen = 0
    for selection in selections:
        hashes = {snapshot.run.hash for snapshot in compared(selection)}
        ranked |= hashes
        candidates = [cost for cost in costs if cost.run.hash in hashes]
        at_once = max(at_once, sum(cost.snapshots for cost in candidates))
        chosen += max((cost.weights for cost in candidates), default=0)
    freed = sum(cost.snapshots for cost in costs if cost.run.hash in ranked)
    return total - freed + at_once + chosen


# --- trainings ---


def training_cost(run: Training, gpu: Gpu) -> Cost:
    """Return the cost of a training.

    Raises:
        PipelineError: Its shape, rows or tokens are not known yet.
    """
    _, seconds = training_work(run, gpu)
    gpus = run.config.sft.processes
    files = bytes_of_training(run)
    return Cost(
        run,
        hours=seconds * gpus / 3600,
        memory=memory_of(run),
        gpus=gpus,
        weights=files["weights"],
        snapshots=files["snapshots"],
    )


def training_work(run: Training, machine: Gpu) -> tuple[int, float]:
    """Return the optimizer steps of a training and their seconds.

    Each side of simultaneous training has half of the steps.

    Raises:
        PipelineError: The model's shape, the rows or the tokens are not known yet.
    """
    steps = expected_steps(run)
    if steps is None:
        raise PipelineError(
            f"The rows of {run.name} are not known before its data run is finished. Set data.size."
        )
    sft = run.config.sft
    shape = shape_for(run)
    parts = trained_parts(run.config, shape)
    rows = steps // len(parts) * sft.batch_size
    total = 0.0
    for side, part in parts.items():
        row = padded_row(run, side)
        total += training_seconds(shape, part, rows, row, sft, machine)
    return steps, total


def bytes_of_training(run: Training) -> dict[str, int]:
    """Return the bytes that a training has on disk at once, by purpose.

    They are its weights, snapshots, and two resume points while one replaces the other. The result
    is empty if the model's shape is not known yet.
    """
    sft = run.config.sft
    try:
        shape = shape_for(run)
    except PipelineError:
        return {}
    width = trained_width(sft)
    parts = trained_parts(run.config, shape).values()
    trained = sum(trained_parameters(shape, part, sft.adapter_rank) for part in parts)
    saved = shape.parameters
    if sft.adapter == "lora":
        saved = trained  # an adapter is saved without its base
    weights = saved * (2 if sft.save_dtype == "bfloat16" else width)
    points = 2
    if sft.resume_minutes is None:
        points = 1
    point = saved * width + trained * moment_bytes(sft)
    snapshots = len(snapshot_steps(sft, expected_steps(run) or 0))
    return {"weights": weights, "resume points": points * point, "snapshots": weights * snapshots}


def memory_of(run: Training, on_gpu: bool = True, row: float | None = None) -> float:
    """Return the bytes that a process of a training needs.

    Args:
        run: The training.
        on_gpu: Whether it runs on a GPU.
        row: Tokens of the longest row of a micro-batch. None: `longest_row`.
    """
    config = run.config
    shape = shape_for(run)
    if row is None:
        row = longest_row(run)
    parts = trained_parts(config, shape).values()
    return sum(training_memory(shape, parts, row, config.sft, on_gpu).values())


def longest_row(run: Training) -> float:
    """Return the tokens of the longest row of a micro-batch.

    They are twice the mean if it is known, and at most sft.seq_length.
    """
    with suppress(PipelineError):
        return min(run.config.sft.seq_length, 2 * row_tokens(run))
    return run.config.sft.seq_length


# --- scoring ---


def scoring_cost(run: Evaluation, gpu: Gpu) -> Cost:
    """Return the cost of an evaluation. The batch is halved until it fits, so one row must fit."""
    hours = scoring_work(run, gpu) / 3600
    return Cost(run, hours, least_memory(run, dtype_of(run)))


def scoring_work(run: Evaluation, machine: Gpu) -> float:
    """Return the seconds of an evaluation's forward passes on a card or CPU."""
    config = run.config.eval
    # auto is resolved with the dtype; an unknown dtype is assumed to be bfloat16
    products = config.products
    if machine.is_cpu or products == "auto":
        products = "ieee"
    prefill, decode = scoring_seconds(
        shape_for(run),
        question_sets_of(run),
        machine,
        dtype_of(run),
        config.batch_size,
        share_prefix=config.share_prefix,
        products=products,
    )
    return prefill + decode


def least_memory(run: Evaluation, dtype: str) -> float:
    shape = shape_for(run)
    size = WIDTH[dtype]
    needs = []
    for kind in question_sets_of(run):
        needs.append(sum(scoring_memory(shape, size, prompts_of(kind), 1).values()))
    return max(needs)


def dtype_of(run: Evaluation) -> str:
    if run.config.eval.dtype == "auto":
        return "bfloat16"
    return run.config.eval.dtype


# --- runs that do not fit ---


def infeasibility_messages(costs: list[Cost], plan: Plan) -> Iterator[str]:
    """Yield the reasons why trainings or evaluations do not fit."""
    above = [cost for cost in costs if cost.gpus > plan.gpus]
    if above:
        widest = max(above, key=lambda cost: cost.gpus)
        yield (
            f"{pluralize(len(above), 'training')} need up to {widest.gpus} GPUs"
            f" ({widest.run.label}), more than plan.gpus={plan.gpus}"
        )
    room = cards()[plan.gpu or ""].memory
    large: dict[str, list[Cost]] = {"training": [], "evaluation": []}
    for cost in costs:
        if cost.memory > room:
            noun = "training" if isinstance(cost.run.config, TrainStage) else "evaluation"
            large[noun].append(cost)
    remedies = {"training": "every.sft.adapter=lora", "evaluation": "every.eval.dtype=bfloat16"}
    for noun, members in large.items():
        if not members:
            continue
        largest = max(members, key=lambda cost: cost.memory)
        need = "needs" if len(members) == 1 else "need"
        yield (
            f"{pluralize(len(members), noun)} {need} up to {largest.memory / 1e9:.0f} GB a GPU,"
            f" and {plan.gpu} has {room / 1e9:.0f}. Set hardware= for more or larger GPUs, or"
            f" {remedies[noun]} ({largest.run.label})."
        )
