"""The statistics of a table, as pure functions on arrays of scores.

Scores are shares of 1, one per problem: 0 or 1, or a mean over fixed factors (languages, models).
Factors sampled from a population are resampled: problems always, experts if a claim is about
experts in general. MGSM has the same problems in every language, so all languages, seeds and models
share one draw of problem ids.

Differences of two scores are in contrast.py. Tests on ranks (Friedman, Wilcoxon, Spearman) are in
ranks.py. NumPy and SciPy are imported inside functions, because their import is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

DRAWS = 2_000
LEVEL = 0.05
POWER = 0.8


def is_mean_of(score: float, values: Sequence[float]) -> bool:
    """Return True if a score is the mean of its answers' values, up to rounding.

    A perplexity or a correlation is not.
    """
    return math.isclose(score, fmean(values), rel_tol=1e-6, abs_tol=1e-9)


def mean_stderr(values: Sequence[float], score: float | None = None) -> float | None:
    """Return the standard error of a mean, with the sample's deviation (n - 1) like the harness.

    None for a single value, and for a score that is not the mean of these values, such as a
    perplexity.
    """
    if len(values) < 2:
        return None
    if score is not None and not is_mean_of(score, values):
        return None
    center = fmean(values)
    squares = math.fsum((value - center) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def value_per_question(parts: Iterable[tuple[int, float]], is_sum: bool) -> dict[int, float]:
    """Return one value for each question, from the values of its parts.

    The value is the sum of the parts. For a mean over all parts it is the question's share of it:
    m + (sum of the question's parts - m * their number) * questions / parts. The mean of these
    shares is the mean over parts. Their standard error is the error of a mean over clusters (Miller
    2024, arXiv 2411.00640, section 2.2).

    Args:
        parts: The (question, value) of each part.
        is_sum: True to add the parts.
    """
    by_question: dict[int, list[float]] = {}
    for question, value in parts:
        by_question.setdefault(question, []).append(value)
    if is_sum:
        return {question: math.fsum(values) for question, values in by_question.items()}
    all_values = list(chain.from_iterable(by_question.values()))
    overall = fmean(all_values)
    scale = len(by_question) / len(all_values)
    shares = {}
    for question, values in by_question.items():
        shares[question] = overall + math.fsum(value - overall for value in values) * scale
    return shares


def detectable_difference(error: float, level: float = LEVEL, df: float = math.inf) -> float:
    """Return the true difference that a test at `level` detects with POWER, in units of `error`.

    This is (z_level + z_POWER) * error. With finite degrees of freedom the factor is the
    noncentrality at which Student's t has this power, because the sum of its quantiles is too small
    for few trainings.
    """
    from scipy.special import nctdtrinc

    critical = t_quantile(1 - level / 2, df)
    if math.isinf(df):
        return (critical + t_quantile(POWER, df)) * error
    return float(nctdtrinc(df, 1 - POWER, critical)) * error


# --- two models ---


@dataclass(frozen=True)
class PairedScore:
    """Tango's score test of a mean of n differences, each from -1 to 1.

    It is an equation in the true difference. For single answers (dependence 1, no experts) it is
    the score test and interval of Tango (1998, Statistics in Medicine 17, 891-908). The variance is
    computed under the tested difference, so it is not zero if no answers differ. At a difference of
    0 it is McNemar's test. p and interval solve the same equation and always agree.

    Attributes:
        won: The number of the n questions that only the left side answers correctly. For means
            over languages or seeds, the sum over their parts.
        lost: The same for the right side.
        n: The number of questions.
        dependence: The variance of a question's difference, as a share of a single answer's.
        experts: The variance that experts add.
        df: The degrees of freedom.
        bound: The largest possible difference; above 1 if the right side has a weight above 1.
    """

    won: float
    lost: float
    n: int
    dependence: float = 1.0
    experts: float = 0.0
    df: float = math.inf
    bound: float = 1.0

    @property
    def difference(self) -> float:
        return self.bound * (self.won - self.lost) / self.n

    def with_experts(self, added: float, df: float) -> PairedScore:
        return replace(self, experts=added, df=df)

    def variance(self, difference: float) -> float:
        """Return the variance of the mean if `difference` is the true difference.

        The share of lost questions is the maximum-likelihood one: the root of a quadratic equation.
        """
        n, won, lost = self.n, self.won, self.lost
        shifted = min(1.0, max(-1.0, difference / self.bound))
        linear = (2 * n - won + lost) * shifted - won - lost
        discriminant = linear**2 + 8 * n * lost * shifted * (1 - shifted)
        root = math.sqrt(max(0.0, discriminant))
        one_answer = max(0.0, (root - linear) / (2 * n) + shifted * (1 - shifted))
        return self.bound**2 * self.dependence * one_answer / n + self.experts

    def least_shown(self, level: float) -> float:
        """Return the difference that is detected if one side wins every discordant answer.

        McNemar's statistic is then the square root of the number of wins. Its standard deviation is
        1/2.
        """
        root = t_quantile(1 - level / 2, math.inf) + t_quantile(POWER, math.inf) / 2
        return self.bound * self.dependence * root**2 / self.n

    def statistic(self, difference: float) -> float:
        distance = self.difference - difference
        variance = self.variance(difference)
        if abs(distance) < 1e-12:
            return 0.0
        if variance > 0:
            return distance / math.sqrt(variance)
        return math.copysign(math.inf, distance)

    def p(self, difference: float) -> float:
        """Return the two-sided p of a true difference; below 0.05 outside the 95 % interval."""
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
                    low = middle
                else:
                    outside = middle
            return low

        return limit(-self.bound), limit(self.bound)


@dataclass(frozen=True)
class NormalTest:
    """The same test for a difference of corpus metrics, with a standard error from draws."""

    difference: float
    error: float
    df: float = math.inf
    bound: float = 1.0

    def with_experts(self, added: float, df: float) -> NormalTest:
        return replace(self, error=math.sqrt(self.error**2 + added), df=df)

    def variance(self, _: float) -> float:
        return self.error**2

    def p(self, difference: float) -> float:
        return 2 * t_tail(abs(self.difference - difference) / self.error, self.df)

    def interval(self) -> tuple[float, float]:
        half = t_quantile(1 - LEVEL / 2, self.df) * self.error
        return max(-self.bound, self.difference - half), min(self.bound, self.difference + half)


def t_tail(statistic: float, df: float) -> float:
    """Return P(T > statistic) of Student's t, or of the normal distribution if df is infinite."""
    from scipy.special import stdtr  # scipy.stats takes a second to import

    if math.isinf(df):
        return math.erfc(statistic / math.sqrt(2)) / 2
    return float(stdtr(df, -statistic))


def t_quantile(share: float, df: float) -> float:
    from scipy.special import ndtri, stdtrit

    if math.isinf(df):
        return float(ndtri(share))
    return float(stdtrit(df, share))


# --- draws ---


@lru_cache(maxsize=8)  # at most 32 MB each in `resampled_means`
def resample_weights(n: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return (draws, n) weights of n problems in each draw with replacement; a row sums to 1.

    The same n and seed give the same draws, so all scores on the same problems share them. The last
    few arrays are cached: do not write to them.
    """
    import numpy as np

    picked = np.random.default_rng(seed).integers(0, n, size=(draws, n))
    picked += n * np.arange(draws)[:, None]
    return np.bincount(picked.ravel(), minlength=draws * n).reshape(draws, n) / n


def resampled_means(scores: ArrayLike, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return (draws, ...): the means of scores (..., N) over problems in each draw.

    All scores share the draws. If N is large, blocks of draws are computed one by one. Each block
    has another seed, the same for equal N.
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    n = array.shape[-1]
    flat = array.reshape(-1, n).T  # (N, S)
    size = max(1, min(draws, 4_000_000 // n))
    blocks = []
    for start in range(0, draws, size):
        weights = resample_weights(n, min(size, draws - start), seed + start)
        blocks.append(weights @ flat)
    return np.concatenate(blocks).reshape(draws, *array.shape[:-1])


def half_weights(n: int) -> np.ndarray:
    """Return (2, n) weights of the odd (first, third, ...) and of the even problems.

    One half is for choosing, the other for scoring.
    """
    import numpy as np

    weights = np.zeros((2, n))
    weights[0, 0::2] = 1 / math.ceil(n / 2)
    weights[1, 1::2] = 1 / max(1, n // 2)
    return weights


def halved_means(
    scores: ArrayLike, draws: int = DRAWS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return (draws, ...) means of scores (..., N) over the odd, and over the even problems.

    Each half is resampled separately. To choose on one half and to score on the other, both ways,
    gives an unbiased score of a choice, with its spread over problems. Choosing and scoring on the
    same problems is biased upwards, in each draw and in the table. A mean of four cells, each the
    best of three equal candidates, then beats a single candidate (24 % false positives; by halves 1
    to 3 %).
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    odd = resampled_means(array[..., 0::2], draws, seed)
    even = resampled_means(array[..., 1::2], draws, seed + draws)
    return odd, even


def largest(numbers: Sequence[Any]) -> Any:
    """Return the index of the first largest number; for arrays (draws,), the index in each draw.

    Numbers are rounded, because means of equally many right answers may differ by rounding.
    """
    import numpy as np

    indices = np.round(numbers, 12).argmax(axis=0)
    if indices.ndim:
        return indices
    return int(indices)


def wilson_interval(share: float, questions: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of right answers.

    Its width is not 0, even if all answers are right, or all are wrong.
    """
    z2 = 1.96**2
    shrinkage = 1 + z2 / questions
    centre = (share + z2 / (2 * questions)) / shrinkage
    variance = share * (1 - share) / questions + z2 / (4 * questions**2)
    half = math.sqrt(z2 * variance) / shrinkage
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(share: float, questions: int, variance: float) -> tuple[float, float]:
    """Return Wilson's interval of a score with another sampling variance than single answers.

    Examples are a mean over languages or models, and a chosen configuration. The interval uses the
    effective number of questions with this variance, minus one question's worth.
    """
    answers = questions * share * (1 - share)
    effective = questions * (answers + 1) / (questions**2 * variance + 1)
    return wilson_interval(share, effective)
