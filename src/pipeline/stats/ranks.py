"""Tests on ranks, for tables with models and languages as blocks: pure functions on arrays.

SciPy does the work. Implemented here are permutations within clusters, because blocks of one model
share its math expert, and the pooling of correlations.
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
SEED = 0
EXACT_CLUSTERS = 16  # 65,536 sign flips


@dataclass(frozen=True)
class Friedman:
    """The result of Friedman's test.

    Attributes:
        statistic: Chi-squared with treatments - 1 degrees of freedom.
        p: The tail of the statistic.
        permuted: p by permutation of the treatments' labels within clusters of blocks. It is valid
            even if blocks are not independent.
    """

    statistic: float
    p: float
    permuted: float


def friedman(scores: ArrayLike, clusters: Sequence[Hashable] | None = None) -> Friedman:
    """Return Friedman's test of scores (blocks, treatments).

    Without an effect of the treatments, the labels of a cluster are exchangeable, jointly in all of
    its blocks. p is the share of permutations with at least the observed statistic. Treatments
    whose trainings vary unequally are not quite exchangeable: docs/explanation/statistics.md has
    rates.

    Args:
        scores: (blocks, treatments).
        clusters: The cluster of each block (its model). None: every block is a cluster.

    Raises:
        ValueError: For fewer than three treatments or two blocks.
    """
    import numpy as np
    from scipy.stats import friedmanchisquare, rankdata

    array = np.asarray(scores, dtype=float)
    blocks, treatments = array.shape
    if treatments < 3 or blocks < 2:
        raise ValueError(
            f"Friedman's test needs three treatments and two blocks, not {treatments} and {blocks}."
        )
    ranks = rankdata(array, axis=1)  # (blocks, treatments)
    if not np.ptp(ranks):
        return Friedman(0.0, 1.0, 1.0)
    statistic, p = friedmanchisquare(*array.T)
    rows_of_cluster: dict[Hashable, list[int]] = {}
    for row, cluster in enumerate(range(blocks) if clusters is None else clusters):
        rows_of_cluster.setdefault(cluster, []).append(row)
    rng = np.random.default_rng(SEED)
    middle = blocks * (treatments + 1) / 2  # the sum of a treatment's ranks without an effect
    observed = np.sum((ranks.sum(axis=0) - middle) ** 2)  # it orders permutations as chi-squared
    sums = np.zeros((PERMUTATIONS, treatments))
    for rows in rows_of_cluster.values():
        order = np.argsort(rng.random((PERMUTATIONS, treatments)), axis=1)
        sums += ranks[rows].sum(axis=0)[order]
    reached = np.sum(np.sum((sums - middle) ** 2, axis=1) >= observed - 1e-9)
    permuted = float((1 + reached) / (1 + PERMUTATIONS))
    return Friedman(float(statistic), float(p), permuted)


def wilcoxon(differences: ArrayLike, clusters: Sequence[Hashable] | None = None) -> float:
    """Return the two-sided p of the Wilcoxon signed-rank test of one difference per block.

    Zeros are omitted. All sign flips of up to EXACT_CLUSTERS clusters are enumerated. For more
    clusters, PERMUTATIONS of the flips are drawn.

    Args:
        differences: One difference per block.
        clusters: Blocks of one cluster, such as a model, flip their signs together. With c clusters
            the smallest p is 2 / 2^c. None: every block is a cluster.
    """
    import numpy as np
    from scipy import stats

    array = np.asarray(differences, dtype=float)
    nonzero = array != 0
    if not nonzero.any():
        return 1.0
    sums: dict[Hashable, float] = {}  # cluster -> sum of its signed ranks
    signed = np.zeros(len(array))
    signed[nonzero] = stats.rankdata(np.abs(array[nonzero])) * np.sign(array[nonzero])
    if clusters is None:
        clusters = range(len(array))
    for name, rank in zip(clusters, signed, strict=True):
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
        random_state=SEED,
    )
    return float(flipped.pvalue)


@dataclass(frozen=True)
class Alike:
    """The likeness of trainings of the same kind, compared with trainings of different kinds.

    Attributes:
        n: The number of trainings of both kinds.
        within: The mean correlation of the profiles of two trainings of the same kind.
        between: The same for different kinds.
        p: By permutation of the kinds: profiles within a kind are more alike.
        opposed: By permutation of the kinds: profiles within a kind are less alike.
        labellings: The number of permutations.
        least_p: The smallest possible p; nan if a profile is constant.
    """

    n: int
    within: float
    between: float
    p: float
    opposed: float
    labellings: int
    least_p: float


def profile_likeness(left: ArrayLike, right: ArrayLike) -> Alike:
    """Test whether trainings of the same kind are more alike than trainings of different kinds.

    All relabellings with the same counts are enumerated. The test is exact if trainings are
    exchangeable without a difference between the kinds.

    Args:
        left: Profiles (trainings, numbers) of one kind.
        right: Profiles of the other kind.
    """
    import numpy as np

    first = np.asarray(left, dtype=float)
    second = np.asarray(right, dtype=float)
    count = len(first)
    n = count + len(second)
    with np.errstate(divide="ignore", invalid="ignore"):  # a constant profile
        correlations = np.corrcoef(np.concatenate([first, second]))
    pairs = np.triu_indices(n, 1)
    of_pairs = correlations[pairs]
    splits = []
    for members in itertools.combinations(range(n), count):  # the first is the observed labelling
        kind = np.isin(np.arange(n), members)
        same = (kind[:, None] == kind)[pairs]
        splits.append((of_pairs[same].mean(), of_pairs[~same].mean()))
    differences = np.array([within - between for within, between in splits])
    excess = differences - differences[0]
    least = math.nan
    if np.isfinite(differences).all():
        least = (1 + (2 * count == n)) / len(splits)
    within, between = splits[0]
    return Alike(
        n,
        float(within),
        float(between),
        p=float(np.mean(excess >= -1e-12)),
        opposed=float(np.mean(-excess >= -1e-12)),
        labellings=len(splits),
        least_p=least,
    )


def holm(p_values: Sequence[float], weights: Sequence[int] | None = None) -> list[float]:
    """Return Holm's adjusted p of each hypothesis of a family (1979).

    The smallest p is multiplied by n, the next by n - 1, and so on; the results are monotone.

    Args:
        p_values: One p per hypothesis.
        weights: The weight of each hypothesis (Holm 1979, section 4). p is divided by its share of
            the remaining weights.
    """
    weights = weights or [1] * len(p_values)
    adjusted = [0.0] * len(p_values)
    running, remaining = 0.0, sum(weights)
    for index in sorted(range(len(p_values)), key=lambda index: p_values[index] / weights[index]):
        running = max(running, min(1.0, remaining * p_values[index] / weights[index]))
        adjusted[index] = running
        remaining -= weights[index]
    return adjusted


# --- correlations ---


def _pooled_z(
    first: np.ndarray, second: np.ndarray, groups: Sequence[Hashable], counts: np.ndarray
) -> np.ndarray:
    """Return Spearman's correlations (draws,) within groups, pooled by Fisher's z.

    The weights are n - 3. Each draw has `counts` (draws, n) copies of each of n pairs. Groups with
    fewer than four pairs or constant values have no correlation and are skipped. The result is nan
    if all groups are skipped.
    """
    import numpy as np

    indices_of_group: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        indices_of_group.setdefault(group, []).append(index)
    total = np.zeros(len(counts))
    weights = np.zeros(len(counts))
    for indices in indices_of_group.values():
        copies = counts[:, indices]
        n = copies.sum(axis=1)
        x = _centred_ranks(first[indices], copies)
        y = _centred_ranks(second[indices], copies)
        scale = np.sqrt((copies * x * x).sum(axis=1) * (copies * y * y).sum(axis=1))
        usable = (n > 3) & (scale > 0)
        rho = (copies * x * y).sum(axis=1) / np.where(usable, scale, 1)
        z = np.arctanh(np.clip(rho, -1 + 1e-6, 1 - 1e-6))
        weight = np.where(usable, n - 3, 0)
        total = total + weight * z
        weights = weights + weight
    is_any = weights > 0
    return np.where(is_any, total / np.where(is_any, weights, 1), np.nan)


def _centred_ranks(values: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Return ranks (draws, n), less their mean, of n values with `copies` in each draw.

    Ties share a rank.
    """
    below = (values[:, None] < values) + (values[:, None] == values) / 2
    ranks = copies @ below
    mean = (copies * ranks).sum(axis=1, keepdims=True) / copies.sum(axis=1)[:, None]
    return ranks - mean


@dataclass(frozen=True)
class Correlations:
    """The correlations of two scores with an outcome, compared.

    Attributes:
        left: The pooled correlation of the left score with the outcome.
        right: The same for the right score.
        difference: Left minus right, in Fisher's z.
        low: The lower end of the percentile interval of the difference, over experts.
        high: The upper end.
        p: The two-sided p, by the draws.
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
) -> Correlations:
    """Test whether one score of an expert predicts its merge better than another score does.

    Experts are resampled within groups, each with all of its merges, because merges of one expert
    are not independent.

    Args:
        left: One score (n,).
        right: The other score (n,).
        outcome: The outcome (n,).
        groups: The model and language of each number. Numbers are ranked within a group.
        experts: The expert of each number.
        draws: The number of draws of experts.
    """
    import numpy as np

    x = np.asarray(left, dtype=float)
    y = np.asarray(right, dtype=float)
    target = np.asarray(outcome, dtype=float)
    group_members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for index, (group, expert) in enumerate(zip(groups, experts, strict=True)):
        group_members.setdefault(group, {}).setdefault(expert, []).append(index)
    rng = np.random.default_rng(SEED)
    counts = np.zeros((draws, len(target)))
    for members in group_members.values():
        n = len(members)
        picked = rng.multinomial(n, [1 / n] * n, size=draws)  # (draws, experts)
        for times, indices in zip(picked.T, members.values(), strict=True):
            counts[:, indices] = times[:, None]
    single_copies = np.ones((1, len(target)))
    first = float(_pooled_z(x, target, groups, single_copies)[0])
    second = float(_pooled_z(y, target, groups, single_copies)[0])
    drawn = _pooled_z(x, target, groups, counts) - _pooled_z(y, target, groups, counts)
    drawn = drawn[np.isfinite(drawn)]
    low, high = math.nan, math.nan
    if len(drawn):
        low, high = np.quantile(drawn, [0.025, 0.975])
    tail = 1 + min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Correlations(
        left=math.tanh(first),
        right=math.tanh(second),
        difference=first - second,
        low=float(low),
        high=float(high),
        p=min(1.0, 2 * tail / (len(drawn) + 1)),
    )
