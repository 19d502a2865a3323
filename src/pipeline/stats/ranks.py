"""Tests on ranks, for tables whose blocks are models and languages. Pure functions on arrays.

SciPy does the work and is imported where it is needed; implemented here are the permutations within
clusters, since blocks of one model share its math expert, and the pooling of correlations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

PERMUTATIONS = 10_000
EXACT_CLUSTERS = 16  # 65,536 sign flips


@dataclass(frozen=True)
class Friedman:
    """statistic: chi-squared with treatments - 1 degrees of freedom, p: its tail; permuted: p by
    permutation of the treatments' labels within clusters of blocks, the valid one if blocks are not
    independent.
    """

    statistic: float
    p: float
    permuted: float


def friedman(
    scores: ArrayLike, clusters: Sequence[Hashable] | None = None, seed: int = 0
) -> Friedman:
    """Return Friedman's test of scores (blocks, treatments).

    clusters: the cluster of each block (its model); None: every block is its own cluster. Without
    an effect of the treatments, the labels of a cluster are exchangeable, jointly in all of its
    blocks: p is the share of permutations with at least the observed statistic. Treatments whose
    trainings vary unequally are not quite exchangeable: docs/explanation/statistics.md has rates.
    Raises ValueError below three treatments or two blocks.
    """
    import numpy as np
    from scipy.stats import chi2, rankdata

    array = np.asarray(scores, dtype=float)
    blocks, treatments = array.shape
    if treatments < 3 or blocks < 2:
        raise ValueError(
            f"Friedman's test needs three treatments and two blocks, not {treatments} and {blocks}"
        )
    ranks = rankdata(-array, axis=1)  # (blocks, treatments)
    ties = np.sum(ranks**2) - blocks * treatments * (treatments + 1) ** 2 / 4

    def chi_squared(sums: np.ndarray) -> np.ndarray:
        """(...,) statistics of sums of ranks (..., treatments), corrected for ties; 0 if all are
        tied.
        """
        centred = np.sum((sums - blocks * (treatments + 1) / 2) ** 2, axis=-1)
        if ties > 0:
            return (treatments - 1) * centred / ties
        return np.zeros_like(centred)

    statistic = float(chi_squared(ranks.sum(axis=0)))
    names = list(range(blocks)) if clusters is None else list(clusters)
    members = [
        [at for at, cluster in enumerate(names) if cluster == name] for name in dict.fromkeys(names)
    ]
    rng = np.random.default_rng(seed)
    sums = np.zeros((PERMUTATIONS, treatments))
    for rows in members:
        order = np.argsort(rng.random((PERMUTATIONS, treatments)), axis=1)
        sums += ranks[rows].sum(axis=0)[order]
    drawn = chi_squared(sums)
    permuted = float((1 + np.sum(drawn >= statistic - 1e-9)) / (1 + PERMUTATIONS))
    return Friedman(statistic, float(chi2.sf(statistic, treatments - 1)), permuted)


def wilcoxon(
    differences: ArrayLike, clusters: Sequence[Hashable] | None = None, seed: int = 0
) -> float:
    """Return the two-sided p of the Wilcoxon signed-rank test of one difference per block.

    Zeros are omitted.

    clusters: blocks whose signs flip together, such as those of one model; with c clusters the
    smallest p is 2 / 2^c. All sign flips are enumerated up to EXACT_CLUSTERS. For more clusters,
    PERMUTATIONS of the flips are drawn.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(differences, dtype=float)
    nonzero = array != 0
    if not nonzero.any():
        return 1.0
    sums: dict[Hashable, float] = {}  # of the signed ranks of each cluster
    signed = np.zeros(len(array))
    signed[nonzero] = stats.rankdata(np.abs(array[nonzero])) * np.sign(array[nonzero])
    for name, rank in zip(range(len(array)) if clusters is None else clusters, signed, strict=True):
        if rank:
            sums[name] = sums.get(name, 0.0) + rank
    if len(sums) <= EXACT_CLUSTERS:
        flips = 2 ** len(sums)
    else:
        flips = PERMUTATIONS
    flipped = stats.permutation_test(
        ([*sums.values()],),
        np.sum,
        permutation_type="samples",
        n_resamples=flips,
        random_state=seed,
    )
    return float(flipped.pvalue)


@dataclass(frozen=True)
class Alike:
    """n trainings of two kinds; within, between: mean correlation of the profiles of two trainings
    of the same kind, and of different kinds; p, opposed: by permutation of the kinds, that profiles
    within a kind are more, or less, alike; least_p: the smallest possible p, nan without a profile.
    """

    n: int
    within: float
    between: float
    p: float
    opposed: float
    labellings: int
    least_p: float


def profile_likeness(left: ArrayLike, right: ArrayLike) -> Alike:
    """Test whether trainings of the same kind are more alike than those of different kinds.

    left, right: profiles (trainings, numbers) of each kind. Enumerates all relabellings with the
    same counts; exact if trainings are exchangeable without a difference between the kinds.
    """
    import numpy as np

    first, second = np.asarray(left, dtype=float), np.asarray(right, dtype=float)
    n, count = len(first) + len(second), len(first)
    with np.errstate(divide="ignore", invalid="ignore"):  # a constant profile
        r = np.corrcoef(np.concatenate([first, second]))
    pairs = np.triu_indices(n, 1)
    splits = []
    for members in itertools.combinations(range(n), count):  # the first is the observed labelling
        kind = np.isin(np.arange(n), members)
        same = (kind[:, None] == kind)[pairs]
        splits.append((r[pairs][same].mean(), r[pairs][~same].mean()))
    differences = np.array([within - between for within, between in splits])
    if np.isfinite(differences).all():
        least = (1 + (2 * count == n)) / len(splits)
    else:
        least = math.nan
    higher, lower = (
        float(np.mean(sign * (differences - differences[0]) >= -1e-12)) for sign in (1, -1)
    )
    return Alike(n, float(splits[0][0]), float(splits[0][1]), higher, lower, len(splits), least)


def holm(p_values: Sequence[float], weights: Sequence[int] | None = None) -> list[float]:
    """Return the adjusted p of each hypothesis of a family (Holm 1979): smallest times n, next
    times n - 1, ..., monotone.

    Args: weights: of the hypotheses (Holm 1979, section 4): p is divided by the share of the
    weights that remain.
    """
    weights = weights or [1] * len(p_values)
    adjusted, running, remaining = [0.0] * len(p_values), 0.0, sum(weights)
    for index in sorted(range(len(p_values)), key=lambda index: p_values[index] / weights[index]):
        running = max(running, min(1.0, remaining * p_values[index] / weights[index]))
        adjusted[index], remaining = running, remaining - weights[index]
    return adjusted


# --- correlations ---


def _pooled_z(
    first: np.ndarray, second: np.ndarray, groups: Sequence[Hashable], counts: np.ndarray
) -> np.ndarray:
    """(draws,) Spearman's correlations within groups, pooled by Fisher's z with weights n - 3, of n
    pairs of which a draw has `counts` (draws, n) copies each.

    Groups with fewer than four pairs or constant values have no correlation and are skipped; nan if
    all are.
    """
    import numpy as np

    total = weights = np.zeros(len(counts))
    for group in dict.fromkeys(groups):
        indices = []
        for index, name in enumerate(groups):
            if name == group:
                indices.append(index)
        copies = counts[:, indices]
        n = copies.sum(axis=1)
        x, y = (
            _ranks(values[indices], copies) for values in (first, second)
        )  # (draws, pairs of the group)
        x, y = (
            ranks - (copies * ranks).sum(axis=1, keepdims=True) / n[:, None] for ranks in (x, y)
        )
        scale = np.sqrt((copies * x * x).sum(axis=1) * (copies * y * y).sum(axis=1))
        usable = (n > 3) & (scale > 0)
        rho = np.clip(
            (copies * x * y).sum(axis=1) / np.where(usable, scale, 1), -1 + 1e-6, 1 - 1e-6
        )
        weight = np.where(usable, n - 3, 0)
        total, weights = total + weight * np.arctanh(rho), weights + weight
    return np.where(weights > 0, total / np.where(weights > 0, weights, 1), np.nan)


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(draws, n) ranks, up to a constant, of n values with `counts` copies in each draw; ties share
    a rank.
    """
    return counts @ ((values[:, None] < values) + (values[:, None] == values) / 2)


@dataclass(frozen=True)
class Correlations:
    """left, right: pooled correlations with the outcome; difference, low, high: left minus right in
    Fisher's z, and its percentile interval over experts; p: two-sided, by the draws.
    """

    left: float
    right: float
    difference: float
    low: float
    high: float
    p: float


def compare_correlations(
    left: ArrayLike,
    right: ArrayLike,
    outcome: ArrayLike,
    groups: Sequence[Hashable],
    experts: Sequence[Hashable],
    draws: int = 2_000,
    seed: int = 0,
) -> Correlations:
    """Test whether one score of an expert correlates more with the outcome of its merge than
    another score does.

    left, right, outcome: (n,) numbers; groups: model and language of each, within which they are
    ranked; experts: the expert of each. Experts are resampled within groups, each with all of its
    merges, as these are not independent.
    """
    import numpy as np

    x, y, target = (np.asarray(values, dtype=float) for values in (left, right, outcome))
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for index, (group, expert) in enumerate(zip(groups, experts, strict=True)):
        members.setdefault(group, {}).setdefault(expert, []).append(index)
    rng = np.random.default_rng(seed)
    counts = np.zeros((draws, len(target)))
    for of in members.values():
        picked = rng.multinomial(len(of), [1 / len(of)] * len(of), size=draws)  # (draws, experts)
        for times, places in zip(picked.T, of.values(), strict=True):
            counts[:, places] = times[:, None]
    single_copies = np.ones((1, len(target)))
    first, second = (
        float(_pooled_z(values, target, groups, single_copies)[0]) for values in (x, y)
    )
    observed = _pooled_z(x, target, groups, counts) - _pooled_z(y, target, groups, counts)
    observed = observed[np.isfinite(observed)]
    if len(observed):
        low, high = np.quantile(observed, [0.025, 0.975])
    else:
        low, high = (math.nan, math.nan)
    tail = 1 + min(int((observed <= 0).sum()), int((observed >= 0).sum()))
    p = min(1.0, 2 * tail / (len(observed) + 1))
    return Correlations(
        math.tanh(first), math.tanh(second), first - second, float(low), float(high), p
    )
