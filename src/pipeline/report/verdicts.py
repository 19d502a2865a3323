"""The verdict on each claim about a table, computed from stored answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.cell_values import NoScore
from pipeline.report.claims import (
    FACT,
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
    not_made,
    not_testable,
)
from pipeline.report.expression import average, evaluate, is_plain_mean, leaf_cells, scores_under
from pipeline.report.placed_claims import PlacedClaim, claims_of, metrics_of, tasks_of
from pipeline.report.questions import Questions, StoredAnswers, questions_of
from pipeline.stats import ranks
from pipeline.stats.statistics import Contrast, contrast_of_trainings
from pipeline.tables.plan import Cell, TablePlan

if TYPE_CHECKING:
    import numpy as np

# ---------------------------------------------------------------------------------------------------- contrasts


@dataclass
class Sides:
    """Two sides, of one candidate each, over the same questions."""

    placed: PlacedClaim
    questions: Questions

    @classmethod
    def of(cls, placed: PlacedClaim, answers: StoredAnswers) -> Sides:
        return cls(placed, questions_of(placed.plan, answers, placed.all_cells, placed.claim.metric))

    @property
    def right_weight(self) -> float:
        """The factor of the right side in the difference: 1, and N % more if the threshold is relative."""
        claim = self.placed.claim
        return 1 + claim.threshold / 100 if claim.relative else 1.0

    @property
    def largest_difference(self) -> float:
        """The largest possible difference; 2 for a gain, the difference of two differences."""
        return 2.0 if self.placed.than else max(1.0, self.right_weight)

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing is chosen on these questions."""
        return all(is_plain_mean(self.placed.plan, cell) for cell in self.placed.all_cells)

    def side(self, side: Sequence[Sequence[Cell]], choose: Any, show: Any, axes: Sequence[str] = ()) -> Any:
        """The mean of a side over places, in `show` with the choices that `choose` makes; axes: those that are kept."""
        (cells,) = side
        return average([self.questions.cell(cell, choose, show, axes) for cell in cells])

    def difference(self, choose: Any, show: Any, axes: Sequence[str] = ()) -> Any:
        """Left minus right, less the same at the places of `than`."""
        placed, than = self.placed, self.placed.than
        left, right = (self.side(side, choose, show, axes) for side in (placed.left, placed.right))
        difference = left - self.right_weight * right
        if than:
            difference = (
                difference - self.side(than.left, choose, show, axes) + self.side(than.right, choose, show, axes)
            )
        return difference

    @cached_property
    def values(self) -> tuple[float, float]:
        """(left, right) as observed; of a gain the differences at its places and at those of `than`."""
        means, than = self.questions.means, self.placed.than
        left, right = (float(self.side(side, means, means)) for side in (self.placed.left, self.placed.right))
        if not than:
            return left, right
        sides = [float(self.side(side, means, means)) for side in (than.left, than.right)]
        return left - right, sides[0] - sides[1]

    def differences(self) -> np.ndarray:
        """Left minus right by question, (levels of each sampled axis ..., N); an axis of one value is dropped."""
        questions = self.questions
        difference = self.difference(questions.means, questions.vectors, self.placed.axes)
        return difference.reshape([*(size for size in difference.shape[:-1] if size > 1), difference.shape[-1]])

    @property
    def varied_axes(self) -> list[str]:
        """The axes that `differences` keeps: those of several values on a side."""
        leaves = [leaf for cell in self.placed.all_cells for leaf in leaf_cells(self.placed.plan, cell)]
        return [
            axis
            for axis in self.placed.axes
            if any(len({item.at[axis] for item in leaf.items if axis in item.at}) > 1 for leaf in leaves)
        ]

    def contrast(self) -> Contrast:
        """The contrast of left minus right. What is chosen is scored on the half that it was not chosen on."""
        estimate, draws = (None, None) if self.is_plain else self.questions.split_half(self.difference)
        return self.questions.contrast(self.differences(), estimate, draws, self.largest_difference)

    def describe_detail(self) -> str:
        """Wins per pair, and the effect of choosing, where they apply."""
        import numpy as np

        questions, array, parts = self.questions, self.differences(), []
        if array.ndim > 1:
            pairs = array.mean(axis=-1)
            parts += [f"higher in {int((pairs > 0).sum())} of {pairs.size}, lower in {int((pairs < 0).sum())}"]
            parts += [f"pairs {', '.join(f'{100 * pair:+.1f}' for pair in pairs.ravel())}"]
        if not self.is_plain:
            low, high = np.quantile(self.difference(questions.draws, questions.draws), [0.025, 0.975])
            observed, other = questions.halves, {key: means[::-1] for key, means in questions.halves.items()}
            halves = [
                float(np.mean(self.side(side, observed, other))) for side in (self.placed.left, self.placed.right)
            ]
            whole = 100 * float(self.difference(questions.means, questions.means))
            parts += [
                f"by split-half {100 * halves[0]:.1f} against {100 * halves[1]:.1f}",
                f"chosen and scored on the same problems {whole:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            ]
        return "; ".join(parts)


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
            verdicts[claim.id] = not_made(claim, str(error))
            continue
        try:
            if claim.test == "wilcoxon" and not placed.untestable:
                signed_ranks.append((claim, ranked_pairs(placed, answers)))
            else:
                verdicts[claim.id] = judge(placed, answers)
        except NoScore as error:
            verdicts[claim.id] = not_made(claim, str(error))
    verdicts |= {verdict.id: verdict for verdict in judge_wilcoxon(signed_ranks)}
    return correct_verdicts(claims, [verdicts[claim.id] for claim in claims])


def judge(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """The verdict on a claim, of any test but wilcoxon."""
    if placed.untestable:
        return not_testable(placed.claim, placed.untestable)
    return JUDGES[placed.claim.test](placed, answers)


def judge_claimed_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """The verdict on a difference by its units: the mean over all places, each place, or how many are on its side."""
    how = {"each": judge_each_unit, "count": judge_unit_wins}.get(placed.claim.units, judge_contrast)
    return how(placed, answers)


def judge_contrast(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """The verdict on the mean over all places; of several candidates a side each must be on the claim's side."""
    if placed.claim.metric == FACT:
        return judge_fact_difference(placed, answers)
    if len(pairs := placed.by_pair()) > 1:
        return judge_every(placed.claim, [unit_of(name, pair, answers) for name, pair in pairs])
    sides = Sides.of(placed, answers)
    return judge_difference(placed.claim, sides.contrast(), *sides.values, sides.describe_detail())


def unit_of(name: str, placed: PlacedClaim, answers: StoredAnswers) -> Unit:
    sides = Sides.of(placed, answers)
    return Unit(name, sides.contrast(), *sides.values)


def judge_fact_difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on facts that runs recorded, over the trainings of the named axes; a fact's own unit counts as points."""
    import numpy as np

    left, right = (np.mean(facts_of(placed, answers, cells), axis=0) for (cells,) in (placed.left, placed.right))
    claim = placed.claim
    array = left - (1 + claim.threshold / 100 if claim.relative else 1) * right
    text = f"{array.size} of {' x '.join(placed.axes) or 'one training a side'}: "
    text += ", ".join(f"{100 * value:+.3g}" for value in array.ravel())
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        return not_testable(claim, f"fewer than three trainings, or all alike, show no variance; {text}")
    return judge_difference(claim, contrast_of_trainings(array), float(left.mean()), float(right.mean()), text)


def judge_similarity(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on two kinds of trainings along the named axes: a training's profile is its facts at all places."""
    import numpy as np

    sides = [np.array(facts_of(placed, answers, cells)) for (cells,) in (placed.left, placed.right)]
    return judge_alike(placed.claim, ranks.profile_likeness(*(side.reshape(len(side), -1).T for side in sides)))


def facts_of(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[np.ndarray]:
    """The fact at each place, as shares: arrays (levels of each axis ...)."""
    import numpy as np

    def fact_of(cell: Cell, key: Any) -> float:
        return float(answers.fact_numbers(cell)(key)) / 100

    return [np.asarray(evaluate(placed.plan, cell, fact_of, fact_of, placed.axes)[1]) for cell in cells]


def judge_each_unit(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on each place, and on each candidate a side, over the named axes."""
    units = [
        unit_of(" ".join(filter(None, [place, name])), pair.at_place(index), answers)
        for name, pair in placed.by_pair()
        for index, place in enumerate(placed.places)
    ]
    return judge_every(placed.claim, units)


def judge_unit_wins(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Verdict on how many of these places, or pairs of experts, agree with the claim."""
    units = [unit for name, pair in placed.by_pair() for unit in units_of(name, pair, answers)]
    return judge_wins(placed.claim, units, judge_contrast(placed, answers), bool(placed.axes))


def units_of(candidates: str, placed: PlacedClaim, answers: StoredAnswers) -> list[Unit]:
    """Each place, and pair of experts where axes are named, of one candidate a side."""
    import numpy as np

    units: list[Unit] = []
    for index, place in enumerate(placed.places):
        at_place = placed.at_place(index)
        if not placed.axes:
            units.append(unit_of(" ".join(filter(None, [place, candidates])), at_place, answers))
            continue
        sides = Sides.of(at_place, answers)
        pairs = sides.differences()
        for pair in np.ndindex(pairs.shape[:-1]):
            levels = (f"{axis}{level + 1}" for axis, level in zip(sides.varied_axes, pair, strict=True))
            name = " ".join(filter(None, [place, candidates, *levels]))
            contrast = sides.questions.contrast(pairs[pair], None, None, sides.largest_difference)
            units.append(Unit(name, contrast, *sides.values))
    return units


def place_values(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """The number of each place, as shares. A cell that shows the best of several counts with their mean: the best of
    three equal trainings has an advantage over one, also on questions that did not choose it."""
    values = []
    for cell in cells:
        metric = placed.claim.metric
        if placed.claim.test == "spearman":
            metric = metrics_of(str(next(iter(tasks_of(placed.plan, cell)))))[0]
        questions = questions_of(placed.plan, answers, [cell], metric)
        values.append(mean_of_candidates(questions, cell))
    return values


def mean_of_candidates(questions: Questions, cell: Cell) -> float:
    means = [questions.means[score, leaf.pair] for leaf, score in scores_under(questions.plan, cell)]
    return float(sum(means) / len(means))


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
