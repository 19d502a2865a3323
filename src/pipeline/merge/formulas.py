"""What one piece of one tensor of a merge is, in float32: the methods as functions of rows of their sources.

A formula takes a parameter's name and a range of its rows (`floats.matrix`) and gives an array, (rows, columns), that
lasts until the thread asks for the next. Order is stated where it decides bits: sources in the order of the merge.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge import ties
from pipeline.merge.adapters import WEIGHTS, Adapted, Source
from pipeline.merge.weights import Weights, expert_weights
from pipeline.models.floats import buffers, in_threads, matrix, pieces

if TYPE_CHECKING:
    from pipeline.config.merging import Reset, TaskArithmetic, Ties

Formula = Callable[[str, int, int], np.ndarray]
Sources = Mapping[str, Source]
_measured: dict[Any, float] = {}
FEW = 2**18  # entries of a tensor that is sorted as it is; of a larger one a sample is taken first


def weighted_sum(parts: Sequence[tuple[float, Source]], name: str, start: int, stop: int) -> np.ndarray:
    """w1 x1 + w2 x2 + ... in float32, from the left, each product and sum rounded once together.

    That is a fused multiply-add, as torch's addcmul (and so mergekit) computes it. Where a weight is a power of two the
    product is exact and nothing needs fusing; else it is exact in float64.
    """
    shape = (stop - start, matrix(parts[0][1].info(name).shape)[1])
    total, part = buffers("sum", shape), buffers("part", shape)
    for index, (weight, source) in enumerate(parts):
        source.rows(name, start, stop, part if index else total)
        single = np.float32(weight)
        if index == 0:
            np.multiply(total, single, out=total)
        elif abs(math.frexp(single)[0]) == 0.5:
            np.add(total, np.multiply(part, single, out=part), out=total)
        else:
            wide = np.multiply(part, np.float64(single), out=buffers("wide", shape, np.float64), dtype=np.float64)
            np.copyto(total, np.add(wide, total, out=wide), casting="same_kind")
    return total


def linear(sources: Sources, weights: Weights) -> Formula:
    """The weighted sum of each parameter's own sources."""

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        return weighted_sum([(weight, sources[role]) for role, weight in weights[name].items()], name, start, stop)

    return formula


def task_vectors(experts: Sequence[Source], base: Source, name: str, start: int, stop: int) -> list[np.ndarray]:
    """expert - base for each, buffers; the base's own rows stay in the buffer "base"."""
    shape = (stop - start, matrix(base.info(name).shape)[1])
    origin = buffers("base", shape)
    base.rows(name, start, stop, origin)
    found = []
    for index, expert in enumerate(experts):
        vector = buffers(f"vector {index}", shape)
        expert.rows(name, start, stop, vector)
        found.append(np.subtract(vector, origin, out=vector))
    return found


def refuse_not_finite(sources: Iterable[Source], names: Sequence[str]) -> None:
    """Name the file and the tensor where a source holds NaN or infinite values; nothing where none does.

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
                    file = part.folder / WEIGHTS if isinstance(part, Adapted) else part.info(name).file
                    raise PipelineError(f"{file}: {name} holds NaN or infinite values: copy it again, or name another")


def onto_base(change: np.ndarray, scale: float) -> np.ndarray:
    """base + scale x change, in place, for the rows last read by `task_vectors`."""
    if scale != 1:
        np.multiply(change, np.float32(scale), out=change)
    return np.add(change, buffers("base", change.shape), out=change)


def task_arithmetic(config: TaskArithmetic, sources: Sources, base: Source) -> Formula:
    """base + scale x (w1 t1 + w2 t2 + ...), summed from the left (Ilharco et al., 2023)."""
    experts, numbers = list(sources.values()), expert_weights(config.weights, len(sources))

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        vectors = task_vectors(experts, base, name, start, stop)
        for vector, number in zip(vectors, numbers, strict=True):
            if number != 1:
                np.multiply(vector, np.float32(number), out=vector)
        return onto_base(ties.total(vectors), config.scale)

    return formula


def reset_rows(config: Reset, expert: Source, base: Source) -> Formula:
    """The expert's rows that changed by more than the threshold in the mean; the base's where they did not."""
    threshold, kept = config.threshold or 0.0, _Once(lambda name: row_changes(expert, base, name, config.axis))

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        means = kept(name) > threshold
        (vector,) = task_vectors([expert], base, name, start, stop)
        one_row = len(base.info(name).shape) < 2
        keep = means if config.axis == "input" or one_row else means[start:stop, None]
        out = buffers("sum", vector.shape)
        expert.rows(name, start, stop, out)
        np.copyto(out, buffers("base", out.shape), where=~keep)
        return out

    return formula


def row_changes(expert: Source, base: Source, name: str, axis: str = "input") -> np.ndarray:
    """The mean absolute change of each row of a tensor, float64; of a vector, one number.

    axis: `input` takes a row to be an input feature, a column of the stored matrix, as the published maps do
    (papers/decisions.md); `output` takes torch's rows.
    """
    shape = base.info(name).shape
    rows, columns = matrix(shape)
    sums = np.zeros(columns if axis == "input" else rows)
    for start, stop in pieces(shape):
        (vector,) = task_vectors([expert], base, name, start, stop)
        np.abs(vector, out=vector)
        if axis == "input":
            sums += vector.sum(axis=0, dtype=np.float64)
        else:
            sums[start:stop] = vector.sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        refuse_not_finite([base, expert], [name])
    if len(shape) < 2:
        return np.array([sums.sum() / max(1, columns)])
    return sums / max(1, rows if axis == "input" else columns)


def mean_change(parts: Sequence[tuple[float, Source]], base: Source, threads: int | None = None) -> float:
    """The mean over all rows of all tensors of their mean absolute change (`layer_swapping`, section 4.3).

    The expert is the weighted sum of `parts`: of a side that is souped, its soup. Measured once a process for the same
    files: a sweep asks for each of its points.
    """
    files = [path.stat() for _, source in (*parts, (1.0, base)) for path in source.files]
    folders = tuple((weight, str(source.folder)) for weight, source in parts)
    key = (folders, str(base.folder), tuple((stat.st_size, stat.st_mtime_ns) for stat in files))
    if key in _measured:
        return _measured[key]

    def of(name: str) -> tuple[float, int]:
        shape = base.info(name).shape
        rows, columns = matrix(shape)
        total = 0.0
        for start, stop in pieces(shape):
            change = weighted_sum(parts, name, start, stop)
            origin = buffers("base", change.shape)
            base.rows(name, start, stop, origin)
            total += float(np.abs(np.subtract(change, origin, out=change), out=change).sum(dtype=np.float64))
        if not math.isfinite(total):
            refuse_not_finite([base, *(source for _, source in parts)], [name])
        return (total / rows, columns) if len(shape) > 1 else (total / max(1, columns), 1)

    found = in_threads([lambda name=name: of(name) for name in by_size(base)], threads)  # type: ignore[misc]
    _measured[key] = math.fsum(total for total, _ in found) / sum(rows for _, rows in found)
    return _measured[key]


def by_size(source: Source) -> list[str]:
    """The names, largest tensors first: threads end at about the same time."""
    return sorted(source.names, key=lambda name: (-math.prod(source.info(name).shape), name))


class TiesFormula:
    """TIES over streams. Thresholds of the whole model, and its majority sign, are found by `prepare`."""

    def __init__(self, config: Ties, sources: Sources, base: Source) -> None:
        self.config, self.base, self.experts = config, base, list(sources.values())
        self.weights = None if config.weights is None else expert_weights(config.weights, len(sources))
        self.limits: list[float] | None = None
        self.majority = 1.0
        self.of_tensor = _Once(lambda name: [self.threshold(expert, [name]) for expert in self.experts])

    def prepare(self, threads: int | None) -> None:
        if self.config.trim == "model":
            names = self.base.names
            tasks = [lambda expert=expert: self.threshold(expert, names) for expert in self.experts]
            self.limits = in_threads(tasks, threads)  # type: ignore[arg-type]
        if self.config.zero_sum == "majority":
            tasks = [lambda name=name: self.balance(name) for name in by_size(self.base)]  # type: ignore[misc]
            self.majority = 1.0 if sum(in_threads(tasks, threads)) >= 0 else -1.0

    def trimmed(self, name: str, start: int, stop: int) -> list[np.ndarray]:
        limits = self.limits or self.of_tensor(name)
        vectors = task_vectors(self.experts, self.base, name, start, stop)
        for index, (vector, limit) in enumerate(zip(vectors, limits, strict=True)):
            ties.trim(vector, limit)
            if self.weights and self.config.weigh == "before":
                np.multiply(vector, np.float32(self.weights[index]), out=vector)
        return vectors

    def balance(self, name: str) -> int:
        return sum(ties.balance(self.trimmed(name, *piece)) for piece in pieces(self.base.info(name).shape))

    def __call__(self, name: str, start: int, stop: int) -> np.ndarray:
        vectors = self.trimmed(name, start, stop)
        positive, multiplied = ties.elect(vectors, self.majority), self.config.weigh == "before"
        mean = ties.disjoint_mean(vectors, positive, self.weights, self.config.divisor, multiplied)
        return onto_base(mean, self.config.scale)

    def threshold(self, expert: Source, names: Sequence[str]) -> float:
        """The magnitude from which on entries of a task vector are kept, over one tensor or all of them."""
        size = sum(math.prod(self.base.info(name).shape) for name in names)

        def magnitudes() -> Iterator[np.ndarray]:
            for name in names:
                for start, stop in pieces(self.base.info(name).shape):
                    (vector,) = task_vectors([expert], self.base, name, start, stop)
                    yield np.abs(vector, out=vector)

        sample = self.sample(expert, names, size) if size > FEW else None
        try:
            return ties.kth_largest(magnitudes, ties.kept_count(self.config.density, size), sample, size)
        except PipelineError:
            refuse_not_finite([self.base, expert], names)
            raise

    def sample(self, expert: Source, names: Sequence[str], size: int) -> np.ndarray:
        """Magnitudes of rows spread evenly over the tensors, each thinned to as many entries: (rows, entries)."""
        wanted = 64 if len(names) == 1 else 4096
        shapes = {name: matrix(self.base.info(name).shape) for name in names}
        width = min(512, *(columns for _, columns in shapes.values()))
        found = []
        for name, (rows, columns) in shapes.items():
            width_here = min(width, columns)
            for row in np.unique(np.linspace(0, rows - 1, max(1, round(wanted * rows * columns / size))).astype(int)):
                (vector,) = task_vectors([expert], self.base, name, int(row), int(row) + 1)
                places = np.linspace(0, columns - 1, width_here).astype(int)
                found.append(np.abs(vector[0, places]))
        return np.stack(found)


class _Once:
    """A function of a name, computed when first asked for."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self.function, self.found, self.lock = function, {}, threading.Lock()  # type: ignore[var-annotated]

    def __call__(self, name: str):  # type: ignore[no-untyped-def]
        if name not in self.found:
            found = self.function(name)
            with self.lock:
                self.found.setdefault(name, found)
        return self.found[name]
