"""The verdict on each claim about a table, computed from stored answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.claims import FACT, NOT_MADE, NOT_TESTABLE, Claim, Verdict
from pipeline.report.expression import lines_of
from pipeline.report.frame import Comparison, NoScore
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


def candidate_names(claim: Claim, left: int, right: int) -> list[str]:
    """Return the names of two candidates as one text.

    A side with a single candidate is left out. The list is empty if both sides are.
    """
    names = []
    if len(claim.left) > 1:
        names.append(claim.left[left])
    if len(claim.right) > 1:
        names.append(claim.right[right])
    if names:
        return [" against ".join(names)]
    return []


def compare_candidates(
    placed: PlacedClaim, answers: StoredAnswers, left: int, right: int, places: Sequence[int]
) -> Comparison:
    """Compare a left candidate with a right one, over the mean of some places."""
    claim, than = placed.claim, placed.than
    if than:
        left_weights = gain_weights(placed)
        right_weights = gain_weights(than)
    else:
        left_weights = mean_weights([placed.left[left][place] for place in places])
        right_weights = mean_weights([placed.right[right][place] for place in places])
    cells = [cell for _, cell in (*left_weights, *right_weights)]
    frame = answers.frame(placed.plan, cells, claim.metric)
    factor = 1 + claim.threshold / 100 if claim.relative else 1.0
    return Comparison(frame, left_weights, right_weights, placed.axes, factor)


def gain_weights(placed: PlacedClaim) -> list[tuple[float, Cell]]:
    return [*mean_weights(placed.left[0]), *mean_weights(placed.right[0], -1)]


def mean_weights(cells: Sequence[Cell], sign: int = 1) -> list[tuple[float, Cell]]:
    return [(sign / len(cells), cell) for cell in cells]


# --- judging ---


def judge_claims(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """Return the verdict on each claim about a table, in the files' order.

    A claim that a smaller table of the same name cannot answer has a reason instead of a verdict.
    """
    claims = claims_of(plan.table.name)
    verdicts: dict[str, Verdict] = {}
    signed_ranks: list[tuple[Claim, list[Ranked]]] = []
    for claim in claims:
        try:
            placed = PlacedClaim.of(claim, plan)
        except PipelineError as error:
            verdicts[claim.id] = Verdict(claim, NOT_MADE, detail=str(error))
            continue
        try:
            if placed.untestable:
                verdicts[claim.id] = Verdict(claim, NOT_TESTABLE, detail=placed.untestable)
            elif claim.test == "wilcoxon":
                signed_ranks.append((claim, ranked_pairs(placed, answers)))
            else:
                verdicts[claim.id] = JUDGES[claim.test](placed, answers)
        except NoScore as error:
            verdicts[claim.id] = Verdict(claim, NOT_MADE, detail=str(error))
    verdicts |= {verdict.claim.id: verdict for verdict in judge_wilcoxon(signed_ranks)}
    return [verdicts[claim.id] for claim in claims]


def judge_claimed_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on a difference by its units.

    The unit is the mean over all places, or with units=each a single place. With units=count, the
    places, or the pairs of experts, on the claim's side are also counted. If a side has several
    candidates, the claim must hold for each.
    """
    claim = placed.claim
    if claim.metric == FACT:
        return judge_fact_difference(placed, answers)
    units = units_of(placed, answers, by_place=claim.units == "each")
    if claim.units == "each" or len(units) > 1:
        verdict = judge_every(claim, units)
    else:
        (unit,) = units
        verdict = judge_difference(claim, unit.contrast, unit.left, unit.right)
    if claim.units == "count":
        experts = bool(placed.axes)
        counted = units_of(placed, answers, True, experts)
        return judge_wins(claim, counted, verdict, experts)
    return verdict


def units_of(
    placed: PlacedClaim, answers: StoredAnswers, by_place: bool, experts: bool = False
) -> list[Unit]:
    """Return the units of a claim, for each pair of candidates.

    All pairs have to be on the claim's side, so no pair is chosen.

    Args:
        placed: The claim.
        answers: The stored answers.
        by_place: True for a unit at each place, otherwise over the mean of all places.
        experts: True for a unit for each pair of experts.
    """
    import numpy as np

    groups: list[Sequence[int]] = [range(len(placed.places))]
    if by_place:
        groups = [[place] for place in range(len(placed.places))]
    candidates = itertools.product(range(len(placed.left)), range(len(placed.right)))
    units: list[Unit] = []
    for (left, right), group in itertools.product(candidates, groups):
        words = candidate_names(placed.claim, left, right)
        if by_place:
            words.insert(0, placed.places[group[0]])
        comparison = compare_candidates(placed, answers, left, right, group)
        if not experts:
            units.append(Unit(" ".join(words), comparison.contrast(), *comparison.values))
            continue
        frame, pairs, axes = comparison.frame, comparison.differences(), comparison.varied
        for pair in np.ndindex(pairs.shape[:-1]):
            levels = [f"{axis}{level + 1}" for axis, level in zip(axes, pair, strict=True)]
            contrast = frame.contrast(pairs[pair], comparison.bound)
            units.append(Unit(" ".join([*words, *levels]), contrast, *comparison.values))
    return units


def judge_fact_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on facts that runs recorded, over the trainings of the named axes.

    A fact's unit counts as points.
    """
    import numpy as np

    claim = placed.claim
    left = np.mean(facts_of(placed, answers, placed.left[0]), axis=0)
    right = np.mean(facts_of(placed, answers, placed.right[0]), axis=0)
    scaled = right
    if claim.relative:
        scaled = (1 + claim.threshold / 100) * right
    array = left - scaled
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
    import numpy as np

    return [np.asarray(answers.value(cell, placed.axes)) / 100 for cell in cells]


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
        lines = lines_of(placed.plan, [cell])
        rows = [frame.rows[line.score, line.leaf.pair] for line in lines]
        values.append(fmean(frame.means[rows, 0].tolist()))
    return values


def place_clusters(placed: PlacedClaim) -> list[tuple[Any, ...]] | None:
    """Return the cluster of each place, its values of the named axes; None without axes."""
    if not placed.axes:
        return None
    clusters = []
    for cell in placed.left[0]:
        at = lines_of(placed.plan, [cell])[0].item.at
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
    clusters: Sequence[Any] = place_clusters(placed) or range(len(placed.places))
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
    models = [lines_of(placed.plan, [cell])[0].score.model for cell in placed.left[0]]
    groups = place_clusters(placed) or [()] * len(left)
    correlations = ranks.compare_correlations(left, right, outcome, groups, models)
    return judge_spearman(placed.claim, correlations, len(left))


JUDGES: dict[str, Callable[[PlacedClaim, StoredAnswers], Verdict]] = {
    "difference": judge_claimed_difference,
    "alike": judge_similarity,
    "friedman": judge_ranks,
    "spearman": judge_correlations,
}
