"""How many optimizer steps a training takes, whose turn each is, and at which of them snapshots lie.

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
    """The optimizer steps that rows are enough for: none is cycled beyond sft.epochs."""
    return rows * sft.epochs // sft.batch_size


def steps_of_turns(sft: Sft, shorter: int) -> int:
    """The optimizer steps of both sides, in whole turns: all stops with the shorter set, of so many rows."""
    return len(SIDES) * (whole_batches(sft, shorter) // sft.steps_per_switch) * sft.steps_per_switch


def steps_of(sft: Sft, rows: int) -> int:
    """Optimizer steps over rows as the trainer keeps them, packed or not.

    Raises:
        PipelineError: sft.steps asks for more than there are rows for.
    """
    there = whole_batches(sft, rows)
    if there == 0 or (sft.steps or 0) > there:
        raise PipelineError(
            f"sft.steps={sft.steps or 1} of sft.batch_size={sft.batch_size} need more rows than there are "
            f"({rows} in each of sft.epochs={sft.epochs}): ask for fewer, or raise sft.epochs"
        )
    return sft.steps or there


def side_of_step(step: int, steps_per_switch: int) -> str:
    """Math first, from step 0, and the other side's turn after each `steps_per_switch` steps."""
    return SIDES[step // steps_per_switch % len(SIDES)]


def steps_of_sides(sft: Sft, rows: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Optimizer steps of each side, and the rows of each that are left out: all stops with the shorter set.

    Without sft.steps each side takes its last turn whole, so both learn the same number of steps.

    Raises:
        PipelineError: sft.steps asks for more than the shorter set has rows for.
    """
    most = steps_of_turns(sft, min(rows.values()))
    if most == 0 or (sft.steps or 0) > most:
        told = " and ".join(f"{rows[side]} {side}" for side in SIDES)
        raise PipelineError(
            f"sft.steps={sft.steps or len(SIDES) * sft.steps_per_switch} of sft.batch_size={sft.batch_size}, "
            f"sft.steps_per_switch={sft.steps_per_switch}, need more than the {told} rows in each of "
            f"sft.epochs={sft.epochs}: ask for fewer"
        )
    turns_taken = Counter(side_of_step(step, sft.steps_per_switch) for step in range(sft.steps or most))
    steps = {side: turns_taken[side] for side in SIDES}
    return steps, {side: max(0, rows[side] * sft.epochs - steps[side] * sft.batch_size) for side in SIDES}


# ---------------------------------------------------------------------------------------------------- snapshots


def snapshot_steps(every: int | None, batch_size: int, steps: int) -> list[int]:
    """The first optimizer step at or after each `every` samples (LS, appendix: "checkpointing every 5000 samples")."""
    if every is None:
        return []
    return sorted({-(-samples // batch_size) for samples in range(every, steps * batch_size + 1, every)})


def kept_snapshots(snapshots: dict[str, dict[str, Any]], count: int | None, by: str) -> set[str]:
    """The steps of the snapshots that stay: all, the `count` last, or those of the lowest validation loss."""
    if count is None:
        return set(snapshots)
    order = {"last": lambda step: -int(step), "validation_loss": lambda step: snapshots[step]["validation_loss"]}[by]
    return set(sorted(snapshots, key=order)[:count])


def planned_snapshots(sft: Sft, steps: int) -> list[int] | None:
    """The snapshots that a training of so many steps will end with; None where validation losses will choose them."""
    found = snapshot_steps(sft.snapshot_every, sft.batch_size, steps)
    if sft.snapshot_keep and sft.snapshot_keep_by == "validation_loss":
        return None
    return found[-sft.snapshot_keep :] if sft.snapshot_keep else found


def snapshots_at_once(sft: Sft, steps: int) -> int:
    """How many lie on the disk at the same time: one more than are kept."""
    count = len(snapshot_steps(sft.snapshot_every, sft.batch_size, steps))
    return min(count, sft.snapshot_keep + 1) if sft.snapshot_keep else count
