"""What the rows of one tensor of a merge are, in float32, as functions of the same rows of its
sources.

A formula takes a parameter's name, may look at the whole tensor, and gives a function of a range of
its rows (`arrays.matrix`), which gives a fresh array, (rows, columns). Order is stated where it
decides bits: sources in the order of the merge, sums from the left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source, is_transposed
from pipeline.models.arrays import in_threads, keep_freed_memory, matrix, pieces
from pipeline.models.files import ADAPTER_WEIGHTS

Rows = Callable[[int, int], np.ndarray]
Formula = Callable[[str], Rows]
Sources = Mapping[str, Source]
_mean_changes: dict[Any, float] = {}

keep_freed_memory()


def weighted_sum(
    parts: Sequence[tuple[float, Source]], name: str, start: int, stop: int
) -> np.ndarray:
    """w1 x1 + w2 x2 + ... in float32, from the left, each product and sum rounded once together.

    That is a fused multiply-add, as torch's addcmul (and so mergekit) computes it. Where a weight
    is a power of two the product is exact and nothing needs fusing; else it is exact in float64.
    """
    (weight, source), *further = parts
    total = source.rows(name, start, stop) * np.float32(weight)
    for weight, source in further:
        single, rows = np.float32(weight), source.rows(name, start, stop)
        if abs(math.frexp(single)[0]) == 0.5:
            total += rows * single
        else:
            total = (rows * np.float64(single) + total).astype(np.float32)
    return total


def task_vectors(
    experts: Iterable[Source], base: Source, name: str, start: int, stop: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the base's rows, and expert - base for each."""
    origin = base.rows(name, start, stop)
    return origin, [expert.rows(name, start, stop) - origin for expert in experts]


def vector_pieces(
    experts: Sequence[Source], base: Source, name: str
) -> Iterator[tuple[int, int, np.ndarray, list[np.ndarray]]]:
    """Yield a tensor a piece at a time: the range of its rows, the base's, and expert - base for
    each.
    """
    for piece in pieces(base.info(name).shape):
        yield *piece, *task_vectors(experts, base, name, *piece)


def squared_norm(values: np.ndarray) -> float:
    exact = values.astype(np.float64)
    return float(np.vdot(exact, exact))


def relative_change(expert: Source, base: Source, name: str, smallest: float) -> float:
    """Return the Frobenius norm of a tensor's change divided by that of the base's tensor, if that
    is not near 0.
    """
    change = whole = 0.0
    for _, _, origin, (vector,) in vector_pieces([expert], base, name):
        change += squared_norm(vector)
        whole += squared_norm(origin)
    if not math.isfinite(change):
        refuse_not_finite([base, expert], [name])
    norm = math.sqrt(whole)
    if norm > smallest:
        return math.sqrt(change) / norm
    return math.sqrt(change)


def add_up(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Their sum, from the left, in the first of them."""
    total = vectors[0]
    for vector in vectors[1:]:
        total += vector
    return total


def onto(origin: np.ndarray, change: np.ndarray, scale: float) -> np.ndarray:
    """origin + scale x change, in the place of `change`."""
    if scale != 1:
        change *= np.float32(scale)
    change += origin
    return change


def refuse_not_finite(sources: Iterable[Source], names: Sequence[str]) -> None:
    """Raise PipelineError, naming file and tensor, where a source holds NaN or infinite values.

    Reads the tensors again: called when a result shows that one of them is broken.
    """
    for source in sources:
        if isinstance(source, Adapted):
            parts: list[Source] = [source.base, source]
        else:
            parts = [source]
        for part, name in itertools.product(parts, names):
            if name in part.infos and not all(
                np.isfinite(part.rows(name, *piece)).all()
                for piece in pieces(part.info(name).shape)
            ):
                if isinstance(part, Adapted):
                    file = part.folder / ADAPTER_WEIGHTS
                else:
                    file = part.info(name).file
                raise PipelineError(
                    f"{file}: {name} holds NaN or infinite values: copy it again, or name another"
                )


def are_columns(base: Source, name: str, axis: str) -> bool:
    """Return True if the rows that changes are measured by are columns of the stored matrix.

    axis: `input` takes a row to be an input feature, as the published maps do
    (papers/decisions.md); `output` takes it to be an output feature. A matrix is stored as
    (outputs, inputs), GPT-2's as (inputs, outputs).
    """
    if len(base.info(name).shape) < 2:
        return False
    return (axis == "input") != is_transposed(base.model, name)


def rows_in(base: Source, name: str, axis: str) -> tuple[int, int]:
    """Return how many rows a tensor has by which changes are measured, and how many entries each; a
    vector is one row.
    """
    rows, columns = matrix(base.info(name).shape)
    if are_columns(base, name, axis):
        return (columns, rows)
    return (rows, columns)


def add_to_rows(
    sums: np.ndarray, sizes: np.ndarray, start: int, stop: int, by_column: bool
) -> None:
    """Add the magnitudes of a piece of a tensor to the sums, float64, of its rows or columns."""
    if by_column:
        sums += sizes.sum(axis=0, dtype=np.float64)
    else:
        sums[start:stop] = sizes.sum(axis=1, dtype=np.float64)


def row_changes(expert: Source, base: Source, name: str, axis: str) -> np.ndarray:
    """Return the mean absolute change of each row of a tensor (`rows_in`), float64."""
    count, length = rows_in(base, name, axis)
    sums, by_column = np.zeros(count), are_columns(base, name, axis)
    for start, stop, _, (vector,) in vector_pieces([expert], base, name):
        add_to_rows(sums, np.abs(vector), start, stop, by_column)
    if not np.isfinite(sums).all():
        refuse_not_finite([base, expert], [name])
    return sums / max(1, length)


def mean_change(parts: Sequence[tuple[float, Source]], base: Source, threads: int | None) -> float:
    """Return the mean over all rows of all tensors of their mean absolute change (`layer_swapping`,
    section 4.3).

    The expert is the weighted sum of `parts`: of a side that is souped, its soup. It is measured
    once in a process for the same files, as each merge of a table asks for it.
    """
    key = tuple((weight, source.state) for weight, source in [*parts, (1.0, base)])
    if key in _mean_changes:
        return _mean_changes[key]

    def row_means(name: str) -> tuple[float, int]:
        """Return the sum of the means of a tensor's rows, and how many there are."""
        count, length = rows_in(base, name, "input")
        ranges = pieces(base.info(name).shape)
        changes = (
            np.abs(weighted_sum(parts, name, *piece) - base.rows(name, *piece)) for piece in ranges
        )
        total = sum(float(change.sum(dtype=np.float64)) for change in changes)
        if not math.isfinite(total):
            refuse_not_finite([base, *(source for _, source in parts)], [name])
        return total / max(1, length), count

    means, counts = zip(*in_threads(row_means, by_size(base), threads), strict=True)
    return _mean_changes.setdefault(key, math.fsum(means) / sum(counts))


def by_size(source: Source) -> list[str]:
    """Return the names, largest tensors first: threads end at about the same time."""
    return sorted(source.names, key=lambda name: (-math.prod(source.info(name).shape), name))
