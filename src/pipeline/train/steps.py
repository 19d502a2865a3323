"""The number of optimizer steps of a training, whose turn each is, and which of them have
snapshots.

Imports no torch, so that plans know it before a training exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.config.training import Sft
from pipeline.errors import PipelineError

SIDES = ("math", "language")  # in the order of their turns


def available_steps(sft: Sft, rows: Sequence[int]) -> int:
    """Return the optimizer steps that sets of so many rows suffice for, in whole turns.

    No row is repeated beyond sft.epochs. Training stops with the shorter set.
    """
    return (
        len(rows)
        * (min(rows) * sft.epochs // sft.batch_size // sft.steps_per_switch)
        * sft.steps_per_switch
    )


def side_of_step(step: int, steps_per_switch: int, sides: Sequence[str] = SIDES) -> str:
    """Return the side trained in a step: the first from step 0, then alternating every
    `steps_per_switch` steps.
    """
    return sides[step // steps_per_switch % len(sides)]


def steps_of(sft: Sft, rows: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Optimizer steps on each of the trainer's sets, packed or not, and the unused rows of each.

    Without sft.steps each side completes its last turn, so both train for the same number of steps.

    Raises:
        PipelineError: sft.steps exceeds what the shorter set suffices for.
    """
    available = available_steps(sft, [*rows.values()])
    if available < (sft.steps or 1):
        there = " and ".join(f"{count} {side}".removesuffix(" all") for side, count in rows.items())
        raise PipelineError(
            f"sft.steps={sft.steps or 'null'} of sft.batch_size={sft.batch_size} needs more rows"
            f" than there are ({there} in each of sft.epochs={sft.epochs}): lower one of them, or"
            " raise sft.epochs"
        )
    turns = Counter(
        side_of_step(step, sft.steps_per_switch, [*rows]) for step in range(sft.steps or available)
    )
    unused = {
        side: max(0, count * sft.epochs - turns[side] * sft.batch_size)
        for side, count in rows.items()
    }
    return {side: turns[side] for side in rows}, unused


def snapshot_steps(sft: Sft, steps: int) -> list[int]:
    """Return the first step at or after each sft.snapshot_every samples; of these the
    sft.snapshot_keep last.

    LS, appendix: "checkpointing every 5000 samples".
    """
    every = sft.snapshot_every or steps * sft.batch_size + 1
    samples = range(every, steps * sft.batch_size + 1, every)
    return sorted({-(-count // sft.batch_size) for count in samples})[
        -(sft.snapshot_keep or steps) :
    ]
