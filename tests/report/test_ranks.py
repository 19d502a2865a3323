"""Tests on ranks against SciPy, statsmodels, and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from pipeline.stats.ranks import (
    compare_correlations,
    friedman,
    holm,
    profile_likeness,
    wilcoxon,
)

AGREED = [[3, 2, 1], [30, 20, 10], [0.3, 0.2, 0.1]]
SCORES = np.random.default_rng(3).random((12, 6)).round(1) + np.arange(6) / 12  # with ties


def test_friedman_against_scipy():
    found, library = friedman(SCORES), stats.friedmanchisquare(*SCORES.T)
    assert (found.statistic, found.p) == pytest.approx((library.statistic, library.pvalue))
    assert found.permuted == pytest.approx(found.p, abs=0.01)  # each block its own cluster


def test_friedman_by_hand():
    """Three blocks that agree on three treatments.

    12 / (3 3 4) (3^2 + 6^2 + 9^2) - 3 3 4 = 6, the largest there is.
    """
    found = friedman(AGREED)
    assert found.statistic == pytest.approx(6) and found.p == pytest.approx(math.exp(-3))
    assert found.permuted == pytest.approx(
        6 / 6**3, abs=0.005
    )  # all three alike, in any of six orders


def test_blocks_of_one_model_are_permuted_together():
    """Where all blocks share a model any order of the labels gives the same statistic.

    There is nothing to see.
    """
    assert friedman(AGREED, clusters=["a", "a", "a"]).permuted == 1
    assert friedman(AGREED, clusters=["a", "a", "b"]).permuted == pytest.approx(1 / 6, abs=0.02)


def test_no_effect_but_a_models_own_taste():
    """12 blocks of 4 models, each of which likes treatments its own way.

    5 % by permutation, far more by the table.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(24):
        taste = np.repeat(rng.normal(0, 1, (4, 6)), 3, axis=0)
        found.append(friedman(taste + rng.normal(0, 0.7, (12, 6)), clusters=np.repeat(range(4), 3)))
    assert np.mean([one.permuted < 0.05 for one in found]) < 0.1
    assert np.mean([one.p < 0.05 for one in found]) > 0.3


def test_all_tied_shows_nothing():
    found = friedman(np.ones((3, 3)))
    assert (found.statistic, found.p, found.permuted) == (0, 1, 1)


def test_too_few_blocks_or_treatments_are_refused():
    with pytest.raises(ValueError, match="three treatments and two blocks, not 2 and 5"):
        friedman(np.ones((5, 2)))


def test_wilcoxon_against_scipy():
    values = np.random.default_rng(4).normal(0.5, 1, 12)
    assert wilcoxon(values) == pytest.approx(stats.wilcoxon(values).pvalue)
    assert wilcoxon([*values, 0.0]) == wilcoxon(values)
    assert wilcoxon([0, 0]) == 1
    tied = [1, 1, -1, 2, 3, 3, 4]
    exact = stats.wilcoxon(tied, method=stats.PermutationMethod(n_resamples=np.inf))
    assert wilcoxon(tied) == pytest.approx(exact.pvalue)
    many = np.random.default_rng(4).normal(0.35, 1, 40)  # drawn flips: standard error 0.002
    assert wilcoxon(many) == pytest.approx(stats.wilcoxon(many).pvalue, abs=0.01)
    assert wilcoxon(many) == wilcoxon(many)


def test_wilcoxon_within_clusters():
    """Four models: at best 2 of 16 flips are as far, whatever the number of languages."""
    assert wilcoxon(np.arange(1, 13), clusters=[at // 3 for at in range(12)]) == 2 / 16
    assert wilcoxon(np.arange(1, 13)) == 2 / 2**12


@pytest.mark.parametrize("clusters", [17, 24])
def test_wilcoxon_of_dependent_blocks(clusters):
    """Four languages a model that differ little: 5 % of 200 worlds without an effect.

    With independent blocks it was 35 %.
    """
    rng = np.random.default_rng(clusters)
    of = np.repeat(np.arange(clusters), 4)
    worlds = (
        np.repeat(rng.normal(0, 1, clusters), 4) + rng.normal(0, 0.05, 4 * clusters)
        for _ in range(200)
    )
    false = sum(wilcoxon(world, of) < 0.05 for world in worlds)
    assert stats.binom.cdf(1, 200, 0.05) < 1e-3 and stats.binom.sf(23, 200, 0.05) < 1e-3
    assert 2 <= false <= 23
    assert wilcoxon(np.arange(1, 4 * clusters + 1), of) < 0.001  # an effect


def test_holm_against_statsmodels():
    from statsmodels.stats.multitest import multipletests

    values = [0.01, 0.04, 0.03, 0.005, 0.9]
    assert holm(values) == pytest.approx(multipletests(values, method="holm")[1].tolist())
    assert holm([0.02, 0.03]) == [0.04, 0.04] and holm([]) == []


@pytest.mark.parametrize(
    ("sizes", "least"), [((2, 2), 2 / 6), ((3, 3), 2 / 20), ((2, 3), 1 / 10), ((3, 4), 1 / 35)]
)
def test_the_least_p_of_profiles_is_of_the_observed_labelling_and_of_its_mirror_image(sizes, least):
    """Two kinds of the same size may change their names: the statistic is the same."""
    kinds = np.random.default_rng(8).normal(0, 1, (2, 9))
    profiles = np.repeat(kinds, sizes, axis=0) + np.random.default_rng(9).normal(
        0, 0.01, (sum(sizes), 9)
    )
    found = profile_likeness(profiles[: sizes[0]], profiles[sizes[0] :])
    assert (found.p, found.least_p) == pytest.approx((least, least))


def pooled_spearman(x, y, groups):
    return compare_correlations(x, x, y, groups, range(len(x)), draws=2).left


def test_spearman_of_one_group_is_scipys():
    x, y = np.random.default_rng(5).integers(0, 6, (2, 15))
    assert pooled_spearman(x, y, ["a"] * 15) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_spearman_within_groups():
    """Rising within both groups, though the groups' levels fall; and by hand.

    Z of .8 thrice as heavy as z of -.5.
    """
    x, y = [1, 2, 3, 4, 11, 12, 13, 14], [11, 12, 13, 14, 1, 2, 3, 4]
    assert pooled_spearman(x, y, "aaaabbbb") > 0.99 > 0 > stats.spearmanr(x, y).statistic
    rng = np.random.default_rng(6)
    first, second = rng.random((2, 6)), rng.random((2, 4))
    z = [
        3 * math.atanh(stats.spearmanr(*first).statistic),
        1 * math.atanh(stats.spearmanr(*second).statistic),
    ]
    pooled = pooled_spearman([*first[0], *second[0]], [*first[1], *second[1]], "aaaaaabbbb")
    assert pooled == pytest.approx(math.tanh(sum(z) / 4))
    assert math.isnan(pooled_spearman([1, 2, 3], [1, 2, 3], "aaa"))


def test_which_of_two_scores_goes_with_the_merge():
    rng = np.random.default_rng(7)
    outcome = rng.normal(0, 1, (6, 12))
    near, far = outcome + rng.normal(0, 0.5, (6, 12)), rng.normal(0, 1, (6, 12))
    groups, experts = np.repeat(range(6), 12), np.arange(72) // 2
    found = compare_correlations(
        near.ravel(), far.ravel(), outcome.ravel(), groups, experts, draws=400
    )
    assert found.left == pytest.approx(pooled_spearman(near.ravel(), outcome.ravel(), groups))
    assert found.left > 0.7 > 0.3 > found.right and found.low > 0 and found.p < 0.05
    same = compare_correlations(
        near.ravel(), near.ravel(), outcome.ravel(), groups, experts, draws=50
    )
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
