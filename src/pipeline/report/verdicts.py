"""The verdict on each claim about a table, computed from stored answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from pipeline.report.expression import is_plain_mean, leaf_cells, scores_under
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.questions import Questions, questions_of, stored_metric
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.stats import ranks
from pipeline.stats.contrast import Contrast, contrast_of_trainings
from pipeline.tables.plan import Cell, TablePlan

if TYPE_CHECKING:
    import numpy as np

Weights = Sequence[tuple[float, Cell]]

# ---------------------------------------------------------------------------------------------------- contrasts


@dataclass
class Comparison:
    """Left minus `factor` times right, each a weighted sum of cells, over the same questions. axes: those that are a
    sample."""

    questions: Questions
    left: Weights
    right: Weights
    axes: Sequence[str] = ()
    factor: float = 1.0

    @property
    def reach(self) -> float:
        """The largest possible difference; 2 for a gain, the difference of two differences."""
        weights = [weight for weight, _ in self.left] + [-self.factor * weight for weight, _ in self.right]
        ends = (math.fsum(max(0.0, sign * weight) for weight in weights) for sign in (1, -1))
        return round(max(ends), 12)

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing is chosen on these questions."""
        return all(is_plain_mean(self.questions.plan, cell) for cell in self.questions.cells)

    def sides(self, choose: Any, show: Any, axes: Sequence[str] = ()) -> tuple[Any, Any]:
        """(left, right) in `show` with the choices that `choose` makes; axes: those that are kept."""
        left, right = (
            sum(weight * self.questions.cell(cell, choose, show, axes) for weight, cell in side)
            for side in (self.left, self.right)
        )
        return left, right

    def difference(self, choose: Any, show: Any, axes: Sequence[str] = ()) -> Any:
        left, right = self.sides(choose, show, axes)
        return left - self.factor * right

    @property
    def values(self) -> tuple[float, float]:
        """(left, right) as observed."""
        left, right = self.sides(self.questions.means, self.questions.means)
        return float(left), float(right)

    def differences(self) -> np.ndarray:
        """Left minus right by question, (levels of each sampled axis ..., N); an axis of one value is dropped."""
        difference = self.difference(self.questions.means, self.questions.vectors, self.axes)
        return difference.reshape([*(size for size in difference.shape[:-1] if size > 1), difference.shape[-1]])

    @property
    def varied_axes(self) -> list[str]:
        """The axes that `differences` keeps: those of several values on a side."""
        leaves = [leaf for cell in self.questions.cells for leaf in leaf_cells(self.questions.plan, cell)]
        return [
            axis
            for axis in self.axes
            if any(len({item.at.get(axis) for item in leaf.items} - {None}) > 1 for leaf in leaves)
        ]

    def contrast(self) -> Contrast:
        """The contrast of left minus right. What is chosen is scored on the half that it was not chosen on."""
        estimate, draws = (None, None) if self.is_plain else self.questions.split_half(self.difference)
        return self.questions.contrast(self.differences(), estimate, draws, self.reach)


def comparisons(placed: PlacedClaim, answers: StoredAnswers, by_place: bool = False) -> list[tuple[str, Comparison]]:
    """(name, comparison) of each candidate a side, over the mean of all places or at each one: every one has to be on
    the claim's side, so that nothing is chosen. A gain has its places on the left, those of `than` on the right."""
    claim, than, comparisons_by_name = placed.claim, placed.than, []
    indices = range(len(placed.places))
    lefts, rights = (list(zip(names if len(names) > 1 else [""], cells, strict=True))
                     for names, cells in ((claim.left, placed.left), (claim.right, placed.right)))  # fmt: skip
    groups: list[Sequence[int]] = [[index] for index in indices] if by_place else [indices]
    for (left_name, left), (right_name, right), group in itertools.product(lefts, rights, groups):
        weights = [mean_weights([cells[index] for index in group]) for cells in (left, right)]
        if than:
            weights = [[*mean_weights(part.left[0]), *mean_weights(part.right[0], -1)] for part in (placed, than)]
        candidates = " against ".join(filter(None, [left_name, right_name]))
        name = " ".join(filter(None, [placed.places[group[0]] if by_place else "", candidates]))
        factor = 1 + claim.threshold / 100 if claim.relative else 1.0
        cells = [cell for side in weights for _, cell in side]
        questions = questions_of(placed.plan, answers, cells, claim.metric)
        comparisons_by_name.append((name, Comparison(questions, weights[0], weights[1], placed.axes, factor)))
    return comparisons_by_name


def mean_weights(cells: Sequence[Cell], sign: int = 1) -> list[tuple[float, Cell]]:
    return [(sign / len(cells), cell) for cell in cells]


# ---------------------------------------------------------------------------------------------------- judging


def judge_claims(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """The verdict on each claim about a table, in the files' order.

    A claim that a smaller table of the same name cannot answer (one seed alone) gets no verdict, but a reason.
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
    """The verdict on a difference by its units: the mean over all places (of several candidates a side each must be on
    the claim's side), each place, or how many places, or pairs of experts, are on its side."""
    claim = placed.claim
    if claim.metric == FACT:
        return judge_fact_difference(placed, answers)
    units = units_of(placed, answers, by_place=claim.units == "each")
    if claim.units == "each":
        return judge_every(claim, units)
    verdict = judge_every(claim, units) if len(units) > 1 else judge_difference(claim, *units[0][1:])
    if claim.units == "count":
        return judge_wins(claim, units_of(placed, answers, True, bool(placed.axes)), verdict, bool(placed.axes))
    return verdict


def units_of(placed: PlacedClaim, answers: StoredAnswers, by_place: bool, experts: bool = False) -> list[Unit]:
    """Each candidate a side, over the mean of all places or at each one; of experts each pair."""
    import numpy as np

    units: list[Unit] = []
    for name, comparison in comparisons(placed, answers, by_place):
        if not experts:
            units.append(Unit(name, comparison.contrast(), *comparison.values))
            continue
        pairs = comparison.differences()
        for pair in np.ndindex(pairs.shape[:-1]):
            levels = (f"{axis}{level + 1}" for axis, level in zip(comparison.varied_axes, pair, strict=True))
            contrast = comparison.questions.contrast(pairs[pair], None, None, comparison.reach)
            units.append(Unit(" ".join(filter(None, [name, *levels])), contrast, *comparison.values))
    return units


def judge_fact_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on facts that runs recorded, over the trainings of the named axes; a fact's own unit counts as points."""
    import numpy as np

    left, right = (np.mean(facts_of(placed, answers, cells), axis=0) for (cells,) in (placed.left, placed.right))
    claim = placed.claim
    array = left - (1 + claim.threshold / 100 if claim.relative else 1) * right
    text = f"{array.size} of {' x '.join(placed.axes) or 'one training a side'}: "
    text += ", ".join(f"{100 * value:+.3g}" for value in array.ravel())
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        text = f"fewer than three trainings, or all alike, show no variance; {text}"
        return Verdict(claim, NOT_TESTABLE, detail=text)
    return judge_difference(claim, contrast_of_trainings(array), float(left.mean()), float(right.mean()), text)


def judge_similarity(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on two kinds of trainings along the named axes: a training's profile is its facts at all places."""
    import numpy as np

    sides = [np.array(facts_of(placed, answers, cells)) for (cells,) in (placed.left, placed.right)]
    return judge_alike(placed.claim, ranks.profile_likeness(*(side.reshape(len(side), -1).T for side in sides)))


def facts_of(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[np.ndarray]:
    """The fact at each place, as shares: arrays (levels of each axis ...)."""
    import numpy as np

    return [np.asarray(answers.value(cell, placed.axes)) / 100 for cell in cells]


def place_values(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """The number of each place, as shares. A cell that shows the best of several counts with their mean: the best of
    three equal trainings has an advantage over one, also on questions that did not choose it."""
    values = []
    for cell in cells:
        metric = stored_metric(placed.plan, [cell]) if placed.claim.test == "spearman" else placed.claim.metric
        questions = questions_of(placed.plan, answers, [cell], metric or "")
        values.append(fmean([questions.means[score, leaf.pair] for leaf, score in scores_under(placed.plan, cell)]))
    return values


def place_clusters(placed: PlacedClaim) -> list[tuple[Any, ...]] | None:
    """The cluster of each place, its values of the named axes; None without axes."""
    if not placed.axes:
        return None
    first = [next(leaf_cells(placed.plan, cell)).items[0].at for cell in placed.left[0]]
    return [tuple(str(at.get(axis)) for axis in placed.axes) for at in first]


def judge_ranks(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    import numpy as np

    scores = np.array([place_values(placed, answers, cells) for cells in placed.left]).T
    return judge_friedman(placed.claim, ranks.friedman(scores, place_clusters(placed)), len(scores))


def ranked_pairs(placed: PlacedClaim, answers: StoredAnswers) -> list[Ranked]:
    """Wilcoxon tests of each left candidate against each right one, over the blocks."""
    import numpy as np

    values = {
        name: np.array(place_values(placed, answers, cells))
        for name, cells in zip(placed.claim.left + placed.claim.right, [*placed.left, *placed.right], strict=True)
    }
    clusters: Sequence[Any] = place_clusters(placed) or range(len(placed.places))
    ranked = []
    for left in placed.claim.left:
        for right in placed.claim.right:
            differences = values[left] - values[right]
            p = ranks.wilcoxon(differences, clusters)
            ranked.append(Ranked(left, right, float(differences.mean()), p, len(differences), len(set(clusters))))
    return ranked


def judge_correlations(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    left, right, outcome = (
        place_values(placed, answers, cells) for cells in (placed.left[0], placed.right[0], placed.outcome)
    )
    models = [next(iter(cell.items[0].readings[0].values())).model for cell in placed.left[0]]
    groups = place_clusters(placed) or [()] * len(left)
    return judge_spearman(placed.claim, ranks.compare_correlations(left, right, outcome, groups, models), len(left))


JUDGES = {
    "difference": judge_claimed_difference,
    "alike": judge_similarity,
    "friedman": judge_ranks,
    "spearman": judge_correlations,
}
