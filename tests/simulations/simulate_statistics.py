"""Error rates of the report's statistics in worlds whose truth is known.

Prints rejection of true null hypotheses and coverage of 95 % intervals. `paired` is exact (every
outcome with its probability), the others are simulated. The tests of tests/report hold small
versions to the same bounds.
"""

import itertools
import math
import sys
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from pipeline.report.expression import reduce_rows
from pipeline.stats.contrast import contrast
from pipeline.stats.statistics import (
    PairedScore,
    half_weights,
    halved_means,
    resampled_means,
    share_interval,
)

RATES = (0.0, 0.02, 0.5, 0.98, 1.0)


def paired(
    sizes: range | tuple[int, ...] = range(2, 31),
) -> list[tuple[int, float, float, float, float]]:
    """Return (n, left, right, coverage, rejection) of two models with these success rates."""
    found = []
    for n in sizes:
        tables = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
        tests = {table: PairedScore(*table, n) for table in tables}
        intervals = {table: test.interval() for table, test in tests.items()}
        for left, right in itertools.product(RATES, RATES):
            share = left * (1 - right), right * (1 - left)
            covered = rejected = 0.0
            for (b, c), (low, high) in intervals.items():
                ways = math.comb(n, b) * math.comb(n - b, c)
                chance = ways * share[0] ** b * share[1] ** c * (1 - sum(share)) ** (n - b - c)
                covered += chance * (low - 1e-6 <= left - right <= high + 1e-6)
                rejected += chance * (tests[b, c].p(0) < 0.05)
            found.append((n, left, right, covered, rejected))
    return found


def seeds(
    sizes: tuple[int, ...] = (2, 3, 5, 10, 20, 30),
    worlds: int = 400,
    count: int = 3,
    axis: bool = True,
):  # type: ignore[no-untyped-def]
    """Return the same numbers for `count` trainings a side.

    With `axis`, trainings are a sample (a contrast over seeds); otherwise their mean is compared.
    Answers of a question are independent.
    """
    rng, found = np.random.default_rng(1), []
    for n, left, right in itertools.product(sizes, RATES, RATES):
        answers = [rng.random((worlds, count, n)) < rate for rate in (left, right)]
        differences = answers[0].astype(float) - answers[1]
        tests = [contrast(one if axis else one.mean(axis=0)) for one in differences]
        covered = np.mean([one.low - 1e-6 <= left - right <= one.high + 1e-6 for one in tests])
        found.append(
            (n, left, right, float(covered), float(np.mean([one.p < 0.05 for one in tests])))
        )
    return found


def best(choosing: np.ndarray, scoring: np.ndarray | None = None) -> np.ndarray:
    """(draws,) of the candidate that is best in each draw (draws, K): what is shown of it."""
    shown = choosing if scoring is None else scoring
    rows = [np.concatenate(of_candidate) for of_candidate in zip(choosing.T, shown.T, strict=True)]
    return reduce_rows("max", rows, len(choosing))[len(choosing) :]


class Cell(NamedTuple):
    """Of a cell that shows a best configuration.

    Points by which its estimates are too high, coverage of intervals.
    """

    maximum: float
    split_half: float
    covered: float
    covered_by_maximum: float


def cell(candidates: int, spread: float, n: int, worlds: int = 300) -> Cell:
    """Return the best of some candidates, whose logits differ by `spread`, on n questions.

    The truth is what the winner on these questions is worth on any others.
    """
    others = np.array([NormalDist(0, 1.5).inv_cdf((at + 0.5) / 1000) for at in range(1000)])
    found = []
    for world in range(worlds):
        rng = np.random.default_rng([world, candidates, n])
        level = rng.normal(0, spread, (candidates, 1)) - 0.8
        answers = (
            rng.random((candidates, n)) < 1 / (1 + np.exp(-(rng.normal(0, 1.5, n) + level)))
        ).astype(float)
        truth = float(
            (1 / (1 + np.exp(-(others + level)))).mean(axis=1)[answers.mean(axis=1).argmax()]
        )
        by_half = half_weights(n) @ answers.T
        value = float(best(by_half, by_half[::-1]).mean())
        odd, even = halved_means(answers, 400)
        variance = float(np.var((best(odd, even) + best(even, odd)) / 2, ddof=1))
        old = np.quantile(best(resampled_means(answers, 400)), [0.025, 0.975])
        inside = [low <= truth <= high for low, high in (share_interval(value, n, variance), old)]
        found.append((100 * (answers.mean(axis=1).max() - truth), 100 * (value - truth), *inside))
    return Cell(*map(float, np.mean(found, axis=0)))


def cells() -> None:
    for candidates, spread, n in itertools.product((3, 9, 27), (0.0, 0.1, 0.3), (20, 250)):
        one = cell(candidates, spread, n)
        print(
            f"best of {candidates}, logits {spread} apart, {n} questions: maximum"
            f" {one.maximum:+.1f} points"
        )
        print(
            f"  covered {one.covered_by_maximum:.1%}; split-half {one.split_half:+.1f} points,"
            f" {one.covered:.1%}"
        )


def told(title: str, found: list[tuple[int, float, float, float, float]]) -> None:
    alike = [line for line in found if line[1] == line[2]]
    worst, most = min(found, key=lambda line: line[3]), max(alike, key=lambda line: line[4])
    mean, least = np.mean([line[3] for line in found]), min(line[3] for line in alike)
    print(
        f"{title}: rejection under the null at most {most[4]:.1%} (n = {most[0]}, rate {most[1]})"
    )
    print(
        f"  coverage at least {least:.1%} at equal rates, {worst[3]:.1%} anywhere (n = {worst[0]},"
        f" {worst[1]} and {worst[2]}), {mean:.1%} on average"
    )


KINDS = {
    "paired": lambda: told("two models, n = 2 to 30, exact", paired()),
    "seeds": lambda: told("contrast over three seeds", seeds()),
    "cells": cells,
    "means": lambda: told("means of three seeds", seeds(axis=False)),
}

if __name__ == "__main__":
    for kind in sys.argv[1:] or KINDS:
        KINDS[kind]()
