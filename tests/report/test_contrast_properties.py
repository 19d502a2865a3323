"""Contrasts: what holds of any answers."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.stats.contrast import contrast, expert_part

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)
shapes = st.sampled_from([(9,), (7,), (3, 12), (2, 3, 15), (4, 1)])
answers = shapes.flatmap(lambda shape: arrays(np.int8, shape, elements=st.integers(-1, 1)))
sparse = arrays(np.int8, (3, 60), elements=st.integers(0, 40).map(lambda number: {0: 1, 1: -1}.get(number, 0)))


def summary(array: np.ndarray) -> tuple[float, ...]:
    found = contrast(array)
    return found.low, found.high, found.p


def test_three_trainings_of_which_few_answers_differ():
    """Ten discordant answers of 300, whose variance between trainings equals that within them up to rounding."""
    differences = np.zeros((3, 100), int)
    for seed, questions in ((0, (3, 25, 37, 50, 96)), (1, (66, 69, 96)), (2, (41, 45, 53, 56))):
        differences[seed, list(questions)] = 1
    differences[1, [52, 94]] = -1
    assert summary(differences) == pytest.approx(summary(differences[:, ::-1]), abs=1e-9)


@FEW
@given(st.one_of(answers, sparse), st.randoms(use_true_random=False))
def test_sides_experts_and_questions_have_no_order(array, random):
    low, high, p = summary(array)
    assert summary(-array) == pytest.approx((-high, -low, p), abs=1e-7)
    for axis, size in enumerate(array.shape):
        again = np.take(array, random.sample(range(size), size), axis=axis)
        assert summary(again) == pytest.approx((low, high, p), abs=1e-7)


@FEW
@given(st.one_of(answers, sparse))
def test_a_little_more_variance_between_experts_changes_little(array):
    found = contrast(array)
    for more in (1e-9, 1e-6):
        ratios = [(between + more) / within if within else 0.0 for between, within, _ in found.parts]
        moved = found.with_least_between(ratios)
        assert (moved.low, moved.high) == pytest.approx((found.low, found.high), abs=2e-3)


@FEW
@given(answers, st.floats(-0.9, 0.9), st.sampled_from([1.0, 1.1, 2.0]))
def test_p_and_interval_are_one_equation(array, threshold, reach):
    found = contrast(array, reach=reach)
    for at in (0.0, threshold):
        assert (found.p_of(at) < 0.05) == (not found.low - 1e-8 <= at <= found.high + 1e-8)
    assert found.p == found.p_of(0) and found.low < found.high


@FEW
@given(answers)
def test_the_parts_of_an_error(array):
    """Mean squares of the crossed design, by sums of squares."""
    found, n = contrast(array), array.shape[-1]
    assert found.n == n and found.difference == pytest.approx(array.mean())
    assert found.error**2 == pytest.approx(found.problems**2 + found.experts**2)
    wanted = []
    for axis in range(array.ndim - 1):
        means = array.mean(axis=tuple(other for other in range(array.ndim - 1) if other != axis))
        a = len(means)
        grand, rows, columns = means.mean(), means.mean(1), means.mean(0)
        mean_square = n * ((rows - grand) ** 2).sum() / (a - 1)
        rest = (means**2).sum() - n * (rows**2).sum() - a * (columns**2).sum() + a * n * grand**2
        wanted.append((mean_square / (a * n), rest / max(1, (a - 1) * (n - 1)) / (a * n), a))
        assert expert_part(means.mean(axis=1), means, means.shape[1])[:2] == pytest.approx(wanted[-1][:2], abs=1e-12)
    assert found.experts**2 == pytest.approx(sum(max(0, b - w) for b, w, _ in wanted), abs=1e-9)
    if wanted and any(b > 0 for b, _, _ in wanted):
        between = sum(b for b, _, _ in wanted)
        of_experts = between**2 / sum(b**2 / (a - 1) for b, _, a in wanted)  # Satterthwaite, among the axes
        df = found.error**2 / (between / of_experts)
        assert found.df == pytest.approx(max(df, min(a - 1 for *_, a in wanted)), rel=1e-6)


@FEW
@given(
    arrays(float, st.integers(3, 30), elements=st.floats(-50, 50, width=32)).filter(lambda d: np.ptp(d) > 1e-3),
    st.floats(-3, 3),
)
def test_measures_are_the_paired_t_test(d, at):
    found, theirs = contrast(d, reach=math.inf), scipy.stats.ttest_1samp(d, 0)
    expected = (theirs.pvalue, len(d) - 1, *theirs.confidence_interval())
    assert (found.p, found.df, found.low, found.high) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert found.p_of(at) == pytest.approx(scipy.stats.ttest_1samp(d, at).pvalue, abs=1e-6)
