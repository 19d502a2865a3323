"""TIES merging (Yadav et al., 2023): trim, elect sign, disjoint mean as pure functions on arrays, and over streams.

A task vector is expert - base, in float32. The definitions are the paper's where nothing is said: no weights per
expert, one scale at the end. Other programs weigh before the election, or divide by weights: those are arguments.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.merge.formulas import (
    Once,
    Sources,
    as_they_are,
    by_size,
    onto_base,
    refuse_not_finite,
    sum_vectors,
    task_vectors,
)
from pipeline.merge.weights import expert_weights
from pipeline.models.floats import buffers, in_threads, matrix, pieces

Stream = Callable[[], Iterable[np.ndarray]]  # starts the magnitudes of a task vector anew for each pass
FEW = 2**18  # entries of a tensor that is sorted as it is; of a larger one a sample is taken first
MANY = 0.15  # of the entries: where more are of several experts, gathering them costs more than computing all


class TiesDefinition(Protocol):
    """Which TIES: the knobs of methods/ties.py."""

    density: float
    ties_at_threshold: str
    scale: float
    trim: str
    weights: list[float] | None
    weigh: str
    divisor: str
    zero_sum: str


def kept_count(density: float, size: int) -> int:
    """k = floor(density x size), at least 1. The decimal as typed counts: 0.29 of 100 is 29, not 28."""
    if not 0 < density <= 1:
        raise PipelineError(f"merge.density must be in (0, 1], got {density}")
    return max(1, int(Fraction(str(density)) * size))


class Bracket:
    """What one pass over magnitudes (float32, 0 or more) finds out on the k-th largest, from low <= it <= high.

    Counts what is above and at the edges, where many entries may be tied, and collects what is inside: the memory.
    """

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high, self.between = low, high, list[np.ndarray]()
        self.counts = np.zeros(5, np.int64)  # of all entries, from low on, above low, from high on, above high

    def add(self, sizes: np.ndarray) -> None:
        """Take in a piece. Raises PipelineError for NaN and infinite entries."""
        flat = sizes.reshape(-1)
        if flat.size and not np.isfinite(flat.max()):  # NaN is the largest
            raise PipelineError("a task vector holds NaN or infinite values: an expert or the base is broken")
        over = np.greater(flat, self.low, out=buffers("over", flat.shape, np.bool_))
        reach = np.greater_equal(flat, self.high, out=buffers("reach", flat.shape, np.bool_))
        tied = buffers("tied", flat.shape, np.bool_)
        above_low, from_high = int(np.count_nonzero(over)), int(np.count_nonzero(reach))
        from_low = above_low + int(np.count_nonzero(np.equal(flat, self.low, out=tied)))
        above_high = from_high - int(np.count_nonzero(np.equal(flat, self.high, out=tied)))
        self.counts += (flat.size, from_low, above_low, from_high, above_high)
        if above_low > from_high:
            self.between.append(flat.compress(np.logical_xor(over, reach, out=over)))

    def join(self, other: Bracket) -> None:
        """Take in what another of the same edges has found."""
        self.counts += other.counts
        self.between += other.between

    def kth_largest(self, k: int) -> float | None:
        """Exact, or None where it is not from low to high. Raises PipelineError where there are fewer than k."""
        size, from_low, above_low, from_high, above_high = map(int, self.counts)
        if k > size:
            raise PipelineError(f"asked for the {k}-th largest of {size} entries")
        if not above_high < k <= from_low:
            return None
        if k <= from_high or k > above_low:
            return self.high if k <= from_high else self.low
        inside = np.concatenate(self.between)
        inside.sort()  # NumPy's partition is three times as slow where many entries are tied
        return float(inside[from_high - k])


def kth_largest(magnitudes: Stream, k: int, sample: np.ndarray | None = None, size: int = 0) -> float:
    """The exact k-th largest of a stream of float32 magnitudes (0 or more).

    A sample, (rows, entries), of `size` entries in all, brackets it, and one pass finds it. Where the sample was not
    like the whole, `search_bits` does. Memory is that of the bracket.
    Raises PipelineError for NaN and infinite entries, and where there are fewer than k.
    """
    bracket = bracket_kth_largest(k, sample, size)
    for part in magnitudes():
        bracket.add(part)
    found = bracket.kth_largest(k)
    return search_bits(magnitudes, k) if found is None else found


def search_bits(magnitudes: Stream, k: int) -> float:
    """The k-th largest of finite magnitudes by 31 passes and no memory: they sort like their bits, which are halved."""
    first, last = 0, 0x7F7FFFFF  # bits of 0 and of the largest finite number
    while first < last:
        middle = (first + last + 1) // 2
        value = np.uint32(middle).view(np.float32)
        if sum(int(np.count_nonzero(part >= value)) for part in magnitudes()) >= k:
            first = middle
        else:
            last = middle - 1
    return float(np.uint32(first).view(np.float32))


def bracket_kth_largest(k: int, sample: np.ndarray | None, size: int) -> Bracket:
    """Two magnitudes between which the k-th largest almost surely lies; without a sample all do.

    How much the share of entries above it varies from row to row of the sample says how wide the bracket must be.
    """
    if sample is None or not np.isfinite(sample).all():
        return Bracket(-1.0, math.inf)
    ordered, share = sample.flatten(), k / size
    place = max(0, ordered.size - max(1, round(share * ordered.size)))
    ordered.partition(place)
    above = (sample >= ordered[place]).mean(axis=1)  # of each row
    spread = max(float(above.std()), math.sqrt(share * (1 - share) / sample.shape[1]))  # 0 if all are tied: binomial
    wide = 6 * spread / math.sqrt(len(above)) + 8 / ordered.size
    low, high = (ordered.size - 1 - round(part * (ordered.size - 1)) for part in (share + wide, share - wide))
    ordered.partition([place for place in (low, high) if 0 <= place < ordered.size])
    return Bracket(
        float(ordered[low]) if share + wide < 1 else -1.0, float(ordered[high]) if share > wide else math.inf
    )


def trim_vector(vector: np.ndarray, threshold: float, kept: np.ndarray | None = None) -> np.ndarray:
    """Step 1, in place: entries of magnitude at or above the threshold stay, ties at it included; the rest become 0.

    `kept`, bools of the vector's shape, then says which.
    """
    size, mask = buffers("size", vector.shape), buffers("kept", vector.shape, np.bool_) if kept is None else kept
    np.greater_equal(np.abs(vector, out=size), np.float32(threshold), out=mask)
    return np.multiply(vector, mask, out=vector)


def overlap(kept: Sequence[np.ndarray]) -> np.ndarray:
    """Places in the flattened array where more than one of the (trimmed) experts has an entry, given who keeps what."""
    shape = kept[0].shape
    twice = np.logical_and(kept[0], kept[-1], out=buffers("twice", shape, np.bool_))
    once = np.logical_or(kept[0], kept[-1], out=buffers("once", shape, np.bool_)) if len(kept) > 2 else twice
    for mask in kept[1:-1]:
        np.logical_or(twice, np.logical_and(once, mask, out=buffers("both", shape, np.bool_)), out=twice)
        np.logical_or(once, mask, out=once)
    return np.flatnonzero(twice)


def sign_balance(vectors: Sequence[np.ndarray]) -> int:
    """Entries whose sum over the (trimmed) experts is above 0, less those below: the model's elects the majority."""
    sums = sum_vectors(vectors)
    return int(np.count_nonzero(sums > 0)) - int(np.count_nonzero(sums < 0))


def elect_signs(vectors: Sequence[np.ndarray], majority: float) -> np.ndarray:
    """Step 2: whether the sign of the sum over experts is +; where it is 0, the model's majority sign (1 or -1)."""
    sums, positive = sum_vectors(vectors), buffers("positive", vectors[0].shape, np.bool_)
    return (np.greater_equal if majority > 0 else np.greater)(sums, 0, out=positive)


def disjoint_mean(
    vectors: Sequence[np.ndarray],
    positive: np.ndarray,
    weights: Sequence[float] | None = None,
    divisor: str = "count",
    multiplied: bool = False,
) -> np.ndarray:
    """Step 3: the mean over the experts whose entry is not 0 and has the elected sign; overwrites `vectors`.

    `weights`: numbers to multiply the entries with before they are added up, unless they are `multiplied` already.
    divisor: `count` of the experts that agree, or the sum of their `weights` (of 1 each where None).
    """
    shape = vectors[0].shape
    numbers = weights or [1.0] * len(vectors)
    agrees, minus = buffers("agrees", shape, np.bool_), buffers("minus", shape, np.bool_)
    count, share = buffers("count", shape), buffers("share", shape)
    members, negative = buffers("members", shape, np.uint8), buffers("negative", shape, np.bool_)
    np.logical_not(positive, out=negative)
    members[:] = 0
    count[:] = 0
    for vector, number in zip(vectors, numbers, strict=True):
        np.logical_and(np.greater(vector, 0, out=agrees), positive, out=agrees)
        np.logical_and(np.less(vector, 0, out=minus), negative, out=minus)
        np.logical_or(agrees, minus, out=agrees)
        np.multiply(vector, agrees, out=vector)
        if number != 1 and not multiplied:
            np.multiply(vector, np.float32(number), out=vector)
        if divisor == "count":
            np.add(members, agrees.view(np.uint8), out=members)
        else:
            np.add(count, np.multiply(agrees, np.float32(number), out=share), out=count)
    if divisor == "count":
        np.copyto(count, np.maximum(members, 1, out=members))
    else:
        np.equal(count, 0, out=agrees)
        np.add(count, agrees, out=count)
    mean = sum_vectors(vectors)
    return np.divide(mean, count, out=mean)


def exactly_kept(magnitudes: np.ndarray, density: float) -> np.ndarray:
    """Which entries of a tensor stay where ties at the threshold do not all stay: (entries,) magnitudes -> bools.

    mergekit 0.1.5's rule (sparsify.magnitude): the first k = max(1, int(density * entries)) of torch.argsort, which
    puts equal magnitudes in an order that depends on the processor's instructions (AVX2, AVX-512) and torch's version.
    """
    if density >= 1:
        return np.ones(magnitudes.size, np.bool_)
    k = max(1, int(density * magnitudes.size))  # in floating point: of 0.29 x 100 it keeps 28
    mask = magnitudes >= np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    if np.count_nonzero(mask) > k:
        import torch

        mask[:] = False
        mask[torch.argsort(torch.from_numpy(magnitudes), descending=True)[:k].numpy()] = True
    return mask


_densities: dict[Any, dict[str, float]] = {}


class TiesFormula:
    """TIES over streams. Thresholds of the whole model, and its majority sign, are found by `prepare`.

    `kept`: tensor -> entries of each expert that are not 0 after the trim, counted while the tensor is computed.
    """

    def __init__(self, config: TiesDefinition, sources: Sources, base: Source) -> None:
        self.config, self.base, self.experts = config, base, list(sources.values())
        self.weights = None if config.weights is None else expert_weights(config.weights, len(sources))
        self.limits: list[float] | None = None
        self.majority = 1.0
        self.of_tensor = Once(lambda name: self.find_thresholds([name], 1))
        self.kept: dict[str, np.ndarray] = {}
        self.exact = threading.local()  # the tensor that a thread computes, and its masks
        self.sorting = threading.Lock()  # one tensor at a time: sorting takes several times its memory

    def prepare(self, threads: int | None) -> None:
        if self.config.trim == "model":
            self.limits = self.find_thresholds(by_size(self.base), threads)
        if self.config.zero_sum == "majority":
            balances = in_threads([partial(self.tensor_balance, name) for name in by_size(self.base)], threads)
            self.majority = 1.0 if sum(balances) >= 0 else -1.0

    def trimmed_vectors(self, name: str, start: int, stop: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The trimmed rows of each expert, and where it keeps its entries."""
        masks = self.exact_masks(name) if self.config.ties_at_threshold == "exact" else None
        limits = [] if masks else self.limits or self.of_tensor(name)
        vectors, kept = task_vectors(self.experts, self.base, name, start, stop), []
        if start == 0:
            self.kept[name] = np.zeros(len(vectors), np.int64)
        for index, vector in enumerate(vectors):
            if masks:
                kept.append(masks[index][start:stop])
                np.multiply(vector, kept[-1], out=vector)
            else:
                kept.append(buffers(f"kept {index}", vector.shape, np.bool_))
                trim_vector(vector, limits[index], kept[-1])
            zeros_stay = masks or not limits[index] > 0
            self.kept[name][index] += np.count_nonzero(vector if zeros_stay else kept[-1])
            if self.weights and self.config.weigh == "before":
                np.multiply(vector, np.float32(self.weights[index]), out=vector)
        return vectors, kept

    def tensor_balance(self, name: str) -> int:
        return sum(sign_balance(self.trimmed_vectors(name, *piece)[0]) for piece in pieces(self.base.info(name).shape))

    def __call__(self, name: str, start: int, stop: int) -> np.ndarray:
        vectors, kept = self.trimmed_vectors(name, start, stop)
        return onto_base(self.mean_of_overlap(vectors, kept), self.config.scale)

    def elected_mean(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Steps 2 and 3 everywhere: the reference for `mean_of_overlap`."""
        positive, multiplied = elect_signs(vectors, self.majority), self.config.weigh == "before"
        return disjoint_mean(vectors, positive, self.weights, self.config.divisor, multiplied)

    def mean_of_overlap(self, vectors: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> np.ndarray:
        """Steps 2 and 3 where several experts have an entry; elsewhere the sum is the mean, to the signs of zeros."""
        places = overlap(kept)
        if self.weights or places.size > MANY * kept[0].size:
            return self.elected_mean(vectors)
        places = np.resize(places, -(-places.size // 1024) * 1024)  # repeated: few shapes, few buffers
        agreed = self.elected_mean([vector.reshape(-1).take(places) for vector in vectors]).copy()
        mean = sum_vectors(vectors)
        mean.reshape(-1)[places] = agreed
        return mean

    def kept_density(self, threads: int | None) -> dict[str, float]:
        """The share of entries that are not 0 after the trim, in all and of each expert. Measured once a process."""
        trimmed = self.config.density, self.config.trim, self.config.ties_at_threshold
        key = (*trimmed, *as_they_are(*self.experts, self.base))
        if key not in _densities:
            if self.config.trim == "model" and self.limits is None:
                self.prepare(threads)
            uncounted = [name for name in by_size(self.base) if name not in self.kept]
            in_threads([partial(self.tensor_balance, name) for name in uncounted], threads)
            size = sum(math.prod(self.base.info(name).shape) for name in self.base.names)
            shares = sum(self.kept.values(), np.zeros(len(self.experts))) / max(1, size)
            by_expert = {f"kept_density_{index}": float(share) for index, share in enumerate(shares)}
            _densities[key] = {"kept_density": float(shares.mean()), **by_expert}
        return _densities[key]

    def stream_magnitudes(self, expert: Source, names: Sequence[str]) -> Iterator[np.ndarray]:
        """A task vector's magnitudes, a piece of a tensor at a time; a piece lasts until the next."""
        for name in names:
            for start, stop in pieces(self.base.info(name).shape):
                (vector,) = task_vectors([expert], self.base, name, start, stop)
                yield np.abs(vector, out=vector)

    def exact_masks(self, name: str) -> list[np.ndarray]:
        """For each expert which entries of a tensor stay where exactly so many do, as (rows, columns)."""
        if getattr(self.exact, "name", None) != name:
            self.exact.masks = None  # before the next take their room
            with self.sorting:
                self.exact.masks = [self.exact_mask(expert, name) for expert in self.experts]
            self.exact.name = name
        masks: list[np.ndarray] = self.exact.masks
        return masks

    def exact_mask(self, expert: Source, name: str) -> np.ndarray:
        shape, place = matrix(self.base.info(name).shape), 0
        entries = np.empty(math.prod(shape), np.float32)
        for piece in self.stream_magnitudes(expert, [name]):
            entries[place : place + piece.size] = piece.reshape(-1)
            place += piece.size
        if not np.isfinite(entries).all():
            refuse_not_finite([self.base, expert], [name])
        return (exactly_kept(entries, self.config.density) if entries.size else entries.astype(np.bool_)).reshape(shape)

    def find_thresholds(self, names: Sequence[str], threads: int | None) -> list[float]:
        """For each expert the magnitude from which on its entries are kept, over one tensor or all of them."""
        size = sum(math.prod(self.base.info(name).shape) for name in names)
        k = kept_count(self.config.density, size)
        samples = self.sample_magnitudes(names, size, threads) if size > FEW else [None] * len(self.experts)
        brackets = [bracket_kth_largest(k, sample, size) for sample in samples]
        del samples
        try:
            for parts in in_threads([partial(self.fill_brackets, brackets, name) for name in names], threads):
                for whole, part in zip(brackets, parts, strict=True):
                    whole.join(part)
            found = [bracket.kth_largest(k) for bracket in brackets]
        except PipelineError:
            refuse_not_finite([self.base, *self.experts], names)
            raise
        return [
            search_bits(partial(self.stream_magnitudes, expert, names), k) if limit is None else limit
            for limit, expert in zip(found, self.experts, strict=True)
        ]

    def fill_brackets(self, edges: Sequence[Bracket], name: str) -> list[Bracket]:
        """Brackets of the same edges with the magnitudes of one tensor, one for each expert."""
        brackets = [Bracket(each.low, each.high) for each in edges]
        for piece in pieces(self.base.info(name).shape):
            for bracket, vector in zip(brackets, task_vectors(self.experts, self.base, name, *piece), strict=True):
                bracket.add(np.abs(vector, out=vector))
        return brackets

    def sample_magnitudes(self, names: Sequence[str], size: int, threads: int | None) -> list[np.ndarray]:
        """Of each expert magnitudes of rows spread evenly over the tensors, each thinned alike: (rows, entries)."""
        rows_in_all, widest = (max(64, min(4096, size >> 17)), 1024) if len(names) == 1 else (4096, 512)
        shapes = {name: matrix(self.base.info(name).shape) for name in names}
        width = min(widest, *(columns for _, columns in shapes.values()))

        def sample_tensor(name: str) -> np.ndarray:
            rows, columns = shapes[name]
            count = max(1, round(rows_in_all * rows * columns / size))
            places = np.linspace(0, columns - 1, width).astype(int)
            chosen = np.unique(np.linspace(0, rows - 1, count).astype(int)).tolist()
            found = np.empty((len(self.experts), len(chosen), width), np.float32)
            for index, row in enumerate(chosen):
                for expert, vector in enumerate(task_vectors(self.experts, self.base, name, row, row + 1)):
                    found[expert, index] = vector[0].take(places)
            return np.abs(found, out=found)

        return list(np.concatenate(in_threads([partial(sample_tensor, name) for name in names], threads), axis=1))
