"""When snapshots are taken, and which are kept: weights alone, for stage=select and RUN@STEP."""

from __future__ import annotations

from typing import Any


def snapshot_steps(every: int | None, batch_size: int, steps: int) -> list[int]:
    """The first optimizer step at or after each `every` samples (LS, appendix: "checkpointing every 5000 samples")."""
    if every is None:
        return []
    return sorted({-(-samples // batch_size) for samples in range(every, steps * batch_size + 1, every)})


def kept(snapshots: dict[str, dict[str, Any]], count: int | None, by: str) -> set[str]:
    """The steps of the snapshots that stay: all, the `count` last, or those of the lowest validation loss."""
    if count is None:
        return set(snapshots)
    order = {"last": lambda step: -int(step), "validation_loss": lambda step: snapshots[step]["validation_loss"]}[by]
    return set(sorted(snapshots, key=order)[:count])
