"""Differences of two scores, with a confidence interval, a p-value and a detectable difference.

Problems are always sampled. Experts are sampled too if a claim is about experts in general.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.stats.statistics import LEVEL, NormalTest, PairedScore, detectable_difference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike


class ExpertPart(NamedTuple):
    """The variances of a mean over experts, on one axis."""

    between: float  # the variance of the experts' values, over their number
    within: float  # the part of `between` that sampled problems explain
    experts: int

    @property
    def added(self) -> float:
        return max(0.0, self.between - self.within)


@dataclass(frozen=True)
class Contrast:
    """A difference of two scores, as shares: left minus right.

    Attributes:
        free: The equation behind p and interval, without the variance of experts.
        parts: The variances of each axis of experts.
        n: The number of problems.
        noise: The squared standard error of the problems' variance, for its degrees of freedom.
    """

    free: PairedScore | NormalTest
    parts: Sequence[ExpertPart]
    n: int
    noise: float = 0.0

    @cached_property
    def test(self) -> PairedScore | NormalTest:
        """The equation, including the variance of experts."""
        df = mixed_degrees(self.free.variance(self.difference), self.noise, self.parts, self.n)
        return self.free.with_experts(added_by_experts(self.parts), df)

    @property
    def difference(self) -> float:
        return self.free.difference

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
        """The two-sided p of no difference."""
        return self.test.p(0)

    def in_points(self, level: float = LEVEL) -> dict[str, Any]:
        """Return the difference, its interval and the detectable difference in points, and n."""
        return {
            "difference": 100 * self.difference,
            "low": 100 * self.low,
            "high": 100 * self.high,
            "n": self.n,
            "detectable": 100 * self.detectable(level),
        }

    def with_least_between(self, ratios: Sequence[float]) -> Contrast:
        """Return the contrast with `between >= ratio * within` on each axis."""
        raised = []
        for part, ratio in zip(self.parts, ratios, strict=True):
            between = max(part.between, ratio * part.within)
            raised.append(part._replace(between=between))
        return replace(self, parts=raised)

    def p_of(self, threshold: float) -> float:
        """Return the two-sided p of a true difference of `threshold`."""
        return self.test.p(threshold)

    def detectable(self, level: float = LEVEL, spread: float | None = None) -> float:
        """Return the difference that this test detects at a level with POWER.

        The test is of no difference, and so is its error.

        Args:
            level: The significance level of the test.
            spread: The standard deviation of the difference from expert to expert, on each axis.
                None: as measured.
        """
        parts = []
        for part in self.parts:
            added = part.added
            if spread is not None:
                added = spread**2 / part.experts
            parts.append(part._replace(between=added + part.within))
        tested = self.free.variance(0.0)
        df = mixed_degrees(tested, self.noise, parts, self.n)
        if len(parts) > 1:
            # The axis that varies most differs between samples, and so does the test's df.
            fewest = min(part.experts for part in parts)
            df = (df + (fewest - 1)) / 2
        error = math.sqrt(tested + added_by_experts(parts))
        difference = detectable_difference(error, level, df)
        if isinstance(self.free, PairedScore):
            difference = max(difference, self.free.least_shown(level))
        return min(self.free.bound, difference)


def contrast(
    differences: ArrayLike,
    estimate: float | None = None,
    drawn: ArrayLike | None = None,
    bound: float = 1.0,
) -> Contrast:
    """Return the contrast of the mean of differences (A1, ..., Ak, N).

    These are k axes of crossed experts and N problems; two single models have no axis. For paired
    right and wrong answers this is Tango's score interval (`PairedScore`). In means over languages,
    seeds or experts, the answers to one problem have their measured dependence. One problem's worth
    of full dependence is added, so that no interval has width zero.

    A run without an axis is repeated along it: swap (M, L, N) against the math expert (M, 1, N).
    Each axis adds the variance of its experts' means that the problems do not explain. This is the
    mean square of experts minus that of expert x problem in a crossed random design (Cornfield and
    Tukey 1956), or 0 if that is negative. The quantiles are then Student's t. Its degrees of
    freedom (`mixed_degrees`) fall to 2 if three experts dominate. Without an effect it rejects in
    1 to 6 % of cases if experts matter, with three a side; in 1 to 4 % if they do not, because
    three experts cannot show that (on two axes in fewer than 1 %).

    A percentile bootstrap over experts and problems is wrong in both directions. Over three experts
    a draw's variance is 2/3 of the right one, and the noise of single answers is counted once per
    factor (Owen 2007).

    Args:
        differences: Differences between -bound and bound. If the best candidate was chosen, the
            differences of the winner.
        estimate: The difference, if it is not the plain mean.
        drawn: The difference in each draw of problems (draws,), if it is not the plain mean. The
            choice of the best candidate is then repeated in each draw (`halved_means`).
        bound: The largest possible difference. Infinite for measures without bounds, such as bits,
            which use Student's t over problems.

    Raises:
        ValueError: Without a problem, or with an axis of one level, which has no variance. Without
            bounds also for one problem, or if all differences are equal.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    n = array.shape[-1]
    if not n or min(array.shape[:-1], default=2) < 2:
        raise ValueError(
            f"Differences {array.shape}: an interval needs a problem, and two experts on each axis."
        )
    parts = [expert_part(means.mean(axis=1), means, n) for means in by_axis(array, array.ndim - 1)]
    is_unbounded = math.isinf(bound)
    scale = 1.0 if is_unbounded else bound
    by_problem = (array / scale).reshape(-1, n).mean(axis=0)
    value = float(by_problem.mean())
    if estimate is not None:
        value = float(estimate) / scale
    variance = None  # of the mean, over draws of problems
    if drawn is not None:
        variance = float(np.var(np.asarray(drawn, dtype=float) / scale, ddof=1))
    if is_unbounded:
        if n < 2 or not np.ptp(array):
            raise ValueError(
                f"Differences {array.shape} of one problem, or all equal: they show no variance."
            )
        if variance is None:
            variance = float(np.var(by_problem, ddof=1)) / n
        student = NormalTest(value, math.sqrt(variance), bound=bound)
        return Contrast(student, parts, n, noise=variance**2 / (n - 1))
    discordant = max(float(np.abs(array / scale).mean()), abs(value))
    of_answers = n * (discordant - value**2)
    of_problems = float(np.sum((by_problem - value) ** 2))
    if variance is not None:
        of_problems = n**2 * variance
    dependence = (of_problems + 1) / (of_answers + 1)
    won = n * (discordant + value) / 2
    lost = n * (discordant - value) / 2
    test = PairedScore(won, lost, n, dependence, bound=bound)
    return Contrast(test, parts, n)


def corpus_contrast(observed: ArrayLike, drawn: ArrayLike, n: int) -> Contrast:
    """Return the contrast of corpus metrics, with the variance of draws of n sentences.

    Two systems with equal translations differ by less than one sentence, so the standard error is
    at least 1 / n.

    Args:
        observed: Differences (A1, ..., Ak), with axes as in `contrast`.
        drawn: Differences over draws of sentences (A1, ..., Ak, draws).
        n: The number of sentences.
    """
    import numpy as np

    values = np.asarray(observed, dtype=float)
    array = np.asarray(drawn, dtype=float)
    draws = array.reshape(-1, array.shape[-1]).mean(axis=0)
    variance = max(float(np.var(draws, ddof=1)), 1 / n**2)
    parts = []
    axes = zip(by_axis(values, values.ndim), by_axis(array, values.ndim), strict=True)
    for of_experts, means in axes:
        parts.append(expert_part(of_experts, means))
    return Contrast(NormalTest(float(values.mean()), math.sqrt(variance)), parts, n)


def contrast_of_trainings(differences: ArrayLike) -> Contrast:
    """Return the contrast of values recorded by trainings, such as losses: (A1, ..., Ak).

    Only trainings are sampled, not questions. Each axis adds the variance of its levels' means.
    With one axis this is Student's t test; for trainings of two kinds, (A, 1) - (1, B), Welch's.

    Raises:
        ValueError: For an axis of one level, or if all trainings are equal: there is no variance.
    """
    import numpy as np

    array = np.asarray(differences, dtype=float)
    if min(array.shape, default=1) < 2 or not np.ptp(array):
        raise ValueError(
            f"Differences {array.shape} of one training, or all equal: they show no variance."
        )
    parts = []
    for means in by_axis(array, array.ndim):
        between = float(np.var(means, ddof=1)) / len(means)
        parts.append(ExpertPart(between, 0.0, len(means)))
    return Contrast(NormalTest(float(array.mean()), 0.0, bound=math.inf), parts, array.size)


def by_axis(array: np.ndarray, axes: int) -> list[np.ndarray]:
    """Return, for each of the first axes, the means (A, ...) over the other axes."""
    means = []
    for axis in range(axes):
        others = [other for other in range(axes) if other != axis]
        means.append(array.mean(axis=tuple(others)))
    return means


def mixed_degrees(problems: float, noise: float, parts: Sequence[ExpertPart], n: int) -> float:
    """Return the degrees of freedom of the variance of n problems plus the variance of experts.

    This is the weighted mean of the parts' inverse. Every axis counts, also an axis whose experts
    add no variance. Otherwise the degrees of freedom would jump to infinity when rounding decides
    that `between` is not above `within`. Satterthwaite's formula, used among axes, gives too many
    if some experts' variance is added to a known one: 5 % are then 7.5 % with three experts.
    """
    between = math.fsum(part.between for part in parts)
    noise_between = math.fsum(part.between**2 / (part.experts - 1) for part in parts)
    least = [part.experts - 1 for part in parts]
    inverse = 0.0
    if noise_between > 0:
        inverse = between / (between**2 / noise_between)  # Satterthwaite
    if noise > 0:
        inverse += noise / problems
        least.append(n - 1)
    if inverse <= 0:
        return math.inf
    variance = problems + added_by_experts(parts)
    return max(variance / inverse, min(least))


def added_by_experts(parts: Sequence[ExpertPart]) -> float:
    """Return the variance that experts add, over all axes."""
    return math.fsum(part.added for part in parts)


def expert_part(values: np.ndarray, means: np.ndarray, n: int = 1) -> ExpertPart:
    """Return the variances of the mean over A experts.

    `between` is the experts' s^2 / A. `within` is the residual mean square of expert x problem,
    over A n.

    Args:
        values: The experts' values (A,).
        means: (A, N): their values on N problems, or in N draws of all problems.
        n: The number of problems; 1 for draws.
    """
    import numpy as np

    experts, size = means.shape
    residuals = means - means.mean(axis=1, keepdims=True) - means.mean(axis=0) + means.mean()
    within = float(np.sum(residuals**2)) / max(1, (experts - 1) * (size - 1))
    between = float(np.var(values, ddof=1)) / experts
    return ExpertPart(between, within / (experts * n), experts)
