"""The report's statistics against sums done by hand and cases whose interval is known."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import simulations.simulate_statistics as simulate

from pipeline.stats import statistics
from pipeline.stats.contrast import contrast, expert_part
from pipeline.stats.statistics import resample_weights, share_interval, value_per_question

# --- two models ---


def outcome(won: int, lost: int, n: int) -> np.ndarray:
    return np.array([1] * won + [-1] * lost + [0] * (n - won - lost))


@pytest.mark.parametrize(
    "won, lost, n, low, high, digits",
    [
        (
            6,
            16,
            161,
            -0.1240,
            -0.0054,
            4,
        ),  # Cavo et al. 2012, by the tests of R's contingencytables 3.0
        # the others by the tests of R's ratesci, which names where they are published:
        (1, 7, 21, -0.517, -0.026, 3),  # Bentur et al. 2009, Fagerland, Lydersen and Laake (2014)
        (16, 8, 86, -0.020, 0.207, 3),  # Agresti and Min (2005)
        (3, 1, 14, -0.1670, 0.4327, 4),  # Tang, Tang and others (2010)
        (25, 2, 102, 0.139, 0.321, 3),  # Chang and others (2024)
    ],
)
def test_tangos_interval_against_published_examples(won, lost, n, low, high, digits):
    found = contrast(outcome(won, lost, n))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.51 * 10**-digits)


def test_p_of_no_difference_is_mcnemars_of_cavo():
    """Published: 0.033006 asymptotic; at a difference of 0 the score test is McNemar's."""
    assert contrast(outcome(6, 16, 161)).p == pytest.approx(0.033006, abs=1e-6)


def p_by_brute_force(won: int, lost: int, n: int, difference: float) -> float:
    """Return the two-sided p value by brute force.

    The share lost maximises the likelihood on a grid; the variance is that of the multinomial
    there.
    """
    share = np.linspace(max(0, -difference), min(1, (1 - difference) / 2), 400_001)[1:-1]
    gained, rest = share + difference, 1 - 2 * share - difference
    with np.errstate(divide="ignore", invalid="ignore"):
        likelihood = sum(
            np.where(count > 0, count * np.log(of), 0)
            for count, of in ((won, gained), (lost, share), (n - won - lost, rest))
        )
    lost_share = share[np.nanargmax(likelihood)]
    variance = (2 * lost_share + difference - difference**2) / n
    return 2 * NormalDist().cdf(-abs((won - lost) / n - difference) / variance**0.5)


@pytest.mark.parametrize(
    "won, lost, n", [(1, 7, 21), (3, 0, 3), (0, 0, 10), (1, 0, 1), (9, 4, 30), (0, 250, 250)]
)
def test_tangos_interval_against_brute_force(won, lost, n):
    found = contrast(outcome(won, lost, n))
    for limit in {found.low, found.high} - {-1.0, 1.0}:
        assert p_by_brute_force(won, lost, n, limit) == pytest.approx(0.05, abs=5e-4)
    for threshold in (-0.3, 0.01, 0.1):
        assert found.p_of(threshold) == pytest.approx(
            p_by_brute_force(won, lost, n, threshold), abs=1e-3
        )


@pytest.mark.parametrize("value", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (10,), (3, 1), (3, 10), (3, 3, 10)])
def test_answers_that_never_differ_show_little(value, shape):
    """All right, all wrong, or all won by one side.

    An interval with a width, and no more than n questions can show.
    """
    found, n = contrast(np.full(shape, value)), shape[-1]
    assert found.low < found.difference < found.high or abs(found.difference) == 1
    assert found.high - found.low > 1.9 / (n + 4)
    assert found.detectable() >= min(1, 2 / n)
    assert (found.p < 0.05) == (value != 0 and n >= 4)  # 4 / sqrt(4) is the first above 1.96
    if value == 0:
        assert (
            found.high == pytest.approx(1.959964**2 / (n + 1.959964**2), abs=1e-6)
            and found.low == -found.high
        )


@pytest.mark.parametrize("axis", [None, True, False])
def test_error_rates_of_few_questions(axis):
    """Of two models exact; simulations/simulate_statistics.py has all n from 2 to 30.

    At most 5.4 %; 94.6 %, 85.1 % and 97.5 %. Of three seeds in 100 worlds, by both ways of
    comparing them.
    """
    exact = axis is None
    found = (
        simulate.paired((2, 3, 4, 8, 9, 16))
        if exact
        else simulate.seeds((2, 12), worlds=100, axis=axis)
    )
    alike = [line for line in found if line[1] == line[2]]
    assert max(line[4] for line in alike) <= 0.06 + (0 if exact else 2 * (0.06 * 0.94 / 100) ** 0.5)
    assert not exact or min(line[3] for line in alike) >= 0.93
    assert min(line[3] for line in found) >= 0.84
    assert np.mean([line[3] for line in found]) >= 0.95


# --- draws ---


def test_draws_of_problems():
    weights = resample_weights(7, draws=400)
    assert weights.shape == (400, 7)
    assert np.allclose(weights.sum(axis=1), 1) and np.allclose((7 * weights) % 1, 0)
    assert np.array_equal(weights, resample_weights(7, draws=400))
    assert not np.array_equal(weights, resample_weights(7, 400, seed=1))
    values = np.random.default_rng(0).random((2, 3, 7))
    assert np.allclose(
        statistics.resampled_means(values, 400), np.einsum("bn,ijn->bij", weights, values)
    )


def test_split_half_by_problem():
    """Odd problems prefer the first, which gets 1/2 of the even ones.

    Those prefer the second, 1/3 of the odd ones.
    """
    scores = [[1, 1, 1, 0, 1], [1, 1, 0, 1, 0]]
    by_half = statistics.half_weights(5) @ np.transpose(scores)
    assert simulate.best(by_half, by_half[::-1]).mean() == pytest.approx((1 / 2 + 1 / 3) / 2)


# --- crossed pairs ---


def test_expert_variance_against_the_analysis_of_variance():
    import pandas
    from statsmodels.api import stats
    from statsmodels.formula.api import ols

    means = np.random.default_rng(2).random((3, 8))
    rows = pandas.DataFrame(
        [(a, q, means[a, q]) for a in range(3) for q in range(8)], columns=["a", "q", "value"]
    )
    table = stats.anova_lm(ols("value ~ C(a) + C(q)", rows).fit())
    squares = table["sum_sq"] / table["df"]
    between, within, experts = expert_part(means.mean(axis=1), means, 8)
    assert (between, within, experts) == pytest.approx(
        (squares["C(a)"] / 24, squares["Residual"] / 24, 3)
    )


def test_an_interval_over_one_expert_is_refused():
    with pytest.raises(ValueError, match="two experts on each axis"):
        contrast(np.zeros((1, 3, 40)))
    with pytest.raises(ValueError, match="needs a problem"):
        contrast(np.zeros((3, 0)))
    with pytest.raises(ValueError, match="no variance"):
        contrast(np.ones(5), bound=math.inf)


def test_parts_of_questions_are_clusters():
    """Three questions of one to three parts, against the cluster-robust error by its formula.

    The variance has the factor questions / (questions - 1).
    """
    parts = [(3, 1.0), (3, 0.0), (5, 1.0), (8, 1.0), (8, 1.0), (8, 0.0)]
    values = value_per_question(parts, is_sum=False)
    mean = sum(value for _, value in parts) / 6
    residuals = {
        q: sum(value - mean for question, value in parts if question == q) for q in (3, 5, 8)
    }
    error = math.sqrt(sum(residual**2 for residual in residuals.values())) / 6 * math.sqrt(3 / 2)
    assert values == pytest.approx(
        {3: 1 / 2, 5: 5 / 6, 8: 2 / 3}
    )  # 4 / 6 + (sum - 4 / 6 x count) x 3 / 6
    assert sum(values.values()) / 3 == pytest.approx(mean)
    assert statistics.mean_stderr(list(values.values())) == pytest.approx(error)
    assert value_per_question(parts, is_sum=True) == {3: 1.0, 5: 1.0, 8: 2.0}


# --- false positives ---


def world_without_effect(seed: int, of_experts: float, problems: int = 250) -> np.ndarray:
    """Return swap minus soup (3, 3, problems) in a world without effect.

    It is the mean of three languages that share problems. Each answer is right with a logistic
    probability of its problem, of its problem in its language, of the pair's two experts, and of
    what each expert does to each way of merging. A language has its own language experts.
    """
    rng = np.random.default_rng([seed, 14])
    hard = rng.normal(0, 1.5, problems) + rng.normal(0, 0.5, (3, 1, 1, problems))
    pair = rng.normal(0, 0.3, (1, 3, 1, 1)) + rng.normal(0, 0.3, (3, 1, 3, 1))
    answers = []
    for _ in ("swap", "soup"):
        suits = rng.normal(0, of_experts, (1, 3, 1, 1)) + rng.normal(0, of_experts, (3, 1, 3, 1))
        answers.append(
            rng.random((3, 3, 3, problems)) < 1 / (1 + np.exp(-(hard + pair + suits - 0.8)))
        )
    return (answers[0].astype(float) - answers[1]).mean(axis=0)


@pytest.mark.parametrize(
    "of_experts, least, most", [(0.0, 0.002, 0.05), (0.1, 0.015, 0.07), (0.3, 0.015, 0.07)]
)
def test_false_positives_of_crossed_experts_and_shared_problems(of_experts, least, most):
    """Share of 500 worlds without an effect in which one is found at 5 %.

    An expert's whim of 0.1 is worth about 1.5 points of a score, of 0.3 about 4.5; three experts
    cannot show that experts do not matter.
    """
    worlds = [world_without_effect(seed, of_experts) for seed in range(500)]
    assert least <= np.mean([contrast(differences).p < 0.05 for differences in worlds]) <= most
    if of_experts:
        assert (
            np.mean([contrast(differences.mean(axis=(0, 1))).p < 0.05 for differences in worlds])
            > 0.3
        )  # as fixed
        assert (
            np.mean([contrast(differences.ravel()).p < 0.05 for differences in worlds]) > 0.3
        )  # 2,250 problems


@pytest.mark.parametrize("n, spread", [(250, 0.1), (20, 0.1)])
def test_a_best_configurations_estimate_is_not_too_high_and_its_interval_covers(n, spread):
    """100 worlds; simulations/simulate_statistics.py has more worlds and numbers of candidates."""
    found = simulate.cell(candidates=9, spread=spread, n=n, worlds=100)
    assert found.maximum > 1 and found.split_half < 1, found  # points too high
    assert found.covered >= 0.9 and found.covered_by_maximum < 0.8, found


def test_the_interval_of_a_share_is_wilsons_where_answers_are_single():
    from statsmodels.stats.proportion import proportion_confint

    for right, n in ((0, 1), (3, 3), (0, 10), (7, 10), (140, 250)):
        share = right / n
        theirs = proportion_confint(right, n, method="wilson")
        assert share_interval(share, n, share * (1 - share) / n) == pytest.approx(theirs, abs=1e-5)
    assert (
        share_interval(0.5, 4, 0.0)[0] < 0.4 < 0.6 < share_interval(0.5, 4, 0.0)[1]
    )  # means of no spread
