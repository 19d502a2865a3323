"""The statistics of a table. Pure functions on arrays of scores; NumPy and SciPy are imported where they are needed.

Scores are shares of 1, one per problem (0 or 1, or a mean over fixed factors: languages, models). Factors sampled from
a population are resampled: problems always, experts if a claim is about experts in general. MGSM has the same problems
in every language, so one draw of problem ids is used for all languages, seeds and models.

Tests on ranks (Friedman, Wilcoxon, Spearman) are in ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

DRAWS = 2_000
LEVEL = 0.05
POWER = 0.8


def standard_error(fraction: float, n: int) -> float:
    """Binomial standard error of a fraction in [0, 1] over n questions."""
    return math.sqrt(fraction * (1 - fraction) / n)


def smallest_difference(questions: float, discordant: float, level: float = LEVEL) -> float:
    """The minimum detectable difference (as a share) of a test on the same questions, at `level` and with POWER.

    McNemar's test in its normal approximation: (b - c) / sqrt(b + c) of questions that only the one or only the other
    model answers correctly. Of n questions a share d is discordant, and at least the difference itself: where nothing
    differs so far, the better model must win so many that they alone are significant. Power is that of the multinomial
    distribution, summed; for many questions (z_level + z_POWER) sqrt(d / n) is much the same.
    `discordant` is measured, or assumed before there are measurements. 1 if no difference would be detected.
    """

    def power(difference: float) -> float:
        import numpy as np
        from scipy.special import bdtr, gammaln

        share, critical = min(1.0, max(discordant, difference)), t_quantile(1 - level / 2, math.inf)
        n = max(1, round(questions))
        if n > 5_000:
            spread = math.sqrt(max(1e-12, share - difference**2) / n)
            return t_tail((critical * math.sqrt(share / n) - difference) / spread, math.inf)
        found = np.arange(1, n + 1)  # discordant answers, of which more than `most_lost` wins are significant
        most_lost = np.minimum(np.floor((found - critical * np.sqrt(found)) / 2), found)
        logarithm = gammaln(n + 1) - gammaln(found + 1) - gammaln(n - found + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm += found * np.log(share) + np.where(found < n, (n - found) * np.log1p(-share), 0)
        lost = min(1.0, max(0.0, (1 - difference / share) / 2))
        significant = np.where(most_lost >= 0, bdtr(np.maximum(most_lost, 0), found, lost), 0)
        return float(np.sum(np.exp(logarithm) * significant))

    return least_detected(power)


def least_detected(power: Callable[[float], float], most: float = 1.0) -> float:
    """The difference that is detected with POWER; `most` if none is."""
    low, high = 0.0, most
    if power(high) < POWER:
        return most
    while high - low > 1e-4 * most:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


# ------------------------------------------------------------------------------------------- two models


@dataclass(frozen=True)
class PairedScore:
    """Tango's score test of a mean of n differences, each from -1 to 1, as an equation in the true difference.

    won, lost: numbers of the n questions that only the left, or only the right side answers correctly; for means over
    languages or seeds, sums of their parts. dependence: the variance of a question's difference, as a share of the
    variance of a single answer's; experts: variance added by experts, with df degrees of freedom; reach: the largest
    possible difference, above 1 if the right side has a weight above 1.

    For single answers (dependence 1, no experts) it is the score test and interval of Tango (1998, Statistics in
    Medicine 17, 891-908): the variance is computed under the tested difference, so that it is not zero if no answers
    differ. At a difference of 0 it is McNemar's test. p and interval solve the same equation and always agree.
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

    def variance(self, difference: float) -> float:
        """Variance of the mean if this is the true difference, with the maximum-likelihood share lost."""
        shifted = min(1.0, max(-1.0, difference / self.reach))
        linear = (2 * self.n - self.won + self.lost) * shifted - self.won - self.lost
        root = math.sqrt(max(0.0, linear**2 + 8 * self.n * self.lost * shifted * (1 - shifted)))
        one_answer = max(0.0, (root - linear) / (2 * self.n) + shifted * (1 - shifted))
        return self.reach**2 * self.dependence * one_answer / self.n + self.experts

    def statistic(self, difference: float) -> float:
        distance, variance = self.difference - difference, self.variance(difference)
        if abs(distance) < 1e-12:
            return 0.0
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    def p(self, difference: float) -> float:
        """Two-sided p of a true difference: below 0.05 if it lies outside the 95 % interval."""
        return 2 * t_tail(abs(self.statistic(difference)), self.df)

    def interval(self) -> tuple[float, float]:
        """The 95 % interval: all differences whose p is at least LEVEL."""

        def limit(outside: float) -> float:
            low = self.difference
            if self.p(outside) >= LEVEL:
                return outside
            while abs(outside - low) > 1e-9:
                middle = (low + outside) / 2
                low, outside = (middle, outside) if self.p(middle) >= LEVEL else (low, middle)
            return low

        return limit(-self.reach), limit(self.reach)


@dataclass(frozen=True)
class NormalTest:
    """The same test for a difference of corpus metrics, whose standard error comes from draws. reach: as above."""

    difference: float
    error: float
    df: float = math.inf
    reach: float = 1.0

    def p(self, difference: float) -> float:
        return 2 * t_tail(abs(self.difference - difference) / self.error, self.df)

    def interval(self) -> tuple[float, float]:
        half = t_quantile(1 - LEVEL / 2, self.df) * self.error
        return max(-self.reach, self.difference - half), min(self.reach, self.difference + half)


def t_tail(statistic: float, df: float) -> float:
    """P(T > statistic) of Student's t; of the normal distribution if df is infinite."""
    from scipy.special import ndtr, stdtr  # scipy.stats takes a second to import

    return float(ndtr(-statistic) if math.isinf(df) else stdtr(df, -statistic))


def t_quantile(share: float, df: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(ndtri(share) if math.isinf(df) else stdtrit(df, share))


# ------------------------------------------------------------------------------------------- draws


@lru_cache(maxsize=8)  # at most 32 MB each in `resampled_means`
def resample_weights(n: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """(draws, n) weights of n problems (or experts) in each draw with replacement; a row sums to 1.

    The same n and seed give the same draws, so that all scores on the same problems share them. The last few arrays are
    cached: do not write to them.
    """
    import numpy as np

    picked = np.random.default_rng(seed).integers(0, n, size=(draws, n))
    picked += n * np.arange(draws)[:, None]
    return np.bincount(picked.ravel(), minlength=draws * n).reshape(draws, n) / n


def resampled_means(scores: ArrayLike, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """(draws, ...): the means over problems of scores (..., N) in each draw; all scores share the draws.

    Computed in blocks of draws if N is large; each block has its own seed, the same for equal N.
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    n = array.shape[-1]
    flat = array.reshape(-1, n).T  # (N, S)
    size = max(1, min(draws, 4_000_000 // n))
    parts = [resample_weights(n, min(size, draws - at), seed + at) @ flat for at in range(0, draws, size)]
    return np.concatenate(parts).reshape(draws, *array.shape[:-1])


def half_weights(n: int) -> np.ndarray:
    """(2, n) weights of the odd (first, third, ...) and of the even problems: the halves to choose and to score on."""
    import numpy as np

    weights = np.zeros((2, n))
    weights[0, 0::2], weights[1, 1::2] = 1 / math.ceil(n / 2), 1 / max(1, n // 2)
    return weights


def halved_means(scores: ArrayLike, draws: int = DRAWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(draws, ...) means of the odd and of the even problems of scores (..., N), each half resampled separately.

    The mean of choosing on one half and scoring on the other, both ways, is an unbiased score of a choice, with its
    spread over problems. Choosing and scoring on the same problems is biased upwards, in each draw as in the table: a
    mean of four cells, each the best of three equal candidates, then beats a single one (24 % false positives; by
    halves 1 to 3 %).
    """
    import numpy as np

    array = np.asarray(scores, dtype=float)
    return resampled_means(array[..., 0::2], draws, seed), resampled_means(array[..., 1::2], draws, seed + draws)


def split_half(scores: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """Score of the best configuration on questions that it was not chosen on.

    Returns (chosen configuration, its score on the other half) twice: chosen on the odd questions and scored on the
    even ones, then the other way round. Ties choose the first configuration. Empty if a task has fewer than two
    questions. scores: configurations x tasks x questions, with the same questions in the same order for each
    configuration. The score of a half is the mean over tasks of the mean over its questions.
    """
    if any(len(questions) < 2 for tasks in scores for questions in tasks):
        return []
    halves = [[fmean([fmean(questions[half::2]) for questions in tasks]) for tasks in scores] for half in (0, 1)]
    winners = [max(range(len(scores)), key=half.__getitem__) for half in halves]
    return [(winners[0], halves[1][winners[0]]), (winners[1], halves[0][winners[1]])]


def wilson_interval(share: float, questions: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of right answers; its width is not 0 even if all are right or all wrong."""
    z2 = 1.96**2
    centre = (share + z2 / (2 * questions)) / (1 + z2 / questions)
    half = math.sqrt(z2 * (share * (1 - share) / questions + z2 / (4 * questions**2))) / (1 + z2 / questions)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(share: float, questions: int, variance: float) -> tuple[float, float]:
    """Wilson's interval of a score whose sampling variance is not that of single answers: a mean over languages or
    models, or a chosen configuration. It uses the effective number of questions, those with this variance, minus one
    question's worth."""
    answers = questions * share * (1 - share)
    return wilson_interval(share, questions * (answers + 1) / (questions**2 * variance + 1))


# ------------------------------------------------------------------------------------------- contrasts


ExpertPart = tuple[float, float, int]  # variances of a mean over experts: between them, and within; their number


@dataclass(frozen=True)
class Contrast:
    """A difference of two scores, as shares.

    difference: left minus right; error: its standard error, with df degrees of freedom (infinite without experts); low,
    high: its 95 % interval; p: two-sided, of no difference; problems, experts: the parts of the error due to sampling
    of each; n: problems; discordant: the measured share of discordant answers, None for translations; test: the
    equation behind p and interval; parts: (variance between experts, within, experts) of each axis; noise: of the
    problems' variance.
    """

    difference: float
    low: float
    high: float
    p: float
    error: float
    df: float
    problems: float
    experts: float
    n: int
    discordant: float | None
    test: PairedScore | NormalTest
    parts: Sequence[ExpertPart] = ()
    noise: float = 0.0

    def with_least_between(self, ratios: Sequence[float]) -> Contrast:
        """The contrast with a variance between experts of at least `ratios` times that within, for each axis."""
        raised = [
            (max(between, ratio * within), within, count)
            for (between, within, count), ratio in zip(self.parts, ratios, strict=True)
        ]
        if raised == [*self.parts]:
            return self
        return contrast_of_test(self.test, self.problems**2, raised, self.n, self.discordant, self.noise)

    def p_of(self, threshold: float) -> float:
        """Two-sided p of a true difference of `threshold`, as a claim with a threshold is tested."""
        return self.test.p(threshold)

    @cached_property
    def could_see(self) -> float:
        """The minimum detectable difference at LEVEL, if experts differ as measured."""
        return self.detectable(LEVEL)

    @property
    def spread(self) -> float | None:
        """The measured standard deviation of the difference from expert to expert; None without, or with two axes."""
        (part, *others) = self.parts or [(0.0, 0.0, 0)]
        return math.sqrt(max(0.0, part[0] - part[1]) * part[2]) if part[2] and not others else None

    def detectable(self, level: float, spread: float | None = None) -> float:
        """The minimum detectable difference at a level, with POWER. spread: the standard deviation of the difference
        from expert to expert on each axis, instead of the measured one.

        Over experts, the test's own estimate of their variance varies from sample to sample as a chi-squared number
        does: its power is the mean over that."""
        reach, least = self.test.reach, 0.0
        if isinstance(self.test, PairedScore):
            least = reach * smallest_difference(self.n / self.test.dependence, self.discordant or 0.0, level)
        if not self.parts:
            return (
                least
                if least
                else min(reach, (t_quantile(1 - level / 2, self.df) + t_quantile(POWER, self.df)) * self.error)
            )
        added = [
            max(0.0, between - within) if spread is None else spread**2 / count for between, within, count in self.parts
        ]
        tested = self.problems**2
        if isinstance(self.test, PairedScore):
            tested = self.test.variance(0.0) - self.test.experts
        most = reach if math.isfinite(reach) else 1e3 * math.sqrt(tested + sum(added))
        parts = [(one, within, count) for one, (_, within, count) in zip(added, self.parts, strict=True)]
        return max(least, least_detected(power_over_experts(tested, parts, level), most))


def contrast(
    differences: ArrayLike,
    estimate: float | None = None,
    drawn: ArrayLike | None = None,
    reach: float = 1.0,
) -> Contrast:
    """The mean of differences (A1, ..., Ak, N): k axes of crossed experts (none for two single models) and N problems.

    Differences lie between -reach and reach; those of measures such as bits have no bounds (reach is infinite) and
    Student's t over problems. For paired right and wrong answers this is Tango's score interval
    (`PairedScore`). In means over languages, seeds or experts, the answers to one problem have their measured
    dependence, plus one problem's worth of full dependence: without any spread their number proves nothing, and no
    interval has width zero.

    A run without an axis is repeated along it: swap (M, L, N) against the math expert (M, 1, N). Each axis adds to the
    variance the differences of its experts' means that the problems do not explain: mean squares of expert minus those
    of expert x problem, in the analysis of variance of a crossed random design (Cornfield and Tukey 1956), 0 if that is
    negative. The quantiles are then Student's t, whose degrees of freedom (`mixed_degrees`) fall to 2 if three experts
    dominate. Without an effect it rejects in 1 to 6 % of cases if experts matter, with three a side; in 1 to 4 % if
    they do not, as three experts cannot show that (on two axes in fewer than 1 %).

    A percentile interval of a bootstrap over experts and problems is wrong in both directions: over three experts a
    draw's variance is 2/3 of the right one, and the noise of single answers is counted once per factor (Owen 2007).

    estimate, drawn: the difference, and (draws,) of it over draws of problems, if it is not a plain mean: the choice of
    the best is then repeated in each draw (`halved_means`). `differences` are those of the winning candidate.

    Raises ValueError without a problem, or for an axis of one level, which has no variance; without bounds also for one
    problem, or if all differences are equal.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    n, bounded = array.shape[-1], math.isfinite(reach)
    if not n or min(array.shape[:-1], default=2) < 2:
        raise ValueError(f"differences {array.shape}: an interval needs a problem, and two experts on each axis")
    if not bounded and (n < 2 or not np.ptp(array)):
        raise ValueError(f"differences {array.shape} of one problem, or all alike: they show no variance")
    scaled = array / reach if bounded else array
    by_problem = scaled.reshape(-1, n).mean(axis=0)  # (N,)
    value = float(by_problem.mean()) if estimate is None else float(estimate) / (reach if bounded else 1)
    parts = [(*expert_variance(means), len(means)) for means in by_axis(array, array.ndim - 1)]
    if not bounded:
        problems = float(np.var(by_problem, ddof=1)) / n if drawn is None else float(np.var(np.asarray(drawn), ddof=1))
        free = NormalTest(value, math.sqrt(problems), reach=reach)
        return contrast_of_test(free, problems, parts, n, noise=problems**2 / (n - 1))
    discordant = max(float(np.abs(scaled).mean()), abs(value))
    of_problems, of_answers = float(np.sum((by_problem - value) ** 2)), n * (discordant - value**2)
    if drawn is not None:
        of_problems = n**2 * float(np.var(np.asarray(drawn, dtype=float) / reach, ddof=1))
    test = PairedScore(
        n * (discordant + value) / 2, n * (discordant - value) / 2, n, (of_problems + 1) / (of_answers + 1), reach=reach
    )
    unlike = float(np.mean((reach * by_problem) ** 2))
    return contrast_of_test(test, test.variance(test.difference), parts, n, unlike)


def corpus_contrast(
    observed: ArrayLike, drawn: ArrayLike, n: int, estimate: float | None = None, draws: ArrayLike | None = None
) -> Contrast:
    """Contrast of corpus metrics: differences (A1, ..., Ak), and (A1, ..., Ak, draws) over draws of n sentences.

    As `contrast`, with the variances of draws instead of means over problems. Two systems with equal translations
    differ by less than one sentence: the standard error is at least 1 / n. estimate, draws: as in `contrast`.
    """
    import numpy as np

    numbers, array = np.asarray(observed, dtype=float), np.asarray(drawn, dtype=float)
    joint = array.reshape(-1, array.shape[-1]).mean(axis=0) if draws is None else np.asarray(draws, dtype=float)
    problems = max(float(np.var(joint, ddof=1)), 1 / n**2)
    parts = []
    for values, means in zip(by_axis(numbers, numbers.ndim), by_axis(array, numbers.ndim), strict=True):
        count = len(values)
        residuals = means - means.mean(axis=1, keepdims=True) - means.mean(axis=0) + means.mean()
        between = float(np.var(values, ddof=1)) / count
        parts.append((between, float(np.sum(residuals**2)) / ((count - 1) * (means.shape[1] - 1)) / count, count))
    value = float(numbers.mean()) if estimate is None else estimate
    return contrast_of_test(NormalTest(value, math.sqrt(problems)), problems, parts, n)


def contrast_of_trainings(differences: ArrayLike) -> Contrast:
    """Contrast of the mean of differences (A1, ..., Ak) of values recorded by trainings (losses, shares of rows): only
    trainings are sampled, not questions. Each axis adds the variance of its levels' means; with one axis it is
    Student's t test, for trainings of two kinds (A, 1) - (1, B) Welch's.

    Raises ValueError for an axis of one level, and if all trainings are equal, as there is then no variance.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    if min(array.shape, default=1) < 2 or not np.ptp(array):
        raise ValueError(f"differences {array.shape} of one training, or all alike: they show no variance")
    means = by_axis(array, array.ndim)
    parts = [(float(np.var(axis_means, ddof=1)) / len(axis_means), 0.0, len(axis_means)) for axis_means in means]
    return contrast_of_test(NormalTest(float(array.mean()), 0.0, reach=math.inf), 0.0, parts, array.size)


def by_axis(array: np.ndarray, axes: int) -> list[np.ndarray]:
    """For each of the first axes, the means (A, ...) over the other ones."""
    return [
        array.mean(axis=tuple(axis_index for axis_index in range(axes) if axis_index != axis)) for axis in range(axes)
    ]


def degrees_of_freedom(variance: float, noise: float) -> float:
    """Satterthwaite's degrees of freedom; infinite without noise."""
    return variance**2 / noise if noise > 0 else math.inf


def mixed_degrees(problems: float, noise: float, parts: Sequence[ExpertPart], n: int) -> float:
    """Degrees of freedom of the variance of n problems plus that of experts: the weighted mean of the parts' inverse.

    Every axis counts, also one whose experts add no variance: counted only where `between` exceeds `within`, the
    degrees of freedom would jump to infinity where rounding decides which is larger. Satterthwaite's formula, used
    among axes, gives too many where some experts' variance is added to one that is known: 5 % are then 7.5 % with three
    experts."""
    between = math.fsum(part[0] for part in parts)
    among = between / degrees_of_freedom(between, math.fsum(part[0] ** 2 / (part[2] - 1) for part in parts))
    inverse = among + (noise / problems if noise > 0 else 0.0)
    if inverse <= 0:
        return math.inf
    variance = problems + added_by_experts(parts)
    return max(variance / inverse, min([part[2] - 1 for part in parts] + [n - 1] * (noise > 0)))


def added_by_experts(parts: Sequence[ExpertPart]) -> float:
    """The variance that experts add: between them, less that within, of each axis."""
    return math.fsum(max(0.0, between - within) for between, within, _ in parts)


def power_over_experts(problems: float, parts: Sequence[ExpertPart], level: float) -> Callable[[float], float]:
    """Function from a true difference to the power of its test. problems: the variance due to the problems; parts:
    (true variance of the mean due to experts, within, experts) of each axis."""
    import numpy as np
    from scipy.special import chdtri, ndtr, stdtrit

    size = 200 if len(parts) == 1 else 20
    chances = (np.arange(size) + 0.5) / size
    betweens = np.meshgrid(
        *((added + within) * chdtri(count - 1, chances) / (count - 1) for added, within, count in parts)
    )
    excess = sum(np.maximum(0.0, b - within) for b, (_, within, _) in zip(betweens, parts, strict=True))
    among = sum(b**2 / (count - 1) for b, (*_, count) in zip(betweens, parts, strict=True)) / np.maximum(
        1e-300, sum(betweens)
    )
    variance = problems + excess
    df = np.minimum(1e9, np.maximum(variance / np.maximum(among, 1e-300), min(count - 1 for *_, count in parts)))
    critical = stdtrit(df, 1 - level / 2) * np.sqrt(variance)
    error = math.sqrt(problems + math.fsum(added for added, *_ in parts))
    return lambda difference: float(np.mean(ndtr((difference - critical) / max(error, 1e-12))))


def contrast_of_test(
    test: PairedScore | NormalTest, problems: float, parts: Sequence[ExpertPart], n: int,
    discordant: float | None = None, noise: float = 0.0,
) -> Contrast:  # fmt: skip
    """The contrast of a test of n problems, to which experts add their variance. problems: the variance due to the
    problems, noise: that of this estimate; parts, discordant: as in `Contrast`."""
    experts, df = added_by_experts(parts), mixed_degrees(problems, noise, parts, n)
    error = math.sqrt(problems + experts)
    test = replace(test, experts=experts, df=df) if isinstance(test, PairedScore) else replace(test, error=error, df=df)
    low, high = test.interval()
    return Contrast(
        difference=test.difference, low=low, high=high, p=test.p(0), error=error, df=df,
        problems=math.sqrt(problems), experts=math.sqrt(experts), n=n, discordant=discordant,
        test=test, parts=parts, noise=noise,
    )  # fmt: skip


def expert_variance(means: np.ndarray) -> tuple[float, float]:
    """Variances of the mean over A experts: (of the experts' means, the part of it due to problems). means: (A, N).

    The first is s^2 / A of the A means; the second is the residual mean square of expert x problem, over A N.
    """
    import numpy as np

    experts, n = means.shape
    by_expert = means.mean(axis=1)
    residuals = means - by_expert[:, None] - means.mean(axis=0) + means.mean()
    within = float(np.sum(residuals**2)) / max(1, (experts - 1) * (n - 1))
    return float(np.var(by_expert, ddof=1)) / experts, within / (experts * n)
