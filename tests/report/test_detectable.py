"""What "detectable" promises: the power of the very test at the printed difference, simulated."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up_report import line_of

from pipeline.evaluate.shown_scores import score_interval
from pipeline.report.compare import (
    correct_contrasts,
    headline_sentences,
    holm_level,
    is_significant,
)
from pipeline.stats.contrast import added_by_experts, contrast, expert_part
from pipeline.stats.detectable import CORRELATION, planned_difference
from pipeline.stats.statistics import detectable_difference

SIMULATED = 1000  # worlds a power: its standard error is 0.013
POWERS = (0.75, 0.88)


@pytest.mark.parametrize(
    "n, discordant, level",
    [(100, 0.2, 0.05), (100, 0.2, 0.025), (250, 0.2, 0.0025), (100, 0.0, 0.05), (40, 0.4, 0.05)],
)
def test_one_training_each(n, discordant, level, monkeypatch):
    monkeypatch.setattr("pipeline.stats.detectable.DISCORDANT", discordant)
    rng, difference = np.random.default_rng(0), planned_difference(n, level) / 100
    share = max(discordant, difference)
    chances = [(share + difference) / 2, (share - difference) / 2, 1 - share]
    power = np.mean([contrast(rng.choice([1, -1, 0], n, p=chances)).p < level for _ in range(400)])
    assert 0.72 < power < 0.92  # 80 to 87 %, of 400


def answers_of(
    rng: np.random.Generator, scores: int, common: float, difference: float, n: int = 250
) -> np.ndarray:
    """Return (worlds, n): the mean over several scores of a problem's differences.

    20 % of them are discordant. With probability `common` a score has the problem's own difference,
    otherwise its own.
    """
    size = (SIMULATED, scores, n)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        chances = rng.random(shape, dtype=np.float32)
        return (chances < (0.2 + difference) / 2).astype(np.int8) - (
            chances > 1 - (0.2 - difference) / 2
        )

    shared, own = drawn((SIMULATED, 1, n)), drawn(size)
    return np.where(rng.random(size, dtype=np.float32) < common, shared, own).mean(axis=1)


@pytest.mark.parametrize("common", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("languages", [1, 4, 10])
def test_means_over_languages(languages: int, common: float) -> None:
    """A problem is asked in several languages.

    Divided by the dependence twice, power was 0.35 and 0.20.
    """
    rng = np.random.default_rng(languages)
    found = [
        contrast(world).detectable(0.05) for world in answers_of(rng, languages, common, 0.0)[:60]
    ]
    difference = float(np.median(found))
    power = np.mean(
        [contrast(world).p < 0.05 for world in answers_of(rng, languages, common, difference)]
    )
    assert POWERS[0] < power < POWERS[1]


@pytest.mark.parametrize("common", [0.0, 0.5, 0.9])
def test_means_over_models_and_languages(common: float) -> None:
    """Four models in three languages, at the level of the first of ten comparisons."""
    rng = np.random.default_rng(12)
    found = [contrast(world).detectable(0.005) for world in answers_of(rng, 12, common, 0.0)[:60]]
    difference = float(np.median(found))
    power = np.mean(
        [contrast(world).p < 0.005 for world in answers_of(rng, 12, common, difference)]
    )
    assert POWERS[0] < power < POWERS[1]


@pytest.mark.parametrize("scores", [1, 3, 12])
def test_what_a_plan_assumes(scores: int) -> None:
    """250 problems in several languages are 250 problems.

    Two scores share a difference with probability 0.5 here, if each has the problem's own one with
    probability 0.5 ** 0.5.
    """
    difference = planned_difference(250, 0.025, scores=scores) / 100
    worlds = answers_of(np.random.default_rng(scores), scores, CORRELATION**0.5, difference)
    power = np.mean([contrast(world).p < 0.025 for world in worlds])
    assert POWERS[0] < power < POWERS[1]


@pytest.mark.parametrize("common", [0.0, 0.6])
def test_questions_about_passages(common: float) -> None:
    """1 to 5 questions a passage, which count as their sum, as `Questions.vectors` has them.

    Power was 0.43.
    """
    rng, passages = np.random.default_rng(5), 300
    sizes = rng.integers(1, 6, passages)
    place, total = np.repeat(np.arange(passages), sizes), int(sizes.sum())

    def drawn(difference: float) -> np.ndarray:
        by_passage = answers_of(rng, 1, 0.0, difference, passages)[:, place]
        own = answers_of(rng, 1, 0.0, difference, total)
        values = np.where(rng.random(own.shape) < common, by_passage, own)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return passages / total * np.add.reduceat(values, starts, axis=1)

    difference = float(np.median([contrast(world).detectable(0.05) for world in drawn(0.0)[:60]]))
    power = np.mean([contrast(world).p < 0.05 for world in drawn(difference)])
    assert POWERS[0] < power < POWERS[1]


def test_the_formula_by_hand() -> None:
    """(1.95996 + 0.84162) times the standard error.

    With two degrees of freedom the noncentral t needs 5.65 of it.
    """
    assert detectable_difference(0.01) == pytest.approx(0.0280158, abs=1e-6)
    assert detectable_difference(0.01, 0.005) == pytest.approx(0.01 * (2.80703 + 0.84162), abs=1e-6)
    worlds = 5.65 / 3**0.5 + np.random.default_rng(3).normal(size=(20_000, 3))
    assert np.mean(scipy.stats.ttest_1samp(worlds, 0, axis=1).pvalue < 0.05) == pytest.approx(
        0.8, abs=0.015
    )
    assert detectable_difference(1.0, df=2) == pytest.approx(5.65, abs=0.01)
    assert detectable_difference(1.0, df=1e7) == pytest.approx(detectable_difference(1.0), abs=1e-4)


@pytest.mark.parametrize("trainings", [3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.04])
@pytest.mark.parametrize("level", [0.05, 0.0125])
def test_several_trainings_each(trainings, spread, level):
    """At the standard deviation between trainings that the sentence names."""
    rng, share = np.random.default_rng(1), 0.5

    def drawn(difference: float) -> np.ndarray:
        own, answers = rng.normal(0, spread, (trainings, 1)), rng.random((trainings, 250))
        wins, losses = (share + difference + own) / 2, (share - difference - own) / 2
        return np.where(answers < wins, 1, np.where(answers > 1 - losses, -1, 0))

    difference = float(np.median([contrast(drawn(0)).detectable(level, spread) for _ in range(7)]))
    power = np.mean([contrast(drawn(difference)).p < level for _ in range(400)])
    assert 0.72 < power < 0.88


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.04])
@pytest.mark.parametrize("level", [0.05, 0.0125])
def test_crossed_trainings(spread, level):
    """Nine pairs of three trainings a side, both of which vary."""
    rng, share = np.random.default_rng(4), 0.5

    def drawn(difference: float) -> np.ndarray:
        added = difference + rng.normal(0, spread, (3, 1, 1)) + rng.normal(0, spread, (1, 3, 1))
        answers = rng.random((3, 3, 250))
        return np.where(
            answers < (share + added) / 2, 1, np.where(answers > 1 - (share - added) / 2, -1, 0)
        )

    difference = float(np.median([contrast(drawn(0)).detectable(level, spread) for _ in range(15)]))
    power = np.mean([contrast(drawn(difference)).p < level for _ in range(400)])
    assert 0.68 < power < 0.9


def test_a_claimed_difference_that_nothing_could_show():
    assert planned_difference(3, 0.05) == 100


def test_the_level_is_the_one_that_holms_correction_begins_with():
    assert holm_level(1, True, True) == holm_level(1, False, False) == 0.05
    assert holm_level(11, True, True) == 0.025 and holm_level(11, False, True) == 0.0025
    assert holm_level(10, False, False) == 0.005
    for count in (2, 5):
        for has_first in (True, False):
            lines = [line_of(str(at), "b", "c", 5.0, 0.9) for at in range(count)]
            primary = ["0", "b", "c"] if has_first else []
            for at in range(count):
                level = holm_level(count, has_first and at == 0, has_first)
                for factor, significant in ((0.99, True), (1.01, False)):
                    alone = [
                        {**line, "p": factor * level} if place == at else line
                        for place, line in enumerate(lines)
                    ]
                    assert is_significant(correct_contrasts(alone, primary)[at]) is significant


# --- sentences ---

PRIMARY = ("swap", "math", "sw")


@pytest.mark.parametrize(
    "lines", [[], [line_of(*PRIMARY, 0.0, None, missing="eval-x is not made yet")]]
)
def test_a_missing_primary_is_named_and_keeps_its_half(lines):
    other = line_of("soup", "math", "sw", 9.0, 0.03)
    made = correct_contrasts([*lines, other], PRIMARY)
    first, *_, last = headline_sentences(made, PRIMARY)
    assert last.startswith("Not significant: 1 other difference. Detectable with 80 %")
    reason = "eval-x is not made yet" if lines else "it has no answers"
    assert first == f"The primary comparison, “swap” with “math” in “sw”, is missing: {reason}."
    assert made[-1]["p_holm"] == pytest.approx(0.06) and not is_significant(made[-1])
    assert correct_contrasts([other])[0]["p_holm"] == pytest.approx(0.03)


@pytest.mark.parametrize("difference, p", [(9.0, 0.001), (-9.0, 0.001), (1.0, 0.5)])
def test_a_sentence_about_one_training_of_each_says_so(difference, p):
    for trainings, said in (("these", True), ("a sample", False), (None, False)):
        lines = [line_of(*PRIMARY, difference, p, trainings=trainings)]
        first, *_ = headline_sentences(correct_contrasts(lines, PRIMARY), PRIMARY)
        assert ("These trainings alone: other seeds may differ." in first) is said


# --- scores ---


@pytest.mark.parametrize(
    "value, error, n, low, high", [(0.35, 0.0494, 36, 25.5, 45.8), (1.0, 0.0, 50, 92.9, 100.0)]
)
def test_one_interval_of_a_score(value, error, n, low, high):
    """The first has the standard error of about 80 independent answers."""
    row: Any = SimpleNamespace(value=value, stderr=error, n=n, metric="acc")
    found = score_interval(row)
    assert found and [100 * end for end in found] == pytest.approx([low, high], abs=0.1)


FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)
shapes = st.sampled_from([(9,), (7,), (3, 12), (2, 3, 15), (4, 1)])
answers = shapes.flatmap(lambda shape: arrays(np.int8, shape, elements=st.integers(-1, 1)))
sparse = arrays(
    np.int8, (3, 60), elements=st.integers(0, 40).map(lambda number: {0: 1, 1: -1}.get(number, 0))
)


def summary(array: np.ndarray) -> tuple[float, ...]:
    found = contrast(array)
    return found.low, found.high, found.p


def test_three_trainings_of_which_few_answers_differ():
    """Ten of 300 answers are discordant.

    Their variance between trainings equals that within trainings up to rounding.
    """
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
        ratios = [
            (between + more) / within if within else 0.0 for between, within, _ in found.parts
        ]
        moved = found.with_least_between(ratios)
        assert (moved.low, moved.high) == pytest.approx((found.low, found.high), abs=2e-3)


@FEW
@given(answers, st.floats(-0.9, 0.9), st.sampled_from([1.0, 1.1, 2.0]))
def test_p_and_interval_are_one_equation(array, threshold, bound):
    found = contrast(array, bound=bound)
    for at in (0.0, threshold):
        assert (found.p_of(at) < 0.05) == (not found.low - 1e-8 <= at <= found.high + 1e-8)
    assert found.p == found.p_of(0) and found.low < found.high


@FEW
@given(answers)
def test_the_parts_of_an_error(array):
    """Mean squares of the crossed design, by sums of squares."""
    found, n = contrast(array), array.shape[-1]
    assert found.n == n and found.difference == pytest.approx(array.mean())
    wanted = []
    for axis in range(array.ndim - 1):
        means = array.mean(axis=tuple(other for other in range(array.ndim - 1) if other != axis))
        a = len(means)
        grand, rows, columns = means.mean(), means.mean(1), means.mean(0)
        mean_square = n * ((rows - grand) ** 2).sum() / (a - 1)
        rest = (means**2).sum() - n * (rows**2).sum() - a * (columns**2).sum() + a * n * grand**2
        wanted.append((mean_square / (a * n), rest / max(1, (a - 1) * (n - 1)) / (a * n), a))
        assert expert_part(means.mean(axis=1), means, means.shape[1])[:2] == pytest.approx(
            wanted[-1][:2], abs=1e-12
        )
    of_experts = added_by_experts(found.parts)
    assert of_experts == pytest.approx(sum(max(0, b - w) for b, w, _ in wanted), abs=1e-9)
    if wanted and any(b > 0 for b, _, _ in wanted):
        between = sum(b for b, _, _ in wanted)
        degrees = between**2 / sum(
            b**2 / (a - 1) for b, _, a in wanted
        )  # Satterthwaite, among the axes
        df = (found.free.variance(found.difference) + of_experts) / (between / degrees)
        assert found.test.df == pytest.approx(max(df, min(a - 1 for *_, a in wanted)), rel=1e-6)


@FEW
@given(
    arrays(float, st.integers(3, 30), elements=st.floats(-50, 50, width=32)).filter(
        lambda d: np.ptp(d) > 1e-3
    ),
    st.floats(-3, 3),
)
def test_measures_are_the_paired_t_test(d, at):
    found, theirs = contrast(d, bound=math.inf), scipy.stats.ttest_1samp(d, 0)
    expected = (theirs.pvalue, len(d) - 1, *theirs.confidence_interval())
    assert (found.p, found.test.df, found.low, found.high) == pytest.approx(
        expected, rel=1e-4, abs=1e-9
    )
    assert found.p_of(at) == pytest.approx(scipy.stats.ttest_1samp(d, at).pvalue, abs=1e-6)
