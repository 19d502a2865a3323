"""TIES merging (Yadav et al., 2023) as pure functions on tensors: trim, elect sign, disjoint mean.

Shapes: a task vector is expert - base, in float32, of any shape `S`; E experts are stacked to (E, *S).
The definitions are the paper's: no weights per expert, one scale at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch

from pipeline.knobs import PipelineError

_INFINITY_BITS = 0x7F80  # the high half of float32 infinity; anything at or above it is not a finite number
_CHUNK = 2**24  # entries looked at together: bounds the memory of a pass, not its result


def kept_count(density: float, size: int) -> int:
    """k = floor(density x size), at least 1. The decimal as typed counts: 0.29 of 100 is 29, not 28."""
    if not 0 < density <= 1:
        raise PipelineError(f"merge.density must be in (0, 1], got {density}")
    return max(1, int(Fraction(str(density)) * size))


def kth_largest(vectors: Callable[[], Iterable[torch.Tensor]], k: int) -> float:
    """The exact k-th largest magnitude over all entries of a stream of float32 tensors.

    Magnitudes of float32 sort like their bit patterns, so two passes of counting find it: the high 16 bits
    of the answer, then the low 16 bits among the entries that share them. Memory is two tables of 65,536
    counts, whatever the size of the model. `vectors` starts the stream anew for each pass.
    Raises PipelineError for NaN and infinite entries, and where there are fewer than k.
    """
    high, above = _select(vectors, k, _finite_high_bits)
    low, _ = _select(vectors, k - above, lambda bits: bits[(bits >> 16) == high] & 0xFFFF)
    return float(struct.unpack("<f", struct.pack("<I", high << 16 | low))[0])


def _finite_high_bits(bits: torch.Tensor) -> torch.Tensor:
    high = bits >> 16
    if high.numel() and int(high.max()) >= _INFINITY_BITS:
        raise PipelineError("a task vector holds NaN or infinite values: an expert or the base is broken")
    return high


def _select(
    vectors: Callable[[], Iterable[torch.Tensor]], k: int, key: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, int]:
    """(the key of the k-th largest entry, how many entries have a larger key), for keys below 65,536."""
    counts = torch.zeros(2**16, dtype=torch.int64)
    for vector in vectors():
        for chunk in vector.reshape(-1).split(_CHUNK):
            counts += torch.bincount(key(chunk.float().abs().view(torch.int32)), minlength=2**16)
    at_least = counts.flip(0).cumsum(0).flip(0)  # at_least[v]: entries with key v or more
    if k > int(at_least[0]):
        raise PipelineError(f"asked for the {k}-th largest of {int(at_least[0])} entries")
    selected = int((at_least >= k).nonzero().max())
    return selected, int(at_least[selected] - counts[selected])


def trim(vector: torch.Tensor, threshold: float) -> torch.Tensor:
    """Step 1: entries of magnitude at or above the threshold stay, ties at it included; the rest become 0."""
    return torch.where(vector.abs() >= threshold, vector, 0.0)


def majority_sign(trimmed: Iterable[torch.Tensor]) -> float:
    """The sign, 1 or -1, that most entries of the whole model elect, from (E, *S) for each parameter.

    It decides where an entry's sum over the experts is exactly 0. An even split is taken as 1.
    """
    balance = sum(int(vectors.sum(0).sign().sum(dtype=torch.float64)) for vectors in trimmed)
    return 1.0 if balance >= 0 else -1.0


def elect_sign(trimmed: torch.Tensor, majority: float) -> torch.Tensor:
    """Step 2: the sign of the sum over experts, (E, *S) to (*S); where it is 0, the model's majority sign."""
    sign = trimmed.sum(0).sign()
    return torch.where(sign == 0, majority, sign)


def disjoint_mean(trimmed: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Step 3: the mean over the experts whose entry is not 0 and agrees with the sign; (E, *S) to (*S)."""
    agrees = trimmed * sign > 0
    return torch.where(agrees, trimmed, 0.0).sum(0) / agrees.sum(0).clamp(min=1)
