"""The verdict on each claim about a table, by code alone, from stored answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.stats import ranks, statistics
from pipeline.report.stats.claims import (
    FACT,
    Claim,
    Ranked,
    Verdict,
    correct_verdicts,
    judge_alike,
    judge_difference,
    judge_every,
    judge_friedman,
    judge_mcnemar,
    judge_spearman,
    judge_wilcoxon,
    judge_wins,
    not_made,
    not_testable,
)
from pipeline.report.stats.statistics import (
    Contrast,
    contrast,
    contrast_of_trainings,
    corpus_contrast,
    two_way_bootstrap,
)
from pipeline.results.cell_values import NoScore
from pipeline.results.placed_claims import PlacedClaim, claims_of, metrics_of, tasks_of
from pipeline.results.questions import (
    Both,
    Corpora,
    Questions,
    StoredAnswers,
    average,
    by_level,
    by_question,
    drawn,
    leaves,
    linear,
    pick,
    questions_of,
)
from pipeline.tables.plan import Cell, Item, TablePlan, item_value

if TYPE_CHECKING:
    import numpy as np

# ---------------------------------------------------------------------------------------------------- contrasts


@dataclass
class Sides:
    """Two sides over the same questions; of several candidates a side is the best in each draw."""

    asked: PlacedClaim
    questions: Questions

    @classmethod
    def of(cls, placed: PlacedClaim, answers: StoredAnswers) -> Sides:
        return cls(placed, questions_of(placed.plan, answers, placed.cells, placed.claim.metric))

    @property
    def keep(self) -> float:
        """How much of the right side is taken away: all, and N % more where the threshold is relative."""
        claim = self.asked.claim
        return 1 + claim.threshold / 100 if claim.relative else 1.0

    @property
    def reach(self) -> float:
        """The largest possible difference; of gains, each of which lies between -1 and 1, 2."""
        return 2.0 if self.asked.than else max(1.0, self.keep)

    @cached_property
    def plain(self) -> bool:
        """Whether nothing is chosen on these questions."""
        one_each = len(self.asked.left) == 1 and len(self.asked.right) == 1
        return one_each and all(linear(self.asked.plan, cell) for cell in self.asked.cells)

    def drawn(self, choosing: dict, shown: dict) -> tuple[np.ndarray, np.ndarray]:
        """(left, right) means over places in each draw."""

        def best(side: Sequence[Sequence[Cell]]) -> Both:
            plan = self.asked.plan
            return pick([average([drawn(plan, cell, choosing, shown) for cell in cells]) for cells in side])

        return best(self.asked.left)[1], best(self.asked.right)[1]

    @cached_property
    def values(self) -> tuple[float, float]:
        left, right = self.drawn(self.questions.observed, self.questions.observed)
        return float(left[0]), float(right[0])

    @cached_property
    def halves(self) -> tuple[float, float]:
        """Left and right, each chosen on one half of the problems and scored on the other, the mean of both ways."""
        half = self.questions.by_half
        left, right = self.drawn(half, {key: means[::-1] for key, means in half.items()})
        return float(left.mean()), float(right.mean())

    def side(self, candidates: Sequence[Sequence[Cell]], axes: Sequence[str]) -> np.ndarray:
        """(levels of each axis ..., N): the mean over places of the candidate that is best in all of them."""
        import numpy as np

        means = [
            np.mean(np.broadcast_arrays(*(by_question(self.questions, cell, axes) for cell in cells)), axis=0)
            for cells in candidates
        ]
        return max(means, key=np.mean)

    def each(self, candidates: Sequence[Sequence[Cell]]) -> np.ndarray:
        """(levels of each axis ..., N) at one place: the best candidate of each pair of experts."""
        import numpy as np

        axes = self.asked.axes
        stacked = np.stack(np.broadcast_arrays(*(by_question(self.questions, cell, axes) for (cell,) in candidates)))
        best = stacked.mean(axis=-1).argmax(axis=0)
        return np.take_along_axis(stacked, best[None, ..., None], axis=0)[0]

    def differences(self, axes: Sequence[str]) -> np.ndarray:
        """Left minus right by question; an axis of one value on both sides is left out."""
        difference = self.side(self.asked.left, axes) - self.keep * self.side(self.asked.right, axes)
        if self.asked.than:
            difference = difference - self.side(self.asked.than.left, axes) + self.side(self.asked.than.right, axes)
        return difference.reshape([*(size for size in difference.shape[:-1] if size > 1), difference.shape[-1]])

    def less(self, values: tuple[Any, Any]) -> Any:
        return values[0] - self.keep * values[1]

    def contrast(self) -> Contrast:
        """Left minus right. What is chosen is scored on the half that it was not chosen on."""
        array = self.differences(self.asked.axes)
        if self.plain:
            return self.contrast_of(array)
        return self.contrast_of(array, *self.questions.halved(lambda by, shown: self.less(self.drawn(by, shown))))

    def contrast_of(
        self, array: np.ndarray, estimate: float | None = None, draws: np.ndarray | None = None
    ) -> Contrast:
        """Of differences by question, or of what is observed of a corpus metric and then drawn."""
        if isinstance(self.questions, Corpora):
            return corpus_contrast(array[..., 0], array[..., 1:], self.questions.size, estimate, draws)
        return contrast(array, estimate, draws, reach=self.reach)

    def detail(self) -> str:
        """Wins per pair, what resampling each side alone gives, and what choosing makes, where there is any of it."""
        import numpy as np

        array, parts = self.differences(self.asked.axes), []
        if array.ndim > 1:
            pairs = array.mean(axis=-1)
            parts += [f"higher in {int((pairs > 0).sum())} of {pairs.size}, lower in {int((pairs < 0).sum())}"]
            parts += [f"pairs {', '.join(f'{100 * pair:+.1f}' for pair in pairs.ravel())}"]
        if array.ndim == 3 and not isinstance(self.questions, Corpora):
            names = (*(f"{axis} alone" for axis in self.asked.axes[:2]), "problems alone", "all jointly")
            drawn = zip(names, two_way_bootstrap(array), strict=True)
            parts += [f"resampling {name} {100 * low:+.1f} to {100 * high:+.1f}" for name, (low, high) in drawn]
        if not self.plain:
            low, high = np.quantile(self.less(self.drawn(self.questions.draws, self.questions.draws)), [0.025, 0.975])
            observed = 100 * self.less(self.values)
            parts += [
                "by split-half {:.1f} against {:.1f}".format(*(100 * value for value in self.halves)),
                f"chosen and scored on the same problems {observed:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            ]
        return "; ".join(parts)


# ---------------------------------------------------------------------------------------------------- judging


def judged(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """The verdict on each claim about a table, in the files' order.

    One that a smaller table of the same name cannot answer (one seed alone) is not made, and says why.
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
            if claim.test == "wilcoxon":
                signed_ranks.append((claim, ranked_pairs(placed, answers)))
            else:
                verdicts[claim.id] = JUDGES[claim.test](placed, answers)
        except NoScore as error:
            verdicts[claim.id] = not_made(claim, str(error))
    verdicts |= {verdict.id: verdict for verdict in judge_wilcoxon(signed_ranks)}
    return correct_verdicts(claims, [verdicts[claim.id] for claim in claims])


def difference(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    if placed.claim.metric == FACT:
        return of_facts(placed, answers)
    sides = Sides.of(placed, answers)
    return judge_difference(placed.claim, sides.contrast(), *sides.values, sides.detail())


def gain(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """How much more the left is above the right at these places than at the others; values are both differences."""
    assert placed.than is not None
    sides = Sides.of(placed, answers)
    inside, elsewhere = sides.values, Sides(placed.than, sides.questions).values
    return judge_difference(placed.claim, sides.contrast(), sides.less(inside), sides.less(elsewhere), sides.detail())


def of_facts(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of numbers that runs recorded, over the trainings of the named axes; a fact's own unit is told as points."""
    import numpy as np

    left, right = (np.mean(facts_of(placed, answers, cells), axis=0) for (cells,) in (placed.left, placed.right))
    claim = placed.claim
    array = left - (1 + claim.threshold / 100 if claim.relative else 1) * right
    text = f"{array.size} of {' x '.join(placed.axes) or 'one training a side'}: "
    text += ", ".join(f"{100 * value:+.3g}" for value in array.ravel())
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        return not_testable(claim, f"fewer than three trainings, or all alike, show no variance; {text}")
    return judge_difference(claim, contrast_of_trainings(array), float(left.mean()), float(right.mean()), text)


def alike(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of two kinds of trainings, those of the named axes: their facts at all places are a training's profile."""
    import numpy as np

    sides = [np.array(facts_of(placed, answers, cells)) for (cells,) in (placed.left, placed.right)]
    return judge_alike(placed.claim, ranks.profile_likeness(*(side.reshape(len(side), -1).T for side in sides)))


def facts_of(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[np.ndarray]:
    """(levels of each axis ...) of the fact of each place, as shares."""
    import numpy as np

    def fact_of(cell: Cell) -> Callable[[Item], np.ndarray]:
        values = answers.facts(cell)
        return lambda item: np.array([item_value(placed.plan, item, values) / 100])

    return [by_level(cell, placed.axes, fact_of(cell))[..., 0] for cell in cells]


def paired(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of two single models; of means over several, McNemar's test has no answer."""
    sides = Sides.of(placed, answers)
    left, right = (sides.side(cells, ()) for cells in (placed.left, placed.right))
    if not sides.plain or not {*left, *right} <= {0, 1}:
        raise placed.claim.refuse("mcnemar compares two single models on one set of problems: ask for difference")
    return judge_mcnemar(placed.claim, statistics.mcnemar(left, right), sides.contrast(), *sides.values)


def every(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Each place on its own, and each pair of experts where axes are named."""
    return judge_every(placed.claim, *units_of(placed, answers))


def wins(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """How many of these places, or pairs, are on the claim's side."""
    units, left, right = units_of(placed, answers)
    return judge_wins(placed.claim, units, Sides.of(placed, answers).contrast(), left, right)


def units_of(placed: PlacedClaim, answers: StoredAnswers) -> tuple[list[tuple[str, Contrast]], float, float]:
    """(name, contrast) of each unit, and the means of both sides over all places."""
    import numpy as np

    units: list[tuple[str, Contrast]] = []
    values = []
    for at, place in enumerate(placed.places):
        at_place = placed.at(at)
        sides = Sides.of(at_place, answers)
        values.append(sides.values)
        if not placed.axes:
            units.append((place, sides.contrast()))
            continue
        pairs = sides.each(at_place.left) - sides.keep * sides.each(at_place.right)
        for pair in np.ndindex(pairs.shape[:-1]):
            name = " ".join([place, *(f"{axis}{level + 1}" for axis, level in zip(placed.axes, pair, strict=True))])
            units.append((name, sides.contrast_of(pairs[pair])))
    left, right = np.mean(values, axis=0)
    return units, float(left), float(right)


def place_values(placed: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """The number of each place, as shares. A cell that shows the best of several counts with their mean: the best of
    three equal trainings is better than one, also on questions that did not choose it."""
    values = []
    for cell in cells:
        metric = placed.claim.metric
        if placed.claim.test == "spearman":
            metric = metrics_of(str(next(iter(tasks_of(placed.plan, cell)))))[0]
        questions = questions_of(placed.plan, answers, [cell], metric)
        values.append(mean_of_candidates(questions, cell))
    return values


def mean_of_candidates(questions: Questions, cell: Cell) -> float:
    means = [
        questions.observed[score, leaf.pair][0]
        for leaf in leaves(questions.plan, cell)
        for item in leaf.items
        for reading in item.readings
        for score in reading.values()
    ]
    return float(sum(means) / len(means))


def clusters(placed: PlacedClaim) -> list[tuple[Any, ...]] | None:
    """Which places belong together: those of the same values of the named axes."""
    if not placed.axes:
        return None
    first = [next(leaves(placed.plan, cell)).items[0].at for cell in placed.left[0]]
    return [tuple(str(at.get(axis)) for axis in placed.axes) for at in first]


def friedman(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    import numpy as np

    scores = np.array([place_values(placed, answers, cells) for cells in placed.left]).T
    return judge_friedman(placed.claim, ranks.friedman(scores, clusters(placed)), len(scores))


def ranked_pairs(placed: PlacedClaim, answers: StoredAnswers) -> list[Ranked]:
    """Each of left against each of right, over the blocks."""
    import numpy as np

    values = {
        name: np.array(place_values(placed, answers, cells))
        for name, cells in zip(placed.claim.left + placed.claim.right, [*placed.left, *placed.right], strict=True)
    }
    of: Sequence[Any] = clusters(placed) or range(len(placed.places))
    ranked = []
    for left in placed.claim.left:
        for right in placed.claim.right:
            differences = values[left] - values[right]
            p = ranks.wilcoxon(differences, of)
            ranked.append(Ranked(left, right, float(differences.mean()), p, len(differences), len(set(of))))
    return ranked


def spearman(placed: PlacedClaim, answers: StoredAnswers) -> Verdict:
    left, right, outcome = (
        place_values(placed, answers, cells) for cells in (placed.left[0], placed.right[0], placed.outcome)
    )
    models = [next(iter(cell.items[0].readings[0].values())).model for cell in placed.left[0]]
    groups = clusters(placed) or [()] * len(left)
    return judge_spearman(placed.claim, ranks.compare_correlations(left, right, outcome, groups, models), len(left))


JUDGES = {"difference": difference, "gain": gain, "alike": alike, "every": every, "wins": wins, "mcnemar": paired,
          "friedman": friedman, "spearman": spearman}  # fmt: skip
