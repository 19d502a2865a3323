"""The verdict on each claim about a table, computed from stored answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.claims import (
    FACT,
    NOT_MADE,
    NOT_TESTABLE,
    Claim,
    Ranked,
    Unit,
    Verdict,
    correct_verdicts,
    judge_alike,
    judge_difference,
    judge_every,
    judge_friedman,
    judge_spearman,
    judge_wilcoxon,
    judge_wins,
)
from pipeline.report.expression import lines_of
from pipeline.report.frame import Comparison, NoScore, varied_axes
from pipeline.report.metrics import stored_metric
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.stored import StoredAnswers
from pipeline.stats import ranks
from pipeline.stats.contrast import contrast_of_trainings
from pipeline.tables.plan import Cell, TablePlan

if TYPE_CHECKING:
    import numpy as np


def comparisons(
    placed: PlacedClaim, answers: StoredAnswers, by_place: bool = False
) -> list[tuple[str, Comparison]]:
    """Return (name, comparison) of each candidate a side, over the mean of all places or at each
    one.

    Every one has to be on the claim's side, so that nothing is chosen. A gain has its places on the
    left, those of `than` on the right.
    """
    claim, than = placed.claim, placed.than
    places = range(len(placed.places))
    if by_place:
        groups: list[Sequence[int]] = [[place] for place in places]
    else:
        groups = [places]
    named = []
    for left, right, group in itertools.product(
        range(len(placed.left)), range(len(placed.right)), groups
    ):
        sides = [placed.left[left], placed.right[right]]
        weights = [mean_weights([cells[place] for place in group]) for cells in sides]
        if than:
            weights = [
                [*mean_weights(part.left[0]), *mean_weights(part.right[0], -1)]
                for part in (placed, than)
            ]
        candidates = []
        if len(claim.left) > 1:
            candidates = [claim.left[left]]
        if len(claim.right) > 1:
            candidates += [claim.right[right]]
        words = []
        if by_place:
            words = [placed.places[group[0]]]
        if candidates:
            words += [" against ".join(candidates)]
        frame = answers.frame(
            placed.plan, [cell for side in weights for _, cell in side], claim.metric
        )
        factor = 1.0
        if claim.relative:
            factor = 1 + claim.threshold / 100
        named.append(
            (" ".join(words), Comparison(frame, weights[0], weights[1], placed.axes, factor))
        )
    return named


def mean_weights(cells: Sequence[Cell], sign: int = 1) -> list[tuple[float, Cell]]:
    return [(sign / len(cells), cell) for cell in cells]


# --- judging ---


def judge_claims(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """Return the verdict on each claim about a table, in the files' order.

    A claim that a smaller table of the same name cannot answer (one seed alone) gets no verdict,
    but a reason.
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
    return correct_verdicts([verdicts[claim.id] for claim in claims])


def judge_claimed_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Return the verdict on a difference by its units.

    A unit is the mean over all places, each place, or how many places, or pairs of experts, are on
    the claim's side. Of several candidates a side, each must be on it.
    """
    claim = placed.claim
    if claim.metric == FACT:
        return judge_fact_difference(placed, answers)
    units = units_of(placed, answers, by_place=claim.units == "each")
    if claim.units == "each":
        return judge_every(claim, units)
    if len(units) > 1:
        verdict = judge_every(claim, units)
    else:
        verdict = judge_difference(claim, *units[0][1:])
    if claim.units == "count":
        return judge_wins(
            claim, units_of(placed, answers, True, bool(placed.axes)), verdict, bool(placed.axes)
        )
    return verdict


def units_of(
    placed: PlacedClaim, answers: StoredAnswers, by_place: bool, experts: bool = False
) -> list[Unit]:
    """Return each candidate a side, over the mean of all places or at each one; of experts each
    pair.
    """
    import numpy as np

    units: list[Unit] = []
    for name, comparison in comparisons(placed, answers, by_place):
        if not experts:
            units.append(Unit(name, comparison.contrast(), *comparison.values))
            continue
        frame, pairs = comparison.frame, comparison.differences()
        axes = varied_axes(frame.plan, frame.cells, comparison.axes)
        for pair in np.ndindex(pairs.shape[:-1]):
            words = [name] if name else []
            words += [f"{axis}{level + 1}" for axis, level in zip(axes, pair, strict=True)]
            units.append(
                Unit(
                    " ".join(words),
                    frame.contrast(pairs[pair], comparison.bound),
                    *comparison.values,
                )
            )
    return units


def judge_fact_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on facts that runs recorded, over the trainings of the named axes; a fact's own unit
    counts as points.
    """
    import numpy as np

    left, right = (
        np.mean(facts_of(placed, answers, cells), axis=0)
        for (cells,) in (placed.left, placed.right)
    )
    claim = placed.claim
    array = left - (1 + claim.threshold / 100 if claim.relative else 1) * right
    text = f"{array.size} of {' x '.join(placed.axes) or 'one training a side'}: "
    text += ", ".join(f"{100 * value:+.3g}" for value in array.ravel())
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        text = f"fewer than three trainings, or all alike, show no variance; {text}"
        return Verdict(claim, NOT_TESTABLE, detail=text)
    return judge_difference(
        claim, contrast_of_trainings(array), float(left.mean()), float(right.mean()), text
    )


def judge_similarity(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on two kinds of trainings along the named axes: a training's profile is its facts at
    all places.
    """
    import numpy as np

    sides = [np.array(facts_of(placed, answers, cells)) for (cells,) in (placed.left, placed.right)]
    return judge_alike(
        placed.claim, ranks.profile_likeness(*(side.reshape(len(side), -1).T for side in sides))
    )


def facts_of(
    placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]
) -> list[np.ndarray]:
    """Return the fact at each place, as shares: arrays (levels of each axis ...)."""
    import numpy as np

    return [np.asarray(answers.value(cell, placed.axes)) / 100 for cell in cells]


def place_values(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """Return the number of each place, as shares.

    A cell that shows the best of several counts with their mean: the best of three equal trainings
    has an advantage over one, also on questions that did not choose it.
    """
    values = []
    for cell in cells:
        if placed.claim.test == "spearman":
            metric = stored_metric(placed.plan, [cell])
        else:
            metric = placed.claim.metric
        frame = answers.frame(placed.plan, [cell], metric or "")
        rows = [frame.rows[line.score, line.leaf.pair] for line in lines_of(placed.plan, [cell])]
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
    return judge_friedman(placed.claim, ranks.friedman(scores, place_clusters(placed)), len(scores))


def ranked_pairs(placed: PlacedClaim, answers: StoredAnswers) -> list[Ranked]:
    """Wilcoxon tests of each left candidate against each right one, over the blocks."""
    import numpy as np

    values = {
        name: np.array(place_values(placed, answers, cells))
        for name, cells in zip(
            placed.claim.left + placed.claim.right, [*placed.left, *placed.right], strict=True
        )
    }
    clusters: Sequence[Any] = place_clusters(placed) or range(len(placed.places))
    ranked = []
    for left in placed.claim.left:
        for right in placed.claim.right:
            differences = values[left] - values[right]
            p = ranks.wilcoxon(differences, clusters)
            ranked.append(
                Ranked(
                    left, right, float(differences.mean()), p, len(differences), len(set(clusters))
                )
            )
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
