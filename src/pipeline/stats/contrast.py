"""Differences of two scores: over problems, and over experts where a claim is about experts in
general; a variance for each, from which the interval, p and the minimum detectable difference are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.stats.statistics import LEVEL, NormalTest, PairedScore, detectable_difference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

ExpertPart = tuple[
    float, float, int
]  # variances of a mean over experts: between them, and within; their number


@dataclass(frozen=True)
class Contrast:
    """A difference of two scores, as shares: left minus right.

    free: the equation behind p and interval, without experts; parts: (variance between experts,
    within, experts) of each axis; n: problems; discordant: the share of discordant answers, of
    means the one with the same error, None for translations and measures without bounds; noise:
    squared standard error of the problems' variance, for its degrees of freedom.
    """

    free: PairedScore | NormalTest
    parts: Sequence[ExpertPart]
    n: int
    discordant: float | None = None
    noise: float = 0.0

    @cached_property
    def test(self) -> PairedScore | NormalTest:
        """The equation, with the variance that experts add."""
        added = added_by_experts(self.parts)
        return self.free.with_experts(
            added, mixed_degrees(self.problems**2, self.noise, self.parts, self.n)
        )

    @property
    def difference(self) -> float:
        return self.free.difference

    @property
    def error(self) -> float:
        """The standard error, with `df` degrees of freedom (infinite without experts)."""
        return math.hypot(self.problems, self.experts)

    @property
    def df(self) -> float:
        return self.test.df

    @property
    def problems(self) -> float:
        """The part of the error due to sampling problems."""
        return math.sqrt(self.free.variance(self.difference))

    @property
    def experts(self) -> float:
        """The part of the error due to sampling experts."""
        return math.sqrt(added_by_experts(self.parts))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return self.test.interval()

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]

    @property
    def p(self) -> float:
        """Two-sided, of no difference."""
        return self.test.p(0)

    def with_least_between(self, ratios: Sequence[float]) -> Contrast:
        """Return the contrast with a variance between experts of at least `ratios` times that
        within, for each axis.
        """
        raised = [
            (max(between, ratio * within), within, count)
            for (between, within, count), ratio in zip(self.parts, ratios, strict=True)
        ]
        if raised == [*self.parts]:
            return self
        return replace(self, parts=raised)

    def p_of(self, threshold: float) -> float:
        """Two-sided p of a true difference of `threshold`, as a claim with a threshold is
        tested.
        """
        return self.test.p(threshold)

    @property
    def spread(self) -> float | None:
        """The measured standard deviation of the difference from expert to expert; None without, or
        with two axes.
        """
        part, *further_parts = self.parts or [(0.0, 0.0, 0)]
        if part[2] and not further_parts:
            return math.sqrt(max(0.0, part[0] - part[1]) * part[2])
        return None

    def detectable(self, level: float = LEVEL, spread: float | None = None) -> float:
        """Return the minimum detectable difference of this test at a level, with POWER.

        Its error is that of the test of no difference. spread: the standard deviation of the
        difference from expert to expert on each axis; None: as measured.
        """
        parts = []
        for between, within, count in self.parts:
            if spread is None:
                added = max(0.0, between - within)
            else:
                added = spread**2 / count
            parts.append((added + within, within, count))
        tested = self.free.variance(0.0)
        df = mixed_degrees(tested, self.noise, parts, self.n)
        if (
            len(parts) > 1
        ):  # which axis varies most differs from sample to sample, and with it the test's own df
            df = (df + min(count - 1 for *_, count in parts)) / 2
        difference = detectable_difference(math.sqrt(tested + added_by_experts(parts)), level, df)
        if isinstance(self.free, PairedScore):
            difference = max(difference, self.free.least_shown(level))
        return min(self.free.reach, difference)


def contrast(
    differences: ArrayLike,
    estimate: float | None = None,
    drawn: ArrayLike | None = None,
    reach: float = 1.0,
) -> Contrast:
    """Return the contrast of the mean of differences (A1, ..., Ak, N): k axes of crossed experts
    and N problems.

    There are no axes for two single models. Differences lie between -reach and reach; those of
    measures such as bits have no bounds (reach is infinite) and Student's t over problems. For
    paired right and wrong answers this is Tango's score interval (`PairedScore`). In means over
    languages, seeds or experts, the answers to one problem have their measured dependence, plus one
    problem's worth of full dependence: without any spread their number proves nothing, and no
    interval has width zero.

    A run without an axis is repeated along it: swap (M, L, N) against the math expert (M, 1, N).
    Each axis adds to the variance the differences of its experts' means that the problems do not
    explain: mean squares of expert minus those of expert x problem, in the analysis of variance of
    a crossed random design (Cornfield and Tukey 1956), 0 if that is negative. The quantiles are
    then Student's t, whose degrees of freedom (`mixed_degrees`) fall to 2 if three experts
    dominate. Without an effect it rejects in 1 to 6 % of cases if experts matter, with three a
    side; in 1 to 4 % if they do not, as three experts cannot show that (on two axes in fewer than 1
    %).

    A percentile interval of a bootstrap over experts and problems is wrong in both directions: over
    three experts a draw's variance is 2/3 of the right one, and the noise of single answers is
    counted once per factor (Owen 2007).

    estimate, drawn: the difference, and (draws,) of it over draws of problems, if it is not a plain
    mean: the choice of the best is then repeated in each draw (`halved_means`). `differences` are
    those of the winning candidate.

    Raises ValueError without a problem, or for an axis of one level, which has no variance; without
    bounds also for one problem, or if all differences are equal.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    n = array.shape[-1]
    if not n or min(array.shape[:-1], default=2) < 2:
        raise ValueError(
            f"differences {array.shape}: an interval needs a problem, and two experts on each axis"
        )
    parts = [expert_part(means.mean(axis=1), means, n) for means in by_axis(array, array.ndim - 1)]
    if drawn is None:
        draws = None
    else:
        draws = np.asarray(drawn, dtype=float)
    if math.isinf(reach):
        return unbounded_contrast(array, estimate, draws, parts)
    by_problem = (array / reach).reshape(-1, n).mean(axis=0)
    if estimate is None:
        value = float(by_problem.mean())
    else:
        value = float(estimate) / reach
    discordant = max(float(np.abs(array / reach).mean()), abs(value))
    of_problems, of_answers = float(np.sum((by_problem - value) ** 2)), n * (discordant - value**2)
    if draws is not None:
        of_problems = n**2 * float(np.var(draws / reach, ddof=1))
    won, lost = n * (discordant + value) / 2, n * (discordant - value) / 2
    test = PairedScore(won, lost, n, (of_problems + 1) / (of_answers + 1), reach=reach)
    return Contrast(test, parts, n, n * test.variance(0.0) / reach**2)


def unbounded_contrast(
    array: np.ndarray, estimate: float | None, drawn: np.ndarray | None, parts: Sequence[ExpertPart]
) -> Contrast:
    """Return the contrast of differences without bounds, by Student's t over problems."""
    import numpy as np

    n = array.shape[-1]
    if n < 2 or not np.ptp(array):
        raise ValueError(
            f"differences {array.shape} of one problem, or all alike: they show no variance"
        )
    by_problem = array.reshape(-1, n).mean(axis=0)
    if estimate is None:
        value = float(by_problem.mean())
    else:
        value = float(estimate)
    if drawn is None:
        variance = float(np.var(by_problem, ddof=1)) / n
    else:
        variance = float(np.var(drawn, ddof=1))
    test = NormalTest(value, math.sqrt(variance), reach=math.inf)
    return Contrast(test, parts, n, noise=variance**2 / (n - 1))


def corpus_contrast(
    observed: ArrayLike,
    drawn: ArrayLike,
    n: int,
    estimate: float | None = None,
    draws: np.ndarray | None = None,
) -> Contrast:
    """Return the contrast of corpus metrics: differences (A1, ..., Ak), and (A1, ..., Ak, draws) of
    them over draws.

    As `contrast`, with the variances of draws of n sentences instead of means over problems. Two
    systems with equal translations differ by less than one sentence: the standard error is at least
    1 / n. estimate, draws: as in `contrast`.
    """
    import numpy as np

    values, array = np.asarray(observed, dtype=float), np.asarray(drawn, dtype=float)
    if draws is None:
        draws = array.reshape(-1, array.shape[-1]).mean(axis=0)
    variance = max(float(np.var(draws, ddof=1)), 1 / n**2)
    axes = zip(by_axis(values, values.ndim), by_axis(array, values.ndim), strict=True)
    parts = [expert_part(of_experts, means) for of_experts, means in axes]
    if estimate is None:
        value = float(values.mean())
    else:
        value = estimate
    return Contrast(NormalTest(value, math.sqrt(variance)), parts, n)


def contrast_of_trainings(differences: ArrayLike) -> Contrast:
    """Contrast of the mean of differences (A1, ..., Ak) of values recorded by trainings (losses,
    shares of rows): only trainings are sampled, not questions. Each axis adds the variance of its
    levels' means; with one axis it is Student's t test, for trainings of two kinds (A, 1) - (1, B)
    Welch's.

    Raises ValueError for an axis of one level, and if all trainings are equal, as there is then no
    variance.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    if min(array.shape, default=1) < 2 or not np.ptp(array):
        raise ValueError(
            f"differences {array.shape} of one training, or all alike: they show no variance"
        )
    means = by_axis(array, array.ndim)
    parts = [
        (float(np.var(axis_means, ddof=1)) / len(axis_means), 0.0, len(axis_means))
        for axis_means in means
    ]
    return Contrast(NormalTest(float(array.mean()), 0.0, reach=math.inf), parts, array.size)


def by_axis(array: np.ndarray, axes: int) -> list[np.ndarray]:
    """Return, for each of the first axes, the means (A, ...) over the other ones."""
    return [
        array.mean(axis=tuple(other for other in range(axes) if other != axis))
        for axis in range(axes)
    ]


def degrees_of_freedom(variance: float, noise: float) -> float:
    """Satterthwaite's degrees of freedom; infinite without noise."""
    if noise > 0:
        return variance**2 / noise
    return math.inf


def mixed_degrees(problems: float, noise: float, parts: Sequence[ExpertPart], n: int) -> float:
    """Degrees of freedom of the variance of n problems plus that of experts: the weighted mean of
    the parts' inverse.

    Every axis counts, also one whose experts add no variance: counted only where `between` exceeds
    `within`, the degrees of freedom would jump to infinity where rounding decides which is larger.
    Satterthwaite's formula, used among axes, gives too many where some experts' variance is added
    to one that is known: 5 % are then 7.5 % with three experts.
    """
    between = math.fsum(part[0] for part in parts)
    among = between / degrees_of_freedom(
        between, math.fsum(part[0] ** 2 / (part[2] - 1) for part in parts)
    )
    inverse = among + (noise / problems if noise > 0 else 0.0)
    if inverse <= 0:
        return math.inf
    variance = problems + added_by_experts(parts)
    return max(variance / inverse, min([part[2] - 1 for part in parts] + [n - 1] * (noise > 0)))


def added_by_experts(parts: Sequence[ExpertPart]) -> float:
    """Return the variance that experts add: between them, less that within, of each axis."""
    return math.fsum(max(0.0, between - within) for between, within, _ in parts)


def expert_part(values: np.ndarray, means: np.ndarray, n: int = 1) -> ExpertPart:
    """Variances of the mean over A experts: of the experts' values, and the part of it due to
    problems.

    values: (A,), of which the first is s^2 / A; means: (A, N), of N problems, or of N draws of all
    problems (n = 1), whose residual mean square of expert x problem, over A n, is the second.
    """
    import numpy as np

    experts, size = means.shape
    residuals = means - means.mean(axis=1, keepdims=True) - means.mean(axis=0) + means.mean()
    within = float(np.sum(residuals**2)) / max(1, (experts - 1) * (size - 1))
    return float(np.var(values, ddof=1)) / experts, within / (experts * n), experts
