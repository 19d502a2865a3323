"""TIES merging (Yadav et al., 2023): trim, elect the sign, average the experts that agree.

A task vector is expert - base in float32. As in the paper, one threshold applies to the whole
model, and one scale is applied at the end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

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
HALVES = 2**16
_NOT_FINITE = 0x7F80  # the upper half of infinity's bits; NaNs are above


def kept_count(density: float, size: int) -> int:
    """Return k = floor(density x size), at least 1.

    The decimal number as typed counts: 0.29 of 100 is 29, not 28.
    """
    return max(1, int(Fraction(str(density)) * size))


def kth_largest(
    vectors_of: Callable[[str], Iterator[Vectors]],
    names: Sequence[str],
    k: int,
    threads: int | None = None,
) -> list[float]:
    """Return the exact k-th largest magnitude of each vector over the named tensors.

    Magnitudes sort like the bits of float32. The first pass counts the upper 16 bits. The second
    pass counts the lower 16 bits of the magnitudes in the bin of the k-th.

    `vectors_of` yields the pieces of each vector for a tensor.

    Raises:
        PipelineError: an entry is NaN or infinite.
    """
    count = partial(_count_halves, vectors_of, names, threads)
    vectors = len(next(vectors_of(names[0])))
    upper_counts = count([None] * vectors)
    if upper_counts[:, _NOT_FINITE:].any():
        raise PipelineError(
            "A task vector holds NaN or infinite values. Copy the experts and the base again."
        )
    places = [_descend(row, k) for row in upper_counts]
    lower_counts = count([upper for upper, _ in places])
    bits = []
    for row, (upper, rest) in zip(lower_counts, places, strict=True):
        lower, _ = _descend(row, rest)
        bits.append(upper << 16 | lower)
    return [float(value) for value in np.array(bits, np.uint32).view(np.float32)]


def _count_halves(
    vectors_of: Callable[[str], Iterator[Vectors]],
    names: Sequence[str],
    threads: int | None,
    bins: Sequence[int | None],
) -> np.ndarray:
    """Return how many magnitudes have each upper half, (vectors, halves).

    For a vector with a bin, count the lower halves of the magnitudes whose upper half is the bin.
    """
    counts = np.zeros((len(bins), HALVES), np.int64)
    lock = threading.Lock()

    def add_tensor(name: str) -> None:
        own = np.zeros_like(counts)
        for vectors in vectors_of(name):
            for row, vector, upper in zip(own, vectors, bins, strict=True):
                bits = np.abs(vector).view(np.uint32).reshape(-1)
                halves = bits >> 16
                if upper is not None:
                    halves = bits[halves == upper] & 0xFFFF
                row += np.bincount(halves, minlength=HALVES)
        with lock:
            np.add(counts, own, out=counts)

    in_threads(add_tensor, names, threads)
    return counts


def _descend(counts: np.ndarray, k: int) -> tuple[int, int]:
    """Return the bin of the k-th largest, and its rank within the bin."""
    seen = np.cumsum(counts[::-1])
    place = int(np.searchsorted(seen, k))
    above = 0
    if place:
        above = int(seen[place - 1])
    return len(counts) - 1 - place, k - above


def elected_mean(
    vectors: Sequence[np.ndarray], majority: float = 1.0, weights: Sequence[float] | None = None
) -> np.ndarray:
    """Elect the sign of the sum, and return the mean of the entries with that sign.

    Args:
        vectors: the trimmed task vector of each expert. Entries of 0 are left out of the mean.
        majority: the sign (1 or -1) that is elected if the sum is 0.
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


class Trimmed(NamedTuple):
    """Rows of the base, of each expert's trimmed task vector, and masks of the kept entries."""

    origin: np.ndarray
    vectors: Vectors
    kept: Vectors


class TiesMerge:
    """A TIES merge of experts. `prepare` finds the thresholds and the majority sign of the model.

    `kept` counts, for each tensor that was computed, the entries of each expert that are not 0
    after the trim.
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
        """Find the threshold of each expert's entries, and the sign that most sums have."""
        names = by_size(self.base)
        limits = [0.0] * len(self.experts)
        if self.size:
            limits = kth_largest(
                self.vectors_of, names, kept_count(self.config.density, self.size), threads
            )
        self.limits = np.array(limits, np.float32)
        balance = sum(in_threads(self.sign_balance, names, threads))
        self.majority = 1.0 if balance >= 0 else -1.0

    def vectors_of(self, name: str) -> Iterator[Vectors]:
        return (vectors for *_, vectors in vector_pieces(self.experts, self.base, name))

    def trimmed(self, name: str) -> Callable[[int, int], Trimmed]:
        """Return a function that trims a range of rows of a tensor.

        Entries at the threshold are kept, so all tied entries are kept.
        """
        assert self.limits is not None
        limits = self.limits
        counts = self.kept[name] = np.zeros(len(self.experts), np.int64)

        def rows(start: int, stop: int) -> Trimmed:
            origin, vectors = task_vectors(self.experts, self.base, name, start, stop)
            kept = []
            for index, vector in enumerate(vectors):
                mask = np.abs(vector) >= limits[index]
                vector *= mask
                # count_nonzero is seven times as fast on bools as on floats
                counts[index] += np.count_nonzero(vector != 0)
                kept.append(mask)
            return Trimmed(origin, vectors, kept)

        return rows

    def sign_balance(self, name: str) -> int:
        """Return how many more sums of a tensor's trimmed entries are positive than negative."""
        rows = self.trimmed(name)
        balance = 0
        for piece in pieces(self.base.info(name).shape):
            total = add_up(rows(*piece).vectors)
            positive = int(np.count_nonzero(total > 0))
            negative = int(np.count_nonzero(total < 0))
            balance += positive - negative
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
        experts_with_entry = add_up([mask.astype(np.uint8) for mask in kept])
        places = np.flatnonzero(experts_with_entry > 1)
        elected = elected_mean([vector.reshape(-1)[places] for vector in vectors], self.majority)
        total = add_up(vectors)
        total.reshape(-1)[places] = elected
        return total

    def kept_density(self, threads: int | None) -> dict[str, Any]:
        """Return the shares of entries that are not 0 after the trim, and their mean."""
        if self.limits is None:
            self.prepare(threads)
        counts = sum(self.kept.values(), np.zeros(len(self.experts)))
        shares = counts / max(1, self.size)
        densities = {"kept_density": float(shares.mean())}
        for index, share in enumerate(shares):
            densities[f"kept_density_{index}"] = float(share)
        return densities
