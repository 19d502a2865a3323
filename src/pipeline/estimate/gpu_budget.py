"""What the runs of a plan cost on a card: hours, memory and disk, and what cannot fit it.

By the formulas of estimate/flops.py and train/memory.py, with rows and questions as in
estimate/training_rows.py and estimate/questions.py, and weights scored as bfloat16 unless
eval.dtype says otherwise. Data, merges and choices are of the CPU and not counted, nor are resume
points, which go when their training ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from pipeline.config import conf
from pipeline.config.defaults import read_hardware
from pipeline.config.stages import HARDWARE, EvalStage, Plan, SelectStage, TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.estimate.flops import (
    Gpu,
    cards,
    host_memory,
    prompts_of,
    rows_of,
    scoring_seconds,
    training_seconds,
)
from pipeline.estimate.models import Evaluation, Training, shape_for
from pipeline.estimate.questions import question_sets_of
from pipeline.estimate.training_rows import expected_steps, padded_row, row_tokens
from pipeline.evaluate.memory import scoring_memory
from pipeline.evaluate.selection import compared
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.text import pluralize
from pipeline.train.memory import (
    WIDTH,
    moment_bytes,
    stays_gathered,
    trained_parameters,
    trained_parts,
    trained_width,
    training_memory,
)
from pipeline.train.steps import snapshot_steps


@dataclass
class Cost:
    """Cost of one run: total GPU-hours, peak bytes per GPU, bytes of host memory, GPUs, bytes on
    disk; of a score the rows that are computed together, of its questions with the fewest.
    """

    run: Run
    hours: float
    memory: float
    host: float
    gpus: int = 1
    weights: int = 0
    snapshots: int = 0
    rows: int = 0


@dataclass
class Bill:
    """Cost of the unfinished runs of a plan, by kind.

    unknown: why runs have none; causes: why runs do not fit.
    """

    plan: Plan
    kinds: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    disk: float = 0.0
    freed: float = 0.0  # the disk with free_snapshots=true
    unknown: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    causes: list[str] = field(default_factory=list)

    def hours(self, kind: str) -> float:
        return sum(cost.hours for cost in self.kinds.get(kind, ()))

    def costs(self) -> list[Cost]:
        return [*chain.from_iterable(self.kinds.values())]

    def basis(self) -> str:
        """Return the sources of the hours: the card's rates, and how many rows are scored
        together.
        """
        rates, rows = (
            cards()[self.plan.gpu or ""].basis(),
            {cost.rows for cost in self.costs() if cost.rows},
        )
        if not rows:
            return rates
        return (
            f"{rates}; {' to '.join(map(str, sorted({min(rows), max(rows)})))} rows scored at once"
        )

    def left_out(self) -> list[str]:
        """How many runs of each kind are not in it, with the first reason."""
        return [
            f"{len(reasons):,} of {len(reasons) + len(self.kinds.get(kind, ())):,} of {kind}"
            f" ({reasons[0]})"
            for kind, reasons in self.unknown.items()
        ]


def estimate_costs(
    unfinished: list[Run],
    plan: Plan,
    free_snapshots: bool = False,
    waiting: Sequence[Run] = (),
    typed: Container[str] = (),
) -> Bill:
    """Return the costs of unfinished runs, and of scores like `waiting` whose models are still to
    be chosen.

    What selections compare is a separate kind, `selection`.

    Args:
        typed: keys that no hardware= would change.
    """
    assert plan.gpu is not None
    total, gpu = Bill(plan), cards()[plan.gpu]
    selections = []
    for run in unfinished:
        if isinstance(run.config, SelectStage):
            selections.append(run)
    behind_selections = {run.hash for run in order_runs(selections)}
    # a bundle's scores are runs of their own
    computing = []
    for run in unfinished:
        if isinstance(run.config, TrainStage | EvalStage) and not is_bundle(run):
            computing.append(run)
    for run in [*computing, *waiting]:
        if isinstance(run.config, EvalStage) and run.hash in behind_selections:
            kind = "selection"
        else:
            kind = run.config.stage
        try:
            if isinstance(run.config, TrainStage):
                cost = training_cost(run, gpu)
            else:
                cost = scoring_cost(run, gpu)
        except (PipelineError, KeyError) as error:
            total.unknown[kind].append(str(error).strip("'"))
            continue
        total.kinds[kind].append(cost)
    total.disk, total.freed = (
        disk_bytes(total.costs(), selections, freed) for freed in (free_snapshots, True)
    )
    for kind, costs in total.kinds.items():
        total.causes += infeasibility_messages(kind, costs, plan, typed)
    return total


def disk_bytes(costs: list[Cost], selections: list[Run], free_snapshots: bool) -> float:
    """Bytes of weights and snapshots.

    Where these are freed once they are ranked, those of one selection are there at a time, and of
    each selection the one that it chose.
    """
    total = float(sum(cost.weights + cost.snapshots for cost in costs))
    if not free_snapshots:
        return total
    ranked = [{snapshot.run.hash for snapshot in compared(run)} for run in selections]
    candidates = [[cost for cost in costs if cost.run.hash in hashes] for hashes in ranked]
    at_once = max((sum(cost.snapshots for cost in group) for group in candidates), default=0)
    chosen = sum(max((cost.weights for cost in group), default=0) for group in candidates)
    freed = set().union(*ranked)
    return (
        total - sum(cost.snapshots for cost in costs if cost.run.hash in freed) + at_once + chosen
    )


# --- trainings ---


def training_cost(run: Training, gpu: Gpu) -> Cost:
    """Return the cost of a training.

    Raises PipelineError if its shape, rows or tokens are not known yet.
    """
    _, seconds = training_work(run, gpu)
    gpus, files = run.config.sft.processes, bytes_of_training(run)
    return Cost(
        run,
        seconds * gpus / 3600,
        memory_of(run, card=gpu.memory),
        host_memory(shape_for(run).parameters, "float32", gpus),
        gpus,
        files["weights"],
        files["snapshots"],
    )


def training_work(
    run: Training, machine: Gpu, steps: int | None = None, length: float | None = None
) -> tuple[int, float]:
    """(optimizer steps, seconds of all of them) on this machine; of simultaneous training of its
    sides, half the steps each. Raises PipelineError as `training_cost`.

    steps, length: by default those that the training will take, and the positions of its rows.
    """
    steps = steps or expected_steps(run)
    if steps is None:
        raise PipelineError(
            f"the rows of {run.name} are not known before its data run is made: give data.size"
        )
    sft, shape = run.config.sft, shape_for(run)
    parts = trained_parts(run.config, shape)
    rows = steps // len(parts) * sft.batch_size
    gathered = stays_gathered(run.config, shape, longest_row(run), machine.memory)
    return steps, sum(
        training_seconds(shape, part, rows, length or padded_row(run, side), sft, machine, gathered)
        for side, part in parts.items()
    )


def bytes_of_training(run: Training) -> dict[str, int]:
    """Purpose -> bytes that a training has on the disk at once: its weights, two resume points
    while one replaces the other, and snapshots. Empty where the shape of its model is not known
    yet.
    """
    sft = run.config.sft
    try:
        shape = shape_for(run)
    except PipelineError:
        return {}
    trained = sum(
        trained_parameters(shape, part, sft.adapter_rank)
        for part in trained_parts(run.config, shape).values()
    )
    snapshots = len(snapshot_steps(sft, expected_steps(run) or 0))
    return written_bytes(
        sft, shape.parameters, trained, snapshots, points=1 if sft.resume_minutes is None else 2
    )


def written_bytes(
    sft: Sft, total: int, trained: int, snapshots: int, points: int
) -> dict[str, int]:
    """Purpose -> bytes that a training writes.

    total, trained: numbers of parameters; with adapters the trained ones are theirs. snapshots,
    points: snapshots and resume points on the disk at once.
    """
    bytes_per_weight = trained_width(sft)
    saved = trained if sft.adapter == "lora" else total  # an adapter is saved without its base
    weights = saved * (2 if sft.save_dtype == "bfloat16" else bytes_per_weight)
    point = saved * bytes_per_weight + trained * moment_bytes(sft)
    return {"weights": weights, "resume points": points * point, "snapshots": weights * snapshots}


def memory_of(
    run: Training, on_gpu: bool = True, row: float | None = None, card: float = 0.0
) -> float:
    """Bytes of a process.

    row: tokens of the longest row of a micro-batch, by default as `longest_row`; card: bytes of its
    GPU, on which weights may stay gathered; 0: the least that it needs.
    """
    config, shape, row = run.config, shape_for(run), longest_row(run) if row is None else row
    parts, gathered = (
        trained_parts(config, shape).values(),
        stays_gathered(config, shape, row, card),
    )
    return sum(training_memory(shape, parts, row, config.sft, on_gpu, gathered).values())


def longest_row(run: Training) -> float:
    """Tokens of the longest row of a micro-batch: twice the mean, where it is known, at most
    sft.seq_length.
    """
    with suppress(PipelineError):
        return min(run.config.sft.seq_length, 2 * row_tokens(run))
    return run.config.sft.seq_length


# --- scoring ---


def scoring_cost(run: Evaluation, gpu: Gpu) -> Cost:
    """Return the cost of an evaluation. The batch is halved until it fits, so one row must fit."""
    dtype, shape, hours = dtype_of(run), shape_for(run), scoring_work(run, gpu) / 3600
    rows = min(
        rows_of(shape, kind, gpu, dtype, run.config.eval.batch_size)
        for kind in question_sets_of(run)
    )
    return Cost(
        run, hours, least_memory(run, dtype), host_memory(shape.parameters, dtype), rows=rows
    )


def scoring_work(run: Evaluation, machine: Gpu) -> float:
    """Seconds of an evaluation's forward passes on a GPU, or by threads of this CPU."""
    config = run.config.eval
    vllm = config.backend == "vllm"
    if machine.is_cpu:
        products = "ieee"
    else:
        products = config.products
    how = (dtype_of(run), config.batch_size, vllm, vllm or config.share_prefix, products)
    return sum(scoring_seconds(shape_for(run), question_sets_of(run), machine, *how))


def least_memory(run: Evaluation, dtype: str) -> float:
    shape, kinds = shape_for(run), map(prompts_of, question_sets_of(run))
    return max(sum(scoring_memory(shape, WIDTH[dtype], prompts, 1).values()) for prompts in kinds)


def dtype_of(run: Evaluation) -> str:
    if run.config.eval.dtype == "auto":
        return "bfloat16"
    return run.config.eval.dtype


# --- what cannot fit ---


def infeasibility_messages(
    kind: str, costs: list[Cost], plan: Plan, typed: Container[str] = ()
) -> Iterator[str]:
    """One sentence per cause why runs of a kind do not fit: which, what they need, and overrides
    that would fit.
    """
    widest = max(costs, key=lambda cost: cost.gpus)
    if widest.gpus > plan.gpus:
        above, label = sum(cost.gpus > plan.gpus for cost in costs), widest.run.label
        yield (
            f"{above} runs of {kind} need up to {widest.gpus} GPUs ({label}), more than"
            f" plan.gpus={plan.gpus}"
        )
    room = cards()[plan.gpu or ""].memory
    large = [cost for cost in costs if cost.memory > room]
    if not large:
        return
    largest, fitting = max(large, key=lambda cost: cost.memory), []
    if isinstance(largest.run.config, TrainStage):
        options = hardware_that_fits([cost.run for cost in large], typed=typed)
        fitting = [option for option, card in options if card == plan.gpu] or [
            option for option, _ in options[:1]
        ]
    elif all(least_memory(cost.run, "bfloat16") <= room for cost in large):
        fitting = [f"every.{'select.' * (kind == 'selection')}eval.dtype=bfloat16 for all rows"]
    for name, card in cards().items():
        if largest.memory <= card.memory:
            fitting.append(f"plan.gpu={name}")
    need = (
        f"{pluralize(len(large), 'run')} of {kind} need{'s' * (len(large) == 1)} up to"
        f" {largest.memory / 1e9:.0f} GB"
    )
    remedy = ", or ".join(fitting) or "no knob here"
    yield (
        f"{need} a GPU, and {plan.gpu} has {room / 1e9:.0f}: {remedy} makes them fit"
        f" ({largest.run.label})"
    )


def hardware_that_fits(
    large: Sequence[Training], room: float | None = None, typed: Container[str] = ()
) -> list[tuple[str, str]]:
    """(option of hardware=, its card) with which these trainings fit into `room` bytes, by default
    those of its card; the smallest node first. typed: keys that stay as they are.
    """
    found: list[tuple[int, str, str]] = []  # bytes of a node, option, card
    for name in conf.options(HARDWARE):
        machine = read_hardware(name).get("plan", {})
        card = machine.get("gpu")
        if card:
            memory = cards()[card].memory
            with suppress(PipelineError):  # a batch that so many processes do not share
                needed = max(
                    memory_of(with_recipe(run, **knobs_of(name, run, typed))) for run in large
                )
                if needed <= (memory if room is None else room):
                    found.append((memory * machine["gpus"], f"{HARDWARE}={name}", card))
    return [(option, card) for _, option, card in sorted(found)]


def knobs_of(name: str, run: Training, typed: Container[str]) -> dict[str, Any]:
    """Return the knobs of sft that an option of hardware= sets in a training and that the user did
    not type.
    """
    decided = read_hardware(name, run.config.sft.adapter).get("sft", {})
    decided = {"micro_batch_size": None, **decided}  # which another option may have set
    found = {}
    for key, value in decided.items():
        if f"sft.{key}" not in typed:
            found[key] = value
    return found


def with_recipe(run: Training, **knobs: Any) -> Training:
    """Return a training with other knobs of sft."""
    return replace(run, config=replace(run.config, sft=replace(run.config.sft, **knobs)))
