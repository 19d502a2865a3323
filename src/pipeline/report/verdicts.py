"""The verdict on each claim about a table, computed from stored answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.claims import FACT, NOT_MADE, NOT_TESTABLE, Claim, Verdict
from pipeline.report.expression import lines_of
from pipeline.report.frame import Comparison
from pipeline.report.judgements import (
    Ranked,
    Unit,
    judge_alike,
    judge_difference,
    judge_every,
    judge_friedman,
    judge_spearman,
    judge_wilcoxon,
    judge_wins,
)
from pipeline.report.metrics import stored_metric
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.stored import StoredAnswers
from pipeline.stats import ranks
from pipeline.stats.contrast import contrast_of_trainings
from pipeline.tables.plan import Cell, TablePlan

if TYPE_CHECKING:
    import numpy as np


def compare_sides(
    placed: PlacedClaim, answers: StoredAnswers, left: Sequence[Cell], right: Sequence[Cell]
) -> Comparison:
    """Compare the mean of some cells with the mean of other cells.

    With `than`, the difference of a claim is compared with its difference at other places.
    """
    claim, than = placed.claim, placed.than
    left_weights, right_weights, bound = mean_weights(left), mean_weights(right), 1.0
    if than:
        left_weights += mean_weights(right, -1)
        right_weights = mean_weights(than.left[0]) + mean_weights(than.right[0], -1)
        bound = 2.0
    cells = [cell for _, cell in (*left_weights, *right_weights)]
    frame = answers.frame(placed.plan, cells, claim.metric)
    bound = max(bound, claim.factor)
    return Comparison(frame, left_weights, right_weights, placed.axes, claim.factor, bound)


def mean_weights(cells: Sequence[Cell], sign: int = 1) -> list[tuple[float, Cell]]:
    return [(sign / len(cells), cell) for cell in cells]


# --- judging ---


def judge_claims(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """Return the verdict on each claim about a table, those by signed ranks last.

    A claim that a smaller table of the same name cannot answer has a reason instead of a verdict.
    """
    verdicts: list[Verdict] = []
    signed_ranks: list[tuple[Claim, list[Ranked]]] = []
    for claim in claims_of(plan.table.name):
        try:
            placed = PlacedClaim.of(claim, plan)
            if placed.untestable:
                verdicts.append(Verdict(claim, NOT_TESTABLE, detail=placed.untestable))
            elif claim.test == "wilcoxon":
                signed_ranks.append((claim, ranked_pairs(placed, answers)))
            else:
                verdicts.append(JUDGES[claim.test](placed, answers))
        except PipelineError as error:
            verdicts.append(Verdict(claim, NOT_MADE, detail=str(error)))
    return verdicts + judge_wilcoxon(signed_ranks)


def judge_claimed_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on a difference by its units.

    The unit is the mean over all places, or with units=each a single place. With units=count, the
    places, or the pairs of experts, on the claim's side are also counted. If a side has several
    candidates, the claim must hold for each.
    """
    claim = placed.claim
    if claim.metric == FACT:
        return judge_fact_difference(placed, answers)
    if claim.units == "each":
        return judge_every(claim, units_by_place(placed, answers))
    units = []
    for left, right, name in candidates(placed):
        comparison = compare_sides(placed, answers, left, right)
        units.append(Unit(name, comparison.contrast(), *comparison.values))
    if len(units) > 1:
        verdict = judge_every(claim, units)
    else:
        verdict = judge_difference(claim, *units[0][1:])
    if claim.units == "count":
        counted = units_by_place(placed, answers)
        return judge_wins(claim, counted, verdict, experts=bool(placed.axes))
    return verdict


def candidates(placed: PlacedClaim) -> Iterator[tuple[list[Cell], list[Cell], str]]:
    """Yield the cells of each pair of candidates, and its name.

    All pairs have to be on the claim's side, so no pair is chosen.
    """
    claim = placed.claim
    left_names = zip(claim.left, placed.left, strict=True)
    right_names = zip(claim.right, placed.right, strict=True)
    for (left, of_left), (right, of_right) in itertools.product(left_names, right_names):
        yield of_left, of_right, f"{left} against {right}"


def units_by_place(placed: PlacedClaim, answers: StoredAnswers) -> list[Unit]:
    """Return a unit for each place and pair of candidates.

    With units=count it is one for each pair of experts there.
    """
    import numpy as np

    units = []
    for left, right, name in candidates(placed):
        for place, of_left, of_right in zip(placed.places, left, right, strict=True):
            comparison = compare_sides(placed, answers, [of_left], [of_right])
            if placed.claim.units == "each" or not placed.axes:
                units.append(Unit(f"{place} {name}", comparison.contrast(), *comparison.values))
                continue
            pairs = comparison.differences()
            for pair in np.ndindex(pairs.shape[:-1]):
                contrast = comparison.frame.contrast(pairs[pair], comparison.bound)
                levels = ",".join(str(level + 1) for level in pair)
                units.append(Unit(f"{place} {name} {levels}", contrast, *comparison.values))
    return units


def judge_fact_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on facts that runs recorded, over the trainings of the named axes.

    A fact's unit counts as points.
    """
    import numpy as np

    claim = placed.claim
    left = np.mean(facts_of(placed, answers, placed.left[0]), axis=0)
    right = np.mean(facts_of(placed, answers, placed.right[0]), axis=0)
    array = left - claim.factor * right
    values = ", ".join(f"{100 * value:+.3g}" for value in array.ravel())
    axes = " x ".join(placed.axes) or "one training a side"
    text = f"{array.size} of {axes}: {values}"
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        text = f"fewer than three trainings, or all equal, show no variance; {text}"
        return Verdict(claim, NOT_TESTABLE, detail=text)
    contrast = contrast_of_trainings(array)
    return judge_difference(claim, contrast, float(left.mean()), float(right.mean()), text)


def judge_similarity(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on two kinds of trainings along the named axes.

    A training's profile is its facts at all places.
    """
    left = profiles_of(placed, answers, placed.left[0])
    right = profiles_of(placed, answers, placed.right[0])
    return judge_alike(placed.claim, ranks.profile_likeness(left, right))


def profiles_of(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> np.ndarray:
    import numpy as np

    facts = np.array(facts_of(placed, answers, cells))
    return facts.reshape(len(facts), -1).T


def facts_of(
    placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]
) -> list[np.ndarray]:
    """Return the fact at each place, as shares: arrays (levels of each axis ...)."""
    return [answers.value(cell, placed.axes) / 100 for cell in cells]


def place_values(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """Return the number of each place, as shares.

    If a cell shows the best of several candidates, the mean of the candidates is used. Otherwise
    the best of three equal trainings would have an advantage over a single training.
    """
    values = []
    for cell in cells:
        metric: str | None = placed.claim.metric
        if placed.claim.test == "spearman":
            metric = stored_metric(placed.plan, [cell])
        frame = answers.frame(placed.plan, [cell], metric or "")
        rows = [frame.rows[line.score, cell.pair] for line in lines_of([cell])]
        values.append(fmean(frame.means[rows, 0].tolist()))
    return values


def place_clusters(placed: PlacedClaim) -> Sequence[Any]:
    """Return the cluster of each place: its values of the named axes, or itself without axes."""
    if not placed.axes:
        return range(len(placed.places))
    clusters = []
    for cell in placed.left[0]:
        at = lines_of([cell])[0].item.at
        clusters.append(tuple(str(at.get(axis)) for axis in placed.axes))
    return clusters


def judge_ranks(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    import numpy as np

    scores = np.array([place_values(placed, answers, cells) for cells in placed.left]).T
    test = ranks.friedman(scores, place_clusters(placed))
    return judge_friedman(placed.claim, test, len(scores))


def ranked_pairs(placed: PlacedClaim, answers: StoredAnswers) -> list[Ranked]:
    """Return Wilcoxon tests of each left candidate against each right one, over the blocks."""
    import numpy as np

    claim = placed.claim
    names, sides = claim.left + claim.right, [*placed.left, *placed.right]
    values = {}
    for name, cells in zip(names, sides, strict=True):
        values[name] = np.array(place_values(placed, answers, cells))
    clusters = place_clusters(placed)
    ranked = []
    for left, right in itertools.product(claim.left, claim.right):
        differences = values[left] - values[right]
        p = ranks.wilcoxon(differences, clusters)
        mean = float(differences.mean())
        ranked.append(Ranked(left, right, mean, p, len(differences), len(set(clusters))))
    return ranked


def judge_correlations(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    left = place_values(placed, answers, placed.left[0])
    right = place_values(placed, answers, placed.right[0])
    outcome = place_values(placed, answers, placed.outcome)
    models = [lines_of([cell])[0].score.model for cell in placed.left[0]]
    groups = place_clusters(placed) if placed.axes else [()] * len(left)
    correlations = ranks.compare_correlations(left, right, outcome, groups, models)
    return judge_spearman(placed.claim, correlations, len(left))


JUDGES: dict[str, Callable[[PlacedClaim, StoredAnswers], Verdict]] = {
    "difference": judge_claimed_difference,
    "alike": judge_similarity,
    "friedman": judge_ranks,
    "spearman": judge_correlations,
}
