"""TIES merging (Yadav et al., 2023): trim, elect sign, disjoint mean.

A task vector is expert - base, in float32. The definition is the paper's: one threshold for the
whole model, and one scale at the end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.merge.formulas import (
    Rows,
    Sources,
    add_up,
    by_size,
    onto,
    task_vectors,
    vector_pieces,
)
from pipeline.models.arrays import in_threads, pieces

Vectors = list[np.ndarray]
_NOT_FINITE = 0x7F80  # the upper half of the bits of infinity; those of NaNs are above


def kept_count(density: float, size: int) -> int:
    """k = floor(density x size), at least 1.

    The decimal as typed counts: 0.29 of 100 is 29, not 28.
    """
    return max(1, int(Fraction(str(density)) * size))


def kth_largest(
    vectors_of: Callable[[str], Iterator[Vectors]],
    names: Sequence[str],
    k: int,
    threads: int | None = None,
) -> list[float]:
    """The k-th largest magnitude of each vector over the named tensors, exactly, in two passes.

    Magnitudes sort like the bits of float32: one pass counts them by their upper 16 bits, a second
    those in the bin of the k-th by their lower 16. vectors_of(name) gives the pieces of each
    vector. Raises PipelineError for NaN and for infinite entries.
    """
    lock = threading.Lock()

    def count(bins: Sequence[int | None]) -> np.ndarray:
        """(vectors, halves): how many entries have each upper half, or each lower half in a bin of
        the upper.
        """
        counts = np.zeros((len(bins), 2**16), np.int64)

        def add_tensor(name: str) -> None:
            own = np.zeros_like(counts)
            for vectors in vectors_of(name):
                for row, vector, upper in zip(own, vectors, bins, strict=True):
                    bits = np.abs(vector).view(np.uint32).reshape(-1)
                    halves = bits >> 16
                    row += np.bincount(
                        halves if upper is None else bits[halves == upper] & 0xFFFF, minlength=2**16
                    )
            with lock:
                np.add(counts, own, out=counts)

        in_threads(add_tensor, names, threads)
        return counts

    uppers = count([None] * len(next(vectors_of(names[0]))))
    if uppers[:, _NOT_FINITE:].any():
        raise PipelineError(
            "a task vector holds NaN or infinite values: an expert or the base is broken"
        )
    found = [_descend(row, k) for row in uppers]
    lowers = count([upper for upper, _ in found])
    bits = [
        upper << 16 | _descend(row, rest)[0]
        for row, (upper, rest) in zip(lowers, found, strict=True)
    ]
    return [float(value) for value in np.array(bits, np.uint32).view(np.float32)]


def _descend(counts: np.ndarray, k: int) -> tuple[int, int]:
    """Return the bin that holds the k-th largest, and its place from the top within that bin."""
    seen = np.cumsum(counts[::-1])
    place = int(np.searchsorted(seen, k))
    return len(counts) - 1 - place, k - (int(seen[place - 1]) if place else 0)


def elected_mean(
    vectors: Sequence[np.ndarray], majority: float = 1.0, weights: Sequence[float] | None = None
) -> np.ndarray:
    """Elect the sign of the sum, then return the mean of the vectors whose entry is not 0 and has
    that sign.

    Args:
        vectors: the trimmed task vector of each expert.
        majority: the sign (1 or -1) that is elected where the sum is 0.
        weights: a factor for each expert's entries, applied after the election. The mean divides by
            the number of experts that agree, not by their weights.
    """
    total = sum(vectors[1:], vectors[0])
    sign = np.where(total == 0, np.float32(majority), np.sign(total))
    parts, count = [], np.zeros(total.shape, np.float32)
    for vector, weight in zip(vectors, weights or [1.0] * len(vectors), strict=True):
        agrees = vector * sign > 0
        parts.append(vector * agrees * np.float32(weight))
        count += agrees
    return add_up(parts) / np.where(count == 0, np.float32(1), count)


class TiesMerge:
    """TIES of experts. `prepare` finds the thresholds and the majority sign of the whole model.

    `kept`: tensor -> entries of each expert that are not 0 after the trim, counted while the tensor
    is computed.
    """

    def __init__(self, config: Any, sources: Sources, base: Source) -> None:
        self.config, self.base, self.experts = config, base, list(sources.values())
        self.weights = config.weights
        self.limits: np.ndarray | None = None
        self.majority = 1.0
        self.kept: dict[str, np.ndarray] = {}

    @property
    def size(self) -> int:
        """The number of entries of the model."""
        return sum(math.prod(self.base.info(name).shape) for name in self.base.names)

    def prepare(self, threads: int | None) -> None:
        """Find the magnitude from which on each expert's entries are kept, and the sign that most
        sums have.
        """
        names = by_size(self.base)
        limits = [0.0] * len(self.experts)
        if self.size:
            limits = kth_largest(
                self.vectors_of, names, kept_count(self.config.density, self.size), threads
            )
        self.limits = np.array(limits, np.float32)
        if sum(in_threads(self.sign_balance, names, threads)) >= 0:
            self.majority = 1.0
        else:
            self.majority = -1.0

    def vectors_of(self, name: str) -> Iterator[Vectors]:
        return (vectors for *_, vectors in vector_pieces(self.experts, self.base, name))

    def trimmed(self, name: str) -> Callable[[int, int], tuple[np.ndarray, Vectors, Vectors]]:
        """Return a function of a range of rows: the base's rows, each expert's trimmed vector, and
        where it keeps its entries.

        Entries at or above the threshold stay, so entries that are tied with it all stay.
        """
        assert self.limits is not None
        limits = self.limits
        counts = self.kept[name] = np.zeros(len(self.experts), np.int64)

        def rows(start: int, stop: int) -> tuple[np.ndarray, Vectors, Vectors]:
            origin, vectors = task_vectors(self.experts, self.base, name, start, stop)
            kept = []
            for index, vector in enumerate(vectors):
                mask = np.abs(vector) >= limits[index]
                vector *= mask
                counts[index] += np.count_nonzero(
                    vector != 0
                )  # of bools: seven times as fast as of floats
                kept.append(mask)
            return origin, vectors, kept

        return rows

    def sign_balance(self, name: str) -> int:
        """Return how many more entries of a tensor have a positive sum over the trimmed experts
        than a negative one.
        """
        rows, balance = self.trimmed(name), 0
        for piece in pieces(self.base.info(name).shape):
            total = add_up(rows(*piece)[1])
            balance += int(np.count_nonzero(total > 0)) - int(np.count_nonzero(total < 0))
        return balance

    def formula(self, name: str) -> Rows:
        trimmed = self.trimmed(name)

        def rows(start: int, stop: int) -> np.ndarray:
            origin, vectors, kept = trimmed(start, stop)
            return onto(origin, self.mean(vectors, kept), self.config.scale)

        return rows

    def mean(self, vectors: Vectors, kept: Vectors) -> np.ndarray:
        """Elect signs and average.

        Without weights, signs are elected only where several experts have an entry. Elsewhere the
        sum is the mean.
        """
        if self.weights:
            return elected_mean(vectors, self.majority, self.weights)
        places = np.flatnonzero(add_up([mask.astype(np.uint8) for mask in kept]) > 1)
        elected = elected_mean([vector.reshape(-1)[places] for vector in vectors], self.majority)
        total = add_up(vectors)
        total.reshape(-1)[places] = elected
        return total

    def kept_density(self, threads: int | None) -> dict[str, Any]:
        """Return the share of entries that are not 0 after the trim, in all and of each expert."""
        if self.limits is None:
            self.prepare(threads)
        shares = sum(self.kept.values(), np.zeros(len(self.experts))) / max(1, self.size)
        return {
            "kept_density": float(shares.mean()),
            **{f"kept_density_{i}": float(s) for i, s in enumerate(shares)},
        }
