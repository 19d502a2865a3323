"""The report's statistics against sums done by hand and cases whose interval is known."""

from __future__ import annotations

from statistics import NormalDist

import pytest

from pipeline.evaluate.metrics import mean
from pipeline.report.statistics import paired_bootstrap, standard_deviation, standard_error


def test_by_hand():
    assert mean([1, 2, 6]) == 3
    assert standard_deviation([1, 2, 6]) == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert standard_deviation([40.0, 50.0]) == pytest.approx(7.0710678)
    assert standard_error(0.5, 100) == 0.05
    assert standard_error(1.0, 100) == 0


def test_the_same_answers_have_no_difference_and_no_width():
    assert paired_bootstrap([1, 0, 1, 0], [1, 0, 1, 0]) == (0, 0, 0)


def test_a_constant_difference_has_no_width():
    """What two models share cancels: only the differences are resampled."""
    assert paired_bootstrap([0.9, 0.3, 0.6], [0.4, -0.2, 0.1]) == pytest.approx((0.5, 0.5, 0.5))


def test_one_question_is_all_there_is_to_draw():
    assert paired_bootstrap([1], [0]) == (1, 1, 1)


def test_two_questions():
    """Means of two draws from {0, 1} are 0, 1/2, 1 with 1/4, 1/2, 1/4: both tails lie outside 95 %."""
    assert paired_bootstrap([1, 0], [0, 0]) == (0.5, 0, 1)


def test_against_the_normal_approximation():
    """400 questions, 60 won, 20 lost, 320 tied: difference 0.1, variance of the mean (0.2 - 0.01) / 400."""
    first, second = [1] * 60 + [0] * 20 + [1] * 320, [0] * 60 + [1] * 20 + [1] * 320
    difference, low, high = paired_bootstrap(first, second)
    half = NormalDist().inv_cdf(0.975) * (0.19 / 400) ** 0.5
    assert difference == pytest.approx(0.1)
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.004)
    mirrored = paired_bootstrap(second, first)
    assert mirrored == pytest.approx((-difference, -high, -low))


def test_the_seed_decides_the_bits():
    first, second = [1, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]
    assert paired_bootstrap(first, second) == paired_bootstrap(first, second)
    assert paired_bootstrap(first, second, resamples=700) == paired_bootstrap(first, second, resamples=700)
