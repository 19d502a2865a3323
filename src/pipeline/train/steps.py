"""The number of optimizer steps of a training, the side of each step, and the steps with snapshots.

This module does not import torch, so plans can use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.config.training import Sft
from pipeline.errors import PipelineError

SIDES = ("math", "language")  # in the order of their turns


def available_steps(sft: Sft, rows: Sequence[int]) -> int:
    """Return the number of optimizer steps that sets of this many rows allow, in whole turns.

    No row is repeated beyond sft.epochs. Training stops with the shorter set.
    """
    steps = min(rows) * sft.epochs // sft.batch_size
    turns = steps // sft.steps_per_switch
    return len(rows) * turns * sft.steps_per_switch


def side_of_step(step: int, steps_per_switch: int, sides: Sequence[str] = SIDES) -> str:
    """Return the side that a step trains: sides alternate every `steps_per_switch` steps."""
    return sides[step // steps_per_switch % len(sides)]


def steps_of(sft: Sft, rows: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the optimizer steps on each of the trainer's sets, and the unused rows of each set.

    Without sft.steps each side completes its last turn, so both sides train for equally many steps.

    `rows` has the rows of each set, after packing.

    Raises:
        PipelineError: the shorter set has too few rows for sft.steps, or for a single turn.
    """
    available = available_steps(sft, [*rows.values()])
    if available < (sft.steps or 1):
        counts = [f"{count} {side}".removesuffix(" all") for side, count in rows.items()]
        raise PipelineError(
            f"sft.steps={sft.steps or 'null'} with sft.batch_size={sft.batch_size} needs more rows"
            f" than {' and '.join(counts)} in each of sft.epochs={sft.epochs}. Lower one of them,"
            " or raise sft.epochs."
        )
    sides = [*rows]
    turns = Counter(
        side_of_step(step, sft.steps_per_switch, sides) for step in range(sft.steps or available)
    )
    unused = {}
    for side, count in rows.items():
        unused[side] = max(0, count * sft.epochs - turns[side] * sft.batch_size)
    return {side: turns[side] for side in rows}, unused


def snapshot_steps(sft: Sft, steps: int) -> list[int]:
    """Return the first step at or after each sft.snapshot_every samples.

    Only the last sft.snapshot_keep of these steps are returned. LS, appendix: "checkpointing every
    5000 samples".
    """
    last = steps * sft.batch_size
    every = sft.snapshot_every or last + 1
    samples = range(every, last + 1, every)
    after = {(count + sft.batch_size - 1) // sft.batch_size for count in samples}
    return sorted(after)[-(sft.snapshot_keep or steps) :]
