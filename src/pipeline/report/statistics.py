"""The few statistics that the report prints. Pure functions on numbers; NumPy is imported where it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.evaluate.metrics import mean


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1) of at least two values: the spread over training seeds."""
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def standard_error(fraction: float, n: int) -> float:
    """Binomial standard error of a fraction in [0, 1] over n questions."""
    return math.sqrt(fraction * (1 - fraction) / n)


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(difference, low, high) of mean(first) - mean(second), by resampling questions.

    first, second: a score a question (N values each), the same questions in the same order. The interval is the
    percentile interval at `level`. Each resample draws N questions with replacement and keeps the two scores of a
    question together, so that what the models share (hard and easy questions) cancels.
    """
    import numpy as np

    difference = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)  # (N,)
    n = len(difference)
    rng = np.random.default_rng(seed)
    means = np.concatenate(  # in blocks, for the memory of large N
        [
            difference[rng.integers(0, n, size=(min(500, resamples - at), n))].mean(axis=1)
            for at in range(0, resamples, 500)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(difference.mean()), float(low), float(high)


def split_half(scores: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """What choosing the best configuration is worth on questions that it was not chosen on.

    scores: a list of tasks a configuration, a list of questions a task; the same questions in the same order for each
    configuration. The score of a half is the mean over tasks of the mean over its questions, so each task needs two.
    Gives (chosen configuration, its score on the other half), chosen on the first, third, ... question and scored on
    the second, fourth, ..., then the other way round. The first of several equally good ones is chosen.
    """
    if any(len(questions) < 2 for tasks in scores for questions in tasks):
        return []
    halves = [[mean([mean(questions[half::2]) for questions in tasks]) for tasks in scores] for half in (0, 1)]
    chosen = [max(range(len(scores)), key=half.__getitem__) for half in halves]
    return [(chosen[0], halves[1][chosen[0]]), (chosen[1], halves[0][chosen[1]])]
