"""TIES merging (Yadav et al., 2023): trim, elect sign, disjoint mean.

A task vector is expert - base, in float32. The definitions are the paper's where nothing is said: no weights per
expert, one scale at the end. Other programs weigh before the election, or divide by weights: those are arguments.
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
from pipeline.models.arrays import in_threads, matrix, pieces

Vectors = list[np.ndarray]
_NOT_FINITE = 0x7F80  # the upper half of the bits of infinity; those of NaNs are above


def kept_count(density: float, size: int) -> int:
    """k = floor(density x size), at least 1. The decimal as typed counts: 0.29 of 100 is 29, not 28."""
    return max(1, int(Fraction(str(density)) * size))


def kth_largest(
    vectors_of: Callable[[str], Iterator[Vectors]], names: Sequence[str], k: int, threads: int | None = None
) -> list[float]:
    """The k-th largest magnitude of each vector over the named tensors, exactly, in two passes.

    Magnitudes sort like the bits of float32: one pass counts them by their upper 16 bits, a second those in the bin of
    the k-th by their lower 16. vectors_of(name) gives the pieces of each vector. Raises PipelineError for NaN and for
    infinite entries.
    """
    lock = threading.Lock()

    def count(bins: Sequence[int | None]) -> np.ndarray:
        """(vectors, halves): how many entries have each upper half, or each lower half in a bin of the upper."""
        counts = np.zeros((len(bins), 2**16), np.int64)

        def add_tensor(name: str) -> None:
            own = np.zeros_like(counts)
            for vectors in vectors_of(name):
                for row, vector, upper in zip(own, vectors, bins, strict=True):
                    bits = np.abs(vector).view(np.uint32).reshape(-1)
                    halves = bits >> 16
                    row += np.bincount(halves if upper is None else bits[halves == upper] & 0xFFFF, minlength=2**16)
            with lock:
                np.add(counts, own, out=counts)

        in_threads(add_tensor, names, threads)
        return counts

    uppers = count([None] * len(next(vectors_of(names[0]))))
    if uppers[:, _NOT_FINITE:].any():
        raise PipelineError("a task vector holds NaN or infinite values: an expert or the base is broken")
    found = [_descend(row, k) for row in uppers]
    lowers = count([upper for upper, _ in found])
    bits = [upper << 16 | _descend(row, rest)[0] for row, (upper, rest) in zip(lowers, found, strict=True)]
    return [float(value) for value in np.array(bits, np.uint32).view(np.float32)]


def _descend(counts: np.ndarray, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest, and its place from the top within that bin."""
    seen = np.cumsum(counts[::-1])
    place = int(np.searchsorted(seen, k))
    return len(counts) - 1 - place, k - (int(seen[place - 1]) if place else 0)


def elected_mean(
    vectors: Sequence[np.ndarray],
    majority: float = 1.0,
    weights: Sequence[float] | None = None,
    weigh: str = "after",
    divisor: str = "count",
) -> np.ndarray:
    """Steps 2 and 3: elect the sign of the sum, then take the mean over the vectors whose entry is not 0 and has it.

    majority: the sign (1 or -1) elected where the sum is 0. `weights` multiply entries `after` the election, or did
    `before`. divisor: `count` of the vectors that agree, or the sum of their `weights`.
    """
    total = sum(vectors[1:], vectors[0])
    sign = np.where(total == 0, np.float32(majority), np.sign(total))
    parts, count = [], np.zeros(total.shape, np.float32)
    for vector, number in zip(vectors, weights or [1.0] * len(vectors), strict=True):
        agrees = vector * sign > 0
        parts.append(vector * agrees * np.float32(number if weigh == "after" else 1))
        count += agrees * np.float32(number if divisor == "weights" else 1)
    return add_up(parts) / np.where(count == 0, np.float32(1), count)


def exactly_kept(magnitudes: np.ndarray, density: float) -> np.ndarray:
    """Which entries of a tensor stay where ties at the threshold do not all stay: (entries,) magnitudes -> bools.

    mergekit 0.1.5's rule (sparsify.magnitude): the first k = max(1, int(density * entries)) of torch.argsort, which
    puts equal magnitudes in an order that depends on the processor's instructions (AVX2, AVX-512) and torch's version.
    """
    if density >= 1 or not magnitudes.size:
        return np.ones(magnitudes.size, np.bool_)
    k = max(1, int(density * magnitudes.size))  # in floating point: of 0.29 x 100 it keeps 28
    mask = magnitudes >= np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    if np.count_nonzero(mask) > k:
        import torch

        mask[:] = False
        mask[torch.argsort(torch.from_numpy(magnitudes), descending=True)[:k].numpy()] = True
    return mask


class TiesMerge:
    """TIES of experts, by the knobs of methods/ties.py. `prepare` finds thresholds and the majority of the whole model.

    `kept`: tensor -> entries of each expert that are not 0 after the trim, counted while the tensor is computed.
    """

    def __init__(self, config: Any, sources: Sources, base: Source) -> None:
        self.config, self.base, self.experts = config, base, list(sources.values())
        self.weights = config.weights
        self.limits: list[float] | None = None
        self.majority = 1.0
        self.kept: dict[str, np.ndarray] = {}
        self.sorting = threading.Lock()  # one tensor at a time: sorting takes several times its memory

    def prepare(self, threads: int | None) -> None:
        names = by_size(self.base)
        if self.config.trim == "model":
            self.limits = self.find_limits(names, threads)
        if self.config.zero_sum == "majority":
            self.majority = 1.0 if sum(in_threads(self.sign_balance, names, threads)) >= 0 else -1.0

    def find_limits(self, names: Sequence[str], threads: int | None = 1) -> list[float]:
        """The magnitude from which on each expert's entries are kept, over one tensor or all of them."""
        size = sum(math.prod(self.base.info(name).shape) for name in names)
        if not size:
            return [0.0] * len(self.experts)
        return kth_largest(self.vectors_of, names, kept_count(self.config.density, size), threads)

    def vectors_of(self, name: str) -> Iterator[Vectors]:
        return (vectors for *_, vectors in vector_pieces(self.experts, self.base, name))

    def trimmed(self, name: str) -> Callable[[int, int], tuple[np.ndarray, Vectors, Vectors]]:
        """Step 1, of rows: the base's, each expert's trimmed vector, and where it keeps its entries.

        Entries at or above the threshold stay, ties at it included, unless exactly so many do.
        """
        masks = self.exact_masks(name) if self.config.ties_at_threshold == "exact" else []
        limits = np.array([] if masks else self.limits or self.find_limits([name]), np.float32)
        counts = self.kept[name] = np.zeros(len(self.experts), np.int64)

        def rows(start: int, stop: int) -> tuple[np.ndarray, Vectors, Vectors]:
            origin, vectors = task_vectors(self.experts, self.base, name, start, stop)
            kept = [mask[start:stop] for mask in masks]
            kept = kept or [np.abs(vector) >= limit for vector, limit in zip(vectors, limits, strict=True)]
            for index, (vector, mask) in enumerate(zip(vectors, kept, strict=True)):
                vector *= mask
                counts[index] += np.count_nonzero(vector != 0)  # of bools: seven times as fast as of floats
                if self.weights and self.config.weigh == "before":
                    vector *= np.float32(self.weights[index])
            return origin, vectors, kept

        return rows

    def exact_masks(self, name: str) -> Vectors:
        """For each expert which entries of a tensor stay where exactly so many do, as (rows, columns)."""
        with self.sorting:
            masks = []
            for expert in self.experts:
                parts = [np.abs(vector).reshape(-1) for *_, (vector,) in vector_pieces([expert], self.base, name)]
                magnitudes = np.concatenate([np.empty(0, np.float32), *parts])
                del parts
                masks.append(exactly_kept(magnitudes, self.config.density).reshape(matrix(self.base.info(name).shape)))
            return masks

    def sign_balance(self, name: str) -> int:
        """Entries of a tensor whose sum over the trimmed experts is above 0, less those below."""
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
        """Steps 2 and 3. Without weights a mean is elected only where several experts have an entry: elsewhere it is
        the sum, to the signs of zeros."""
        if self.weights:
            return elected_mean(vectors, self.majority, self.weights, self.config.weigh, self.config.divisor)
        places = np.flatnonzero(add_up([mask.astype(np.uint8) for mask in kept]) > 1)
        elected = elected_mean([vector.reshape(-1)[places] for vector in vectors], self.majority)
        total = add_up(vectors)
        total.reshape(-1)[places] = elected
        return total

    def kept_density(self, threads: int | None) -> dict[str, Any]:
        """The share of entries that are not 0 after the trim, in all and of each expert."""
        if self.config.trim == "model" and self.limits is None:
            self.prepare(threads)
        in_threads(self.sign_balance, [name for name in by_size(self.base) if name not in self.kept], threads)
        size = sum(math.prod(self.base.info(name).shape) for name in self.base.names)
        shares = sum(self.kept.values(), np.zeros(len(self.experts))) / max(1, size)
        return {"kept_density": float(shares.mean()), **{f"kept_density_{i}": float(s) for i, s in enumerate(shares)}}
