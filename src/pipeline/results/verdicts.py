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
    corrected,
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
    def of(cls, asked: PlacedClaim, answers: StoredAnswers) -> Sides:
        return cls(asked, questions_of(asked.plan, answers, asked.cells, asked.claim.metric))

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

        found = [
            np.mean(np.broadcast_arrays(*(by_question(self.questions, cell, axes) for cell in cells)), axis=0)
            for cells in candidates
        ]
        return max(found, key=np.mean)

    def each(self, candidates: Sequence[Sequence[Cell]]) -> np.ndarray:
        """(levels of each axis ..., N) at one place: the best candidate of each pair of experts."""
        import numpy as np

        axes = self.asked.axes
        both = np.stack(np.broadcast_arrays(*(by_question(self.questions, cell, axes) for (cell,) in candidates)))
        best = both.mean(axis=-1).argmax(axis=0)
        return np.take_along_axis(both, best[None, ..., None], axis=0)[0]

    def differences(self, axes: Sequence[str]) -> np.ndarray:
        """Left minus right by question; an axis of one value on both sides is left out."""
        both = self.side(self.asked.left, axes) - self.keep * self.side(self.asked.right, axes)
        if self.asked.than:
            both = both - self.side(self.asked.than.left, axes) + self.side(self.asked.than.right, axes)
        return both.reshape([*(size for size in both.shape[:-1] if size > 1), both.shape[-1]])

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

        array, told = self.differences(self.asked.axes), []
        if array.ndim > 1:
            pairs = array.mean(axis=-1)
            told += [f"higher in {int((pairs > 0).sum())} of {pairs.size}, lower in {int((pairs < 0).sum())}"]
            told += [f"pairs {', '.join(f'{100 * one:+.1f}' for one in pairs.ravel())}"]
        if array.ndim == 3 and not isinstance(self.questions, Corpora):
            names = (*(f"{axis} alone" for axis in self.asked.axes[:2]), "problems alone", "all jointly")
            drawn = zip(names, two_way_bootstrap(array), strict=True)
            told += [f"resampling {name} {100 * low:+.1f} to {100 * high:+.1f}" for name, (low, high) in drawn]
        if not self.plain:
            low, high = np.quantile(self.less(self.drawn(self.questions.draws, self.questions.draws)), [0.025, 0.975])
            apart = 100 * self.less(self.values)
            told += [
                "by split-half {:.1f} against {:.1f}".format(*(100 * value for value in self.halves)),
                f"chosen and scored on the same problems {apart:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            ]
        return "; ".join(told)


# ---------------------------------------------------------------------------------------------------- judging


def judged(plan: TablePlan, answers: StoredAnswers) -> list[Verdict]:
    """The verdict on each claim about a table, in the files' order.

    One that a smaller table of the same name cannot answer (one seed alone) is not made, and says why.
    """
    claims = claims_of(plan.table.name)
    found: dict[str, Verdict] = {}
    signed_ranks: list[tuple[Claim, list[Ranked]]] = []
    for claim in claims:
        try:
            asked = PlacedClaim.of(claim, plan)
        except PipelineError as error:
            found[claim.id] = not_made(claim, str(error))
            continue
        try:
            if claim.test == "wilcoxon":
                signed_ranks.append((claim, ranked_pairs(asked, answers)))
            else:
                found[claim.id] = JUDGES[claim.test](asked, answers)
        except NoScore as error:
            found[claim.id] = not_made(claim, str(error))
    found |= {verdict.id: verdict for verdict in judge_wilcoxon(signed_ranks)}
    return corrected(claims, [found[claim.id] for claim in claims])


def difference(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    if asked.claim.metric == FACT:
        return of_facts(asked, answers)
    sides = Sides.of(asked, answers)
    return judge_difference(asked.claim, sides.contrast(), *sides.values, sides.detail())


def gain(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """How much more the left is above the right at these places than at the others; values are both differences."""
    assert asked.than is not None
    sides = Sides.of(asked, answers)
    here, there = sides.values, Sides(asked.than, sides.questions).values
    return judge_difference(asked.claim, sides.contrast(), sides.less(here), sides.less(there), sides.detail())


def of_facts(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of numbers that runs recorded, over the trainings of the named axes; a fact's own unit is told as points."""
    import numpy as np

    left, right = (np.mean(facts_of(asked, answers, cells), axis=0) for (cells,) in (asked.left, asked.right))
    claim = asked.claim
    array = left - (1 + claim.threshold / 100 if claim.relative else 1) * right
    told = f"{array.size} of {' x '.join(asked.axes) or 'one training a side'}: "
    told += ", ".join(f"{100 * one:+.3g}" for one in array.ravel())
    if min(array.shape, default=1) < 3 or not np.ptp(array):
        return not_testable(claim, f"fewer than three trainings, or all alike, show no variance; {told}")
    return judge_difference(claim, contrast_of_trainings(array), float(left.mean()), float(right.mean()), told)


def alike(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of two kinds of trainings, those of the named axes: their facts at all places are a training's profile."""
    import numpy as np

    sides = [np.array(facts_of(asked, answers, cells)) for (cells,) in (asked.left, asked.right)]
    return judge_alike(asked.claim, ranks.alike(*(side.reshape(len(side), -1).T for side in sides)))


def facts_of(asked: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[np.ndarray]:
    """(levels of each axis ...) of the fact of each place, as shares."""
    import numpy as np

    def fact_of(cell: Cell) -> Callable[[Item], np.ndarray]:
        values = answers.facts(cell)
        return lambda item: np.array([item_value(asked.plan, item, values) / 100])

    return [by_level(cell, asked.axes, fact_of(cell))[..., 0] for cell in cells]


def paired(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Of two single models; of means over several, McNemar's test has no answer."""
    sides = Sides.of(asked, answers)
    left, right = (sides.side(cells, ()) for cells in (asked.left, asked.right))
    if not sides.plain or not {*left, *right} <= {0, 1}:
        raise asked.claim.refuse("mcnemar compares two single models on one set of problems: ask for difference")
    return judge_mcnemar(asked.claim, statistics.mcnemar(left, right), sides.contrast(), *sides.values)


def every(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """Each place on its own, and each pair of experts where axes are named."""
    return judge_every(asked.claim, *units_of(asked, answers))


def wins(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    """How many of these places, or pairs, are on the claim's side."""
    units, left, right = units_of(asked, answers)
    return judge_wins(asked.claim, units, Sides.of(asked, answers).contrast(), left, right)


def units_of(asked: PlacedClaim, answers: StoredAnswers) -> tuple[list[tuple[str, Contrast]], float, float]:
    """(name, contrast) of each unit, and the means of both sides over all places."""
    import numpy as np

    units: list[tuple[str, Contrast]] = []
    values = []
    for at, place in enumerate(asked.places):
        here = asked.at(at)
        sides = Sides.of(here, answers)
        values.append(sides.values)
        if not asked.axes:
            units.append((place, sides.contrast()))
            continue
        pairs = sides.each(here.left) - sides.keep * sides.each(here.right)
        for pair in np.ndindex(pairs.shape[:-1]):
            name = " ".join([place, *(f"{axis}{level + 1}" for axis, level in zip(asked.axes, pair, strict=True))])
            units.append((name, sides.contrast_of(pairs[pair])))
    left, right = np.mean(values, axis=0)
    return units, float(left), float(right)


def place_values(asked: PlacedClaim, answers: StoredAnswers, cells: Sequence[Cell]) -> list[float]:
    """The number of each place, as shares. A cell that shows the best of several counts with their mean: the best of
    three equal trainings is better than one, also on questions that did not choose it."""
    found = []
    for cell in cells:
        metric = asked.claim.metric
        if asked.claim.test == "spearman":
            metric = metrics_of(str(next(iter(tasks_of(asked.plan, cell)))))[0]
        questions = questions_of(asked.plan, answers, [cell], metric)
        found.append(mean_of_candidates(questions, cell))
    return found


def mean_of_candidates(questions: Questions, cell: Cell) -> float:
    found = [
        questions.observed[score, leaf.pair][0]
        for leaf in leaves(questions.plan, cell)
        for item in leaf.items
        for reading in item.readings
        for score in reading.values()
    ]
    return float(sum(found) / len(found))


def clusters(asked: PlacedClaim) -> list[tuple[Any, ...]] | None:
    """Which places belong together: those of the same values of the named axes."""
    if not asked.axes:
        return None
    first = [next(leaves(asked.plan, cell)).items[0].at for cell in asked.left[0]]
    return [tuple(str(at.get(axis)) for axis in asked.axes) for at in first]


def friedman(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    import numpy as np

    scores = np.array([place_values(asked, answers, cells) for cells in asked.left]).T
    return judge_friedman(asked.claim, ranks.friedman(scores, clusters(asked)), len(scores))


def ranked_pairs(asked: PlacedClaim, answers: StoredAnswers) -> list[Ranked]:
    """Each of left against each of right, over the blocks."""
    import numpy as np

    values = {
        name: np.array(place_values(asked, answers, cells))
        for name, cells in zip(asked.claim.left + asked.claim.right, [*asked.left, *asked.right], strict=True)
    }
    of: Sequence[Any] = clusters(asked) or range(len(asked.places))
    found = []
    for left in asked.claim.left:
        for right in asked.claim.right:
            apart = values[left] - values[right]
            p = ranks.wilcoxon(apart, of)
            found.append(Ranked(left, right, float(apart.mean()), p, len(apart), len(set(of))))
    return found


def spearman(asked: PlacedClaim, answers: StoredAnswers) -> Verdict:
    left, right, outcome = (
        place_values(asked, answers, cells) for cells in (asked.left[0], asked.right[0], asked.outcome)
    )
    models = [next(iter(cell.items[0].readings[0].values())).model for cell in asked.left[0]]
    groups = clusters(asked) or [()] * len(left)
    return judge_spearman(asked.claim, ranks.compare_correlations(left, right, outcome, groups, models), len(left))


JUDGES = {"difference": difference, "gain": gain, "alike": alike, "every": every, "wins": wins, "mcnemar": paired,
          "friedman": friedman, "spearman": spearman}  # fmt: skip
