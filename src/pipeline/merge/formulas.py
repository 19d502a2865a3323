"""What one piece of one tensor of a merge is, in float32, as functions of rows of its sources: what the methods share.

A formula takes a parameter's name and a range of its rows (`floats.matrix`) and gives an array, (rows, columns), that
lasts until the thread asks for the next. Order is stated where it decides bits: sources in the order of the merge.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.weights import Weights
from pipeline.models.files import ADAPTER_WEIGHTS
from pipeline.models.floats import buffers, in_threads, matrix, pieces

T = TypeVar("T")
Formula = Callable[[str, int, int], np.ndarray]
Sources = Mapping[str, Source]
_measured: dict[Any, float] = {}


def weighted_sum(parts: Sequence[tuple[float, Source]], name: str, start: int, stop: int) -> np.ndarray:
    """w1 x1 + w2 x2 + ... in float32, from the left, each product and sum rounded once together.

    That is a fused multiply-add, as torch's addcmul (and so mergekit) computes it. Where a weight is a power of two the
    product is exact and nothing needs fusing; else it is exact in float64.
    """
    shape = (stop - start, matrix(parts[0][1].info(name).shape)[1])
    result, part = buffers("sum", shape), buffers("part", shape)
    for index, (weight, source) in enumerate(parts):
        source.rows(name, start, stop, part if index else result)
        single = np.float32(weight)
        if index == 0:
            np.multiply(result, single, out=result)
        elif abs(math.frexp(single)[0]) == 0.5:
            np.add(result, np.multiply(part, single, out=part), out=result)
        else:
            wide = np.multiply(part, np.float64(single), out=buffers("wide", shape, np.float64), dtype=np.float64)
            np.copyto(result, np.add(wide, result, out=wide), casting="same_kind")
    return result


def linear_formula(sources: Sources, weights: Weights) -> Formula:
    """The weighted sum of each parameter's own sources."""

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        return weighted_sum([(weight, sources[role]) for role, weight in weights[name].items()], name, start, stop)

    return formula


def task_vectors(experts: Sequence[Source], base: Source, name: str, start: int, stop: int) -> list[np.ndarray]:
    """expert - base for each, buffers; the base's own rows stay in the buffer "base"."""
    shape = (stop - start, matrix(base.info(name).shape)[1])
    origin = buffers("base", shape)
    base.rows(name, start, stop, origin)
    vectors = []
    for index, expert in enumerate(experts):
        vector = buffers(f"vector {index}", shape)
        expert.rows(name, start, stop, vector)
        vectors.append(np.subtract(vector, origin, out=vector))
    return vectors


def refuse_not_finite(sources: Iterable[Source], names: Sequence[str]) -> None:
    """Raise PipelineError, naming file and tensor, where a source holds NaN or infinite values.

    Reads the tensors again: asked when a result shows that one of them is broken.
    """
    for source in sources:
        parts: list[Source] = [source.base, source] if isinstance(source, Adapted) else [source]
        for part, name in itertools.product(parts, names):
            shape = part.info(name).shape
            for start, stop in pieces(shape):
                values = buffers("finite", (stop - start, matrix(shape)[1]))
                part.rows(name, start, stop, values)
                if not np.isfinite(values).all():
                    file = part.folder / ADAPTER_WEIGHTS if isinstance(part, Adapted) else part.info(name).file
                    raise PipelineError(f"{file}: {name} holds NaN or infinite values: copy it again, or name another")


def sum_vectors(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The sum over experts, in their order; a buffer."""
    result = buffers("total", vectors[0].shape)
    if len(vectors) < 2:
        np.copyto(result, vectors[0])
    for index, vector in enumerate(vectors[1:]):
        np.add(result if index else vectors[0], vector, out=result)
    return result


def onto_base(change: np.ndarray, scale: float) -> np.ndarray:
    """base + scale x change, in place, for the rows last read by `task_vectors`."""
    if scale != 1:
        np.multiply(change, np.float32(scale), out=change)
    return np.add(change, buffers("base", change.shape), out=change)


def rows_in(shape: tuple[int, ...], axis: str) -> tuple[int, int]:
    """(how many rows a tensor has, how many entries each) where changes are measured by row; a vector is one row.

    axis: `input` takes a row to be an input feature, a column of the stored matrix, as the published maps do
    (papers/decisions.md); `output` takes torch's rows.
    """
    rows, columns = matrix(shape)
    return (columns, rows) if axis == "input" and len(shape) > 1 else (rows, columns)


def add_to_rows(sums: np.ndarray, sizes: np.ndarray, start: int, stop: int, axis: str, shape: tuple[int, ...]) -> None:
    """Add the magnitudes of a piece of a tensor to the sums, float64, of the rows of `rows_in`."""
    if axis == "input" and len(shape) > 1:
        sums += sizes.sum(axis=0, dtype=np.float64)
    else:
        sums[start:stop] = sizes.sum(axis=1, dtype=np.float64)


def row_changes(expert: Source, base: Source, name: str, axis: str = "input") -> np.ndarray:
    """The mean absolute change of each row of a tensor (`rows_in`), float64."""
    shape = base.info(name).shape
    count, length = rows_in(shape, axis)
    sums = np.zeros(count)
    for start, stop in pieces(shape):
        (vector,) = task_vectors([expert], base, name, start, stop)
        add_to_rows(sums, np.abs(vector, out=vector), start, stop, axis, shape)
    if not np.isfinite(sums).all():
        refuse_not_finite([base, expert], [name])
    return sums / max(1, length)


def mean_change(parts: Sequence[tuple[float, Source]], base: Source, threads: int | None = None) -> float:
    """The mean over all rows of all tensors of their mean absolute change (`layer_swapping`, section 4.3).

    The expert is the weighted sum of `parts`: of a side that is souped, its soup. Measured once a process for the same
    files: a sweep asks for each of its points.
    """
    key = (tuple(weight for weight, _ in parts), *as_they_are(*(source for _, source in parts), base))
    if key in _measured:
        return _measured[key]

    def row_means(name: str) -> tuple[float, int]:
        """The sum of the means of a tensor's rows, and how many there are."""
        shape = base.info(name).shape
        count, length = rows_in(shape, "input")
        sum_ = 0.0
        for start, stop in pieces(shape):
            change = weighted_sum(parts, name, start, stop)
            origin = buffers("base", change.shape)
            base.rows(name, start, stop, origin)
            sum_ += float(np.abs(np.subtract(change, origin, out=change), out=change).sum(dtype=np.float64))
        if not math.isfinite(sum_):
            refuse_not_finite([base, *(source for _, source in parts)], [name])
        return sum_ / max(1, length), count

    sums = in_threads([partial(row_means, name) for name in by_size(base)], threads)
    _measured[key] = math.fsum(means for means, _ in sums) / sum(count for _, count in sums)
    return _measured[key]


def as_they_are(*sources: Source) -> tuple[Any, ...]:
    """What names the contents of sources within a process: their folders, and the sizes and times of their files."""
    stats = [path.stat() for source in sources for path in source.files]
    return tuple(str(source.folder) for source in sources), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


def by_size(source: Source) -> list[str]:
    """The names, largest tensors first: threads end at about the same time."""
    return sorted(source.names, key=lambda name: (-math.prod(source.info(name).shape), name))


class Once(Generic[T]):
    """A function of a tensor's name, computed when first asked for: what a formula must know of the whole tensor."""

    def __init__(self, function: Callable[[str], T]) -> None:
        self.function, self.lock = function, threading.Lock()
        self.found: dict[str, T] = {}

    def __call__(self, name: str) -> T:
        if name not in self.found:
            value = self.function(name)
            with self.lock:
                self.found.setdefault(name, value)
        return self.found[name]
