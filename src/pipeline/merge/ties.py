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


def kth_largest(magnitudes: Stream, k: int, sample: np.ndarray | None = None, size: int = 0) -> float:
    """The exact k-th largest of a stream of float32 magnitudes (0 or more).

    A sample, (rows, entries), of `size` entries in all, brackets it; one pass counts what is above the bracket and
    collects what is inside. Where the sample was not like the whole, or the answer stands on an edge of the bracket as
    entries tied with it do, more passes count: magnitudes sort like their bits, so 31 halvings always find it. Memory
    is that of the bracket.
    Raises PipelineError for NaN and infinite entries, and where there are fewer than k.
    """
    low, high = _bracket_kth_largest(k, sample, size) if sample is not None else (-1.0, math.inf)
    above, count, between = 0, 0, []
    for part in magnitudes():
        flat = part.reshape(-1)
        over = np.greater(flat, low, out=buffers("over", flat.shape, np.bool_))
        reach = np.greater_equal(flat, high, out=buffers("reach", flat.shape, np.bool_))
        count += flat.size
        over_low, over_high = int(np.count_nonzero(over)), int(np.count_nonzero(reach))
        above += over_high
        if over_low > over_high:
            between.append(flat[np.logical_xor(over, reach, out=over)])
        if flat.size and not np.isfinite(flat.max()):  # NaN is the largest
            raise PipelineError("a task vector holds NaN or infinite values: an expert or the base is broken")
    if k > count:
        raise PipelineError(f"asked for the {k}-th largest of {count} entries")
    bracketed = np.concatenate(between) if between else np.empty(0, np.float32)
    if above < k <= above + bracketed.size:
        place = bracketed.size - (k - above)
        return float(np.partition(bracketed, place)[place])
    del between, bracketed

    def count_at_least(value: float) -> int:
        return sum(int(np.count_nonzero(part >= np.float32(value))) for part in magnitudes())

    edge = high if k <= above else low
    if count_at_least(edge) >= k > count_at_least(np.nextafter(np.float32(edge), np.float32(np.inf))):
        return edge
    first, last = 0, 0x7F7FFFFF  # bits of 0 and of the largest finite number
    while first < last:
        middle = (first + last + 1) // 2
        if count_at_least(float(np.uint32(middle).view(np.float32))) >= k:
            first = middle
        else:
            last = middle - 1
    return float(np.uint32(first).view(np.float32))


def _bracket_kth_largest(k: int, sample: np.ndarray, size: int) -> tuple[float, float]:
    """Two magnitudes between which the k-th largest almost surely lies; (-1, infinity) holds all.

    How much the share of entries above it varies from row to row of the sample says how wide the bracket must be.
    """
    if not np.isfinite(sample).all():
        return -1.0, math.inf
    ordered, share = np.sort(sample.reshape(-1)), k / size
    middle = ordered[max(0, ordered.size - max(1, round(share * ordered.size)))]
    above = (sample >= middle).mean(axis=1)  # of each row
    wide = 6 * float(above.std()) / math.sqrt(len(above)) + 8 / ordered.size

    def value_at(part: float) -> float:
        return float(ordered[ordered.size - 1 - round(part * (ordered.size - 1))])

    low = -1.0 if share + wide >= 1 else value_at(share + wide)
    return low, math.inf if share <= wide else value_at(share - wide)


def trim_vector(vector: np.ndarray, threshold: float) -> np.ndarray:
    """Step 1, in place: entries of magnitude at or above the threshold stay, ties at it included; the rest become 0."""
    size, mask = buffers("size", vector.shape), buffers("kept", vector.shape, np.bool_)
    np.greater_equal(np.abs(vector, out=size), np.float32(threshold), out=mask)
    return np.multiply(vector, mask, out=vector)


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
        self.of_tensor = Once(lambda name: [self.find_threshold(expert, [name]) for expert in self.experts])
        self.kept: dict[str, np.ndarray] = {}
        self.exact = threading.local()  # the tensor that a thread computes, and its masks
        self.sorting = threading.Lock()  # one tensor at a time: sorting takes several times its memory

    def prepare(self, threads: int | None) -> None:
        if self.config.trim == "model":
            names = self.base.names
            self.limits = in_threads([partial(self.find_threshold, expert, names) for expert in self.experts], threads)
        if self.config.zero_sum == "majority":
            balances = in_threads([partial(self.tensor_balance, name) for name in by_size(self.base)], threads)
            self.majority = 1.0 if sum(balances) >= 0 else -1.0

    def trimmed_vectors(self, name: str, start: int, stop: int) -> list[np.ndarray]:
        masks = self.exact_masks(name) if self.config.ties_at_threshold == "exact" else None
        limits = [] if masks else self.limits or self.of_tensor(name)
        vectors = task_vectors(self.experts, self.base, name, start, stop)
        if start == 0:
            self.kept[name] = np.zeros(len(vectors), np.int64)
        for index, vector in enumerate(vectors):
            if masks:
                np.multiply(vector, masks[index][start:stop], out=vector)
            else:
                trim_vector(vector, limits[index])
            self.kept[name][index] += np.count_nonzero(vector)
            if self.weights and self.config.weigh == "before":
                np.multiply(vector, np.float32(self.weights[index]), out=vector)
        return vectors

    def tensor_balance(self, name: str) -> int:
        return sum(sign_balance(self.trimmed_vectors(name, *piece)) for piece in pieces(self.base.info(name).shape))

    def __call__(self, name: str, start: int, stop: int) -> np.ndarray:
        vectors = self.trimmed_vectors(name, start, stop)
        positive, multiplied = elect_signs(vectors, self.majority), self.config.weigh == "before"
        mean = disjoint_mean(vectors, positive, self.weights, self.config.divisor, multiplied)
        return onto_base(mean, self.config.scale)

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

    def find_threshold(self, expert: Source, names: Sequence[str]) -> float:
        """The magnitude from which on entries of a task vector are kept, over one tensor or all of them."""
        size = sum(math.prod(self.base.info(name).shape) for name in names)
        sample = self.sample_magnitudes(expert, names, size) if size > FEW else None
        try:
            return kth_largest(
                partial(self.stream_magnitudes, expert, names), kept_count(self.config.density, size), sample, size
            )
        except PipelineError:
            refuse_not_finite([self.base, expert], names)
            raise

    def sample_magnitudes(self, expert: Source, names: Sequence[str], size: int) -> np.ndarray:
        """Magnitudes of rows spread evenly over the tensors, each thinned to as many entries: (rows, entries)."""
        rows_in_all = 64 if len(names) == 1 else 4096
        shapes = {name: matrix(self.base.info(name).shape) for name in names}
        width = min(512, *(columns for _, columns in shapes.values()))
        samples = []
        for name, (rows, columns) in shapes.items():
            width_here = min(width, columns)
            count = max(1, round(rows_in_all * rows * columns / size))
            for row in np.unique(np.linspace(0, rows - 1, count).astype(int)):
                (vector,) = task_vectors([expert], self.base, name, int(row), int(row) + 1)
                places = np.linspace(0, columns - 1, width_here).astype(int)
                samples.append(np.abs(vector[0, places]))
        return np.stack(samples)
