"""The number of optimizer steps of a training, whose turn each is, and which of them have snapshots.

Imports no torch, so that plans know it before a training exists.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.config.training import Sft
from pipeline.errors import PipelineError

SIDES = ("math", "language")  # in the order of their turns


# ---------------------------------------------------------------------------------------------------- steps


def whole_batches(sft: Sft, rows: int) -> int:
    """The optimizer steps that the rows suffice for: none is repeated beyond sft.epochs."""
    return rows * sft.epochs // sft.batch_size


def steps_of_turns(sft: Sft, shorter: int) -> int:
    """The optimizer steps of both sides, in whole turns: training stops with the shorter set, of `shorter` rows."""
    return len(SIDES) * (whole_batches(sft, shorter) // sft.steps_per_switch) * sft.steps_per_switch


def steps_of(sft: Sft, rows: int) -> int:
    """Optimizer steps over the trainer's rows, packed or not.

    Raises:
        PipelineError: sft.steps exceeds what the rows suffice for.
    """
    available = whole_batches(sft, rows)
    if available == 0 or (sft.steps or 0) > available:
        need = f"a step of sft.batch_size={sft.batch_size} needs"
        if sft.steps:
            need = f"sft.steps={sft.steps} of sft.batch_size={sft.batch_size} need"
        remedy = "ask for fewer" if available else "lower sft.batch_size"
        raise PipelineError(
            f"{need} more rows than there are ({rows} in each of sft.epochs={sft.epochs}): {remedy}, or raise "
            "sft.epochs"
        )
    return sft.steps or available


def side_of_step(step: int, steps_per_switch: int) -> str:
    """The side trained in a step: math first, from step 0, then alternating every `steps_per_switch` steps."""
    return SIDES[step // steps_per_switch % len(SIDES)]


def steps_of_sides(sft: Sft, rows: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Optimizer steps of each side, and the unused rows of each: training stops with the shorter set.

    Without sft.steps each side completes its last turn, so both train for the same number of steps.

    Raises:
        PipelineError: sft.steps exceeds what the shorter set suffices for.
    """
    available = steps_of_turns(sft, min(rows.values()))
    if available == 0 or (sft.steps or 0) > available:
        row_counts = " and ".join(f"{rows[side]} {side}" for side in SIDES)
        what = f"sft.steps={sft.steps}" if sft.steps else f"a turn of sft.steps_per_switch={sft.steps_per_switch} steps"
        raise PipelineError(
            f"{what} of sft.batch_size={sft.batch_size} needs more than the {row_counts} rows in each of "
            f"sft.epochs={sft.epochs}: {'ask for fewer' if sft.steps else 'lower one of them'}"
        )
    turns_taken = Counter(side_of_step(step, sft.steps_per_switch) for step in range(sft.steps or available))
    steps = {side: turns_taken[side] for side in SIDES}
    return steps, {side: max(0, rows[side] * sft.epochs - steps[side] * sft.batch_size) for side in SIDES}


# ---------------------------------------------------------------------------------------------------- snapshots


def snapshot_steps(interval: int | None, batch_size: int, steps: int) -> list[int]:
    """The first step at or after each `interval` samples (LS, appendix: "checkpointing every 5000 samples")."""
    if interval is None:
        return []
    return sorted({-(-samples // batch_size) for samples in range(interval, steps * batch_size + 1, interval)})


def kept_snapshots(snapshots: dict[str, dict[str, Any]], count: int | None, by: str) -> set[str]:
    """The steps of the snapshots that are kept: all, the `count` last, or those of the lowest validation loss."""
    if count is None:
        return set(snapshots)
    order = {"last": lambda step: -int(step), "validation_loss": lambda step: snapshots[step]["validation_loss"]}[by]
    return set(sorted(snapshots, key=order)[:count])


def planned_snapshots(sft: Sft, steps: int) -> list[int] | None:
    """Steps of the snapshots that a training of `steps` steps keeps; None where validation losses decide."""
    planned = snapshot_steps(sft.snapshot_every, sft.batch_size, steps)
    if sft.snapshot_keep and sft.snapshot_keep_by == "validation_loss":
        return None
    return planned[-sft.snapshot_keep :] if sft.snapshot_keep else planned


def snapshots_at_once(sft: Sft, steps: int) -> int:
    """Number of snapshots on the disk at the same time: one more than are kept."""
    count = len(snapshot_steps(sft.snapshot_every, sft.batch_size, steps))
    return min(count, sft.snapshot_keep + 1) if sft.snapshot_keep else count
