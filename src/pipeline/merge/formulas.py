"""Formulas that compute the rows of a merged tensor in float32 from the sources' rows.

A formula takes the name of a parameter and may look at the whole tensor. It returns a function of a
range of rows (`arrays.matrix`), which returns a new array, (rows, columns). The order of operations
decides bits: sources are in the order of the merge, and sums run from the left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    """Return w1 x1 + w2 x2 + ... in float32, summed from the left.

    Each product and sum are rounded together, as in torch's addcmul (and so mergekit), which is a
    fused multiply-add. Products with a power of two are exact in float32. Other products are
    computed in float64, where they are exact.
    """
    (weight, source), *further = parts
    total = source.rows(name, start, stop) * np.float32(weight)
    for weight, source in further:
        single = np.float32(weight)
        rows = source.rows(name, start, stop)
        is_power_of_two = abs(math.frexp(single)[0]) == 0.5
        if is_power_of_two:
            total += rows * single
        else:
            total = (rows * np.float64(single) + total).astype(np.float32)
    return total


def task_vectors(
    experts: Iterable[Source], base: Source, name: str, start: int, stop: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return rows of the base, and expert - base for each expert."""
    origin = base.rows(name, start, stop)
    return origin, [expert.rows(name, start, stop) - origin for expert in experts]


def vector_pieces(
    experts: Sequence[Source], base: Source, name: str
) -> Iterator[tuple[int, int, np.ndarray, list[np.ndarray]]]:
    """Yield pieces of a tensor: start and stop of the rows, the base's rows, the task vectors."""
    for piece in pieces(base.info(name).shape):
        yield *piece, *task_vectors(experts, base, name, *piece)


def squared_norm(values: np.ndarray) -> float:
    exact = values.astype(np.float64)
    return float(np.vdot(exact, exact))


def relative_change(expert: Source, base: Source, name: str, smallest: float) -> float:
    """Return the Frobenius norm of a tensor's change, relative to the base's norm.

    It is not divided if the base's norm is at most `smallest`.
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
    """Return the sum from the left. It overwrites the first vector."""
    total = vectors[0]
    for vector in vectors[1:]:
        total += vector
    return total


def onto(origin: np.ndarray, change: np.ndarray, scale: float) -> np.ndarray:
    """Return origin + scale x change. It overwrites `change`."""
    if scale != 1:
        change *= np.float32(scale)
    change += origin
    return change


def refuse_not_finite(sources: Iterable[Source], names: Sequence[str]) -> None:
    """Raise PipelineError with file and tensor if a source holds NaN or infinite values.

    It reads the tensors again, so call it only after a result was not finite.
    """
    for source in sources:
        for name in names:
            if isinstance(source, Adapted):
                _refuse_tensor(source.base, name)
            _refuse_tensor(source, name)


def _refuse_tensor(source: Source, name: str) -> None:
    info = source.infos.get(name)
    if info is None:
        return
    if all(np.isfinite(source.rows(name, *piece)).all() for piece in pieces(info.shape)):
        return
    file = info.file
    if isinstance(source, Adapted):
        file = source.folder / ADAPTER_WEIGHTS
    raise PipelineError(
        f"{file}: {name} holds NaN or infinite values. Copy the file again, or name another model."
    )


def are_columns(base: Source, name: str, axis: str) -> bool:
    """Return True if the rows that changes are measured by are columns of the stored matrix.

    With axis=`input` a row is an input feature, as in the published maps (papers/decisions.md);
    with `output` it is an output feature. Matrices are stored as (outputs, inputs), except GPT-2's.
    """
    if len(base.info(name).shape) < 2:
        return False
    return (axis == "input") != is_transposed(base.model, name)


def rows_in(base: Source, name: str, axis: str) -> tuple[int, int]:
    """Return the number of rows that changes are measured by, and the entries of each row.

    A vector is one row.
    """
    rows, columns = matrix(base.info(name).shape)
    if are_columns(base, name, axis):
        return (columns, rows)
    return (rows, columns)


def add_to_rows(
    sums: np.ndarray, sizes: np.ndarray, start: int, stop: int, by_column: bool
) -> None:
    """Add the magnitudes of a piece of a tensor to the sums of its rows or columns."""
    if by_column:
        sums += sizes.sum(axis=0, dtype=np.float64)
    else:
        sums[start:stop] = sizes.sum(axis=1, dtype=np.float64)


def row_changes(expert: Source, base: Source, name: str, axis: str) -> np.ndarray:
    """Return the mean absolute change of each row of a tensor (`rows_in`) in float64."""
    count, length = rows_in(base, name, axis)
    sums = np.zeros(count)
    by_column = are_columns(base, name, axis)
    for start, stop, _, (vector,) in vector_pieces([expert], base, name):
        add_to_rows(sums, np.abs(vector), start, stop, by_column)
    if not np.isfinite(sums).all():
        refuse_not_finite([base, expert], [name])
    return sums / max(1, length)


def mean_change(parts: Sequence[tuple[float, Source]], base: Source, threads: int | None) -> float:
    """Return the mean absolute change of the rows of all tensors (`layer_swapping`, section 4.3).

    The expert is the weighted sum of `parts`, such as the soup of a side. A process measures the
    same files once, because every merge of a table needs the result.
    """
    states = [(weight, source.state) for weight, source in parts]
    key = (*states, base.state)
    if key in _mean_changes:
        return _mean_changes[key]
    measured = in_threads(partial(_row_means, parts, base), by_size(base), threads)
    total = math.fsum(means for means, _ in measured)
    rows = sum(count for _, count in measured)
    return _mean_changes.setdefault(key, total / rows)


def _row_means(parts: Sequence[tuple[float, Source]], base: Source, name: str) -> tuple[float, int]:
    """Return the sum of the mean changes of a tensor's rows, and the number of rows."""
    count, length = rows_in(base, name, "input")
    total = 0.0
    for piece in pieces(base.info(name).shape):
        change = np.abs(weighted_sum(parts, name, *piece) - base.rows(name, *piece))
        total += float(change.sum(dtype=np.float64))
    if not math.isfinite(total):
        refuse_not_finite([base, *(source for _, source in parts)], [name])
    return total / max(1, length), count


def by_size(source: Source) -> list[str]:
    """Return the names, largest tensors first, so that threads finish at about the same time."""
    return sorted(source.names, key=lambda name: -math.prod(source.info(name).shape))
