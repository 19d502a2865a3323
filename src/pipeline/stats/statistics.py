"""The statistics of a table.

Pure functions on arrays of scores; NumPy and SciPy are imported where they are needed.

Scores are shares of 1, one per problem (0 or 1, or a mean over fixed factors: languages, models).
Factors sampled from a population are resampled: problems always, experts if a claim is about
experts in general. MGSM has the same problems in every language, so one draw of problem ids is used
for all languages, seeds and models.

Differences of two scores are in contrast.py, tests on ranks (Friedman, Wilcoxon, Spearman) in
ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

DRAWS = 2_000
LEVEL = 0.05
POWER = 0.8


def is_mean_of(score: float, values: Sequence[float]) -> bool:
    """Whether a score is the mean of its answers' values, up to rounding; a perplexity or a
    correlation is not.
    """
    return math.isclose(score, fmean(values), rel_tol=1e-6, abs_tol=1e-9)


def mean_stderr(values: Sequence[float], score: float | None = None) -> float | None:
    """Return the standard error of a mean, with the sample's deviation (n - 1) as the harness has
    it.

    None for a single value, and for a score that is not the mean of these values, such as a
    perplexity.
    """
    if len(values) < 2:
        return None
    if score is not None and not is_mean_of(score, values):
        return None
    center = fmean(values)
    return math.sqrt(
        math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values)
    )


def value_per_question(parts: Iterable[tuple[int, float]], is_sum: bool) -> dict[int, float]:
    """Question -> one value, from (question, value) of its parts: their sum, or, for a mean over
    all parts, the question's share of it.

    The mean of these shares is the mean over parts, and their standard error that of a mean over
    clusters: m + (sum of the question's parts - m * their number) * questions / parts (Miller 2024,
    arXiv 2411.00640, section 2.2).
    """
    by_question: dict[int, list[float]] = {}
    for question, value in parts:
        by_question.setdefault(question, []).append(value)
    if is_sum:
        return {question: math.fsum(values) for question, values in by_question.items()}
    everything = []
    for values in by_question.values():
        for value in values:
            everything.append(value)
    overall, scale = fmean(everything), len(by_question) / len(everything)
    return {
        question: overall + math.fsum(value - overall for value in values) * scale
        for question, values in by_question.items()
    }


def standard_error(fraction: float, n: int) -> float:
    """Binomial standard error of a fraction in [0, 1] over n questions."""
    return math.sqrt(fraction * (1 - fraction) / n)


def detectable_difference(error: float, level: float = LEVEL, df: float = math.inf) -> float:
    """Return the true difference that a test at `level` detects with POWER, in the unit of its
    standard error.

    This is (z_level + z_POWER) * error. With finite degrees of freedom the factor is the
    noncentrality at which Student's t has this power: its quantiles alone are too small for few
    trainings.
    """
    from scipy.special import nctdtrinc

    critical = t_quantile(1 - level / 2, df)
    if math.isinf(df):
        return (critical + t_quantile(POWER, df)) * error
    return float(nctdtrinc(df, 1 - POWER, critical)) * error


# --- two models ---


@dataclass(frozen=True)
class PairedScore:
    """Tango's score test of a mean of n differences, each from -1 to 1, as an equation in the true
    difference.

    won, lost: numbers of the n questions that only the left, or only the right side answers
    correctly; for means over languages or seeds, sums of their parts. dependence: the variance of a
    question's difference, as a share of the variance of a single answer's; experts: variance added
    by experts, with df degrees of freedom; reach: the largest possible difference, above 1 if the
    right side has a weight above 1.

    For single answers (dependence 1, no experts) it is the score test and interval of Tango (1998,
    Statistics in Medicine 17, 891-908): the variance is computed under the tested difference, so
    that it is not zero if no answers differ. At a difference of 0 it is McNemar's test. p and
    interval solve the same equation and always agree.
    """

    won: float
    lost: float
    n: int
    dependence: float = 1.0
    experts: float = 0.0
    df: float = math.inf
    reach: float = 1.0

    @property
    def difference(self) -> float:
        return self.reach * (self.won - self.lost) / self.n

    def with_experts(self, added: float, df: float) -> PairedScore:
        return replace(self, experts=added, df=df)

    def variance(self, difference: float) -> float:
        """Variance of the mean if this is the true difference, with the maximum-likelihood share
        lost.
        """
        shifted = min(1.0, max(-1.0, difference / self.reach))
        linear = (2 * self.n - self.won + self.lost) * shifted - self.won - self.lost
        root = math.sqrt(max(0.0, linear**2 + 8 * self.n * self.lost * shifted * (1 - shifted)))
        one_answer = max(0.0, (root - linear) / (2 * self.n) + shifted * (1 - shifted))
        return self.reach**2 * self.dependence * one_answer / self.n + self.experts

    def least_shown(self, level: float) -> float:
        """Return the difference that is detected if one side wins every discordant answer.

        McNemar's statistic is then the square root of the number of wins, whose standard deviation
        is 1/2.
        """
        root = t_quantile(1 - level / 2, math.inf) + t_quantile(POWER, math.inf) / 2
        return self.reach * self.dependence * root**2 / self.n

    def statistic(self, difference: float) -> float:
        distance, variance = self.difference - difference, self.variance(difference)
        if abs(distance) < 1e-12:
            return 0.0
        if variance > 0:
            return distance / math.sqrt(variance)
        return math.copysign(math.inf, distance)

    def p(self, difference: float) -> float:
        """Two-sided p of a true difference: below 0.05 if it lies outside the 95 % interval."""
        return 2 * t_tail(abs(self.statistic(difference)), self.df)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval: all differences whose p is at least LEVEL."""

        def limit(outside: float) -> float:
            low = self.difference
            if self.p(outside) >= LEVEL:
                return outside
            while abs(outside - low) > 1e-9:
                middle = (low + outside) / 2
                if self.p(middle) >= LEVEL:
                    low, outside = (middle, outside)
                else:
                    low, outside = (low, middle)
            return low

        return limit(-self.reach), limit(self.reach)


@dataclass(frozen=True)
class NormalTest:
    """The same test for a difference of corpus metrics, whose standard error comes from draws.

    reach: as above.
    """

    difference: float
    error: float
    df: float = math.inf
    reach: float = 1.0

    def with_experts(self, added: float, df: float) -> NormalTest:
        return replace(self, error=math.sqrt(self.error**2 + added), df=df)

    def variance(self, _: float) -> float:
        return self.error**2

    def p(self, difference: float) -> float:
        return 2 * t_tail(abs(self.difference - difference) / self.error, self.df)

    def interval(self) -> tuple[float, float]:
        half = t_quantile(1 - LEVEL / 2, self.df) * self.error
        return max(-self.reach, self.difference - half), min(self.reach, self.difference + half)


def t_tail(statistic: float, df: float) -> float:
    """P(T > statistic) of Student's t; of the normal distribution if df is infinite."""
    from scipy.special import stdtr  # scipy.stats takes a second to import

    if math.isinf(df):
        return math.erfc(statistic / math.sqrt(2)) / 2
    return float(stdtr(df, -statistic))


def t_quantile(share: float, df: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(ndtri(share) if math.isinf(df) else stdtrit(df, share))


# --- draws ---


@lru_cache(maxsize=8)  # at most 32 MB each in `resampled_means`
def resample_weights(n: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """(draws, n) weights of n problems (or experts) in each draw with replacement; a row sums to 1.

    The same n and seed give the same draws, so that all scores on the same problems share them. The
    last few arrays are
    cached: do not write to them.
    """
    import numpy as np

    picked = np.random.default_rng(seed).integers(0, n, size=(draws, n))
    picked += n * np.arange(draws)[:, None]
    return np.bincount(picked.ravel(), minlength=draws * n).reshape(draws, n) / n


def resampled_means(scores: ArrayLike, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """(draws, ...): the means over problems of scores (..., N) in each draw; all scores share the
    draws.

    Computed in blocks of draws if N is large; each block has its own seed, the same for equal N.
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    n = array.shape[-1]
    flat = array.reshape(-1, n).T  # (N, S)
    size = max(1, min(draws, 4_000_000 // n))
    parts = [
        resample_weights(n, min(size, draws - start), seed + start) @ flat
        for start in range(0, draws, size)
    ]
    return np.concatenate(parts).reshape(draws, *array.shape[:-1])


def half_weights(n: int) -> np.ndarray:
    """(2, n) weights of the odd (first, third, ...) and of the even problems: the halves to choose
    and to score on.
    """
    import numpy as np

    weights = np.zeros((2, n))
    weights[0, 0::2], weights[1, 1::2] = 1 / math.ceil(n / 2), 1 / max(1, n // 2)
    return weights


def halved_means(
    scores: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(draws, ...) means of the odd and of the even problems of scores (..., N), each half
    resampled separately.

    The mean of choosing on one half and scoring on the other, both ways, is an unbiased score of a
    choice, with its spread over problems. Choosing and scoring on the same problems is biased
    upwards, in each draw as in the table: a mean of four cells, each the best of three equal
    candidates, then beats a single one (24 % false positives; by halves 1 to 3 %).
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    return resampled_means(array[..., 0::2], draws, seed), resampled_means(
        array[..., 1::2], draws, seed + draws
    )


def largest(numbers: Sequence[Any]) -> Any:
    """Return the place of the first largest of several numbers; in each draw, of several arrays
    (draws,).

    Means of equally many right answers may differ by rounding, which must not choose.
    """
    import numpy as np

    indices = np.round(numbers, 12).argmax(axis=0)
    if indices.ndim:
        return indices
    return int(indices)


def wilson_interval(share: float, questions: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of right answers; its width is not 0 even if all are right
    or all wrong.
    """
    z2 = 1.96**2
    centre = (share + z2 / (2 * questions)) / (1 + z2 / questions)
    half = math.sqrt(z2 * (share * (1 - share) / questions + z2 / (4 * questions**2))) / (
        1 + z2 / questions
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(share: float, questions: int, variance: float) -> tuple[float, float]:
    """Wilson's interval of a score whose sampling variance is not that of single answers: a mean
    over languages or models, or a chosen configuration. It uses the effective number of questions,
    those with this variance, minus one question's worth.
    """
    answers = questions * share * (1 - share)
    return wilson_interval(share, questions * (answers + 1) / (questions**2 * variance + 1))
