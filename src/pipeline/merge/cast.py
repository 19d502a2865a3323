"""What a cast of all weights costs, measured on the written files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.merge.adapters import Source
from pipeline.merge.formulas import by_size
from pipeline.models.floats import buffers, in_threads, matrix, pieces


@dataclass(frozen=True)
class Cost:
    """error: the Euclidean norm of all errors over that of all weights; largest: one weight's error, in `where`;
    of_change: that norm of errors over the task vector's, where the base is known."""

    error: float
    largest: float
    where: str
    of_change: float | None = None

    def __str__(self) -> str:
        text = f"relative error {self.error:.2g}, largest {self.largest:.2g} in {self.where}"
        if self.of_change is None:
            return text
        return f"{text}; all errors together are {self.of_change:.2g} times as long as what training changed"


def cost_of_cast(source: Source, written: Source, base: Source | None = None, threads: int | None = None) -> Cost:
    """Cost of storing `source` as `written`, which has the same names and shapes, in errors of float32 values."""
    names = by_size(source)
    costs = in_threads([partial(_of_tensor, source, written, base, name) for name in names], threads)
    errors, sizes, changes, largest = (np.array(column) for column in zip(*costs, strict=True))
    worst = int(largest.argmax())
    error, size, change = math.sqrt(errors.sum()), math.sqrt(sizes.sum()), math.sqrt(changes.sum())
    of_change = error / change if base is not None and change else None
    return Cost(error / size if size else 0.0, float(largest[worst]), names[worst], of_change)


def _of_tensor(source: Source, written: Source, base: Source | None, name: str) -> tuple[float, float, float, float]:
    """Sums of squared errors, weights and changes from the base, and the largest error."""
    shape = source.info(name).shape
    error = size = change = largest = 0.0
    for start, stop in pieces(shape):
        before, after = (buffers(key, (stop - start, matrix(shape)[1])) for key in ("was", "other"))
        source.rows(name, start, stop, before)
        size += squared_norm(before)
        written.rows(name, start, stop, after)
        np.subtract(after, before, out=after)
        error, largest = error + squared_norm(after), max(largest, float(np.abs(after).max()))
        if base is not None:
            base.rows(name, start, stop, after)
            np.subtract(after, before, out=after)
            change += squared_norm(after)
    return error, size, change, largest


def squared_norm(values: np.ndarray) -> float:
    exact = values.astype(np.float64)
    return float(np.vdot(exact, exact))
