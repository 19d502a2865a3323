"""Simulated worlds: a table's answers drawn so that the published numbers are the truth, and what claims come to there.

For stage=plan, which says of each claim how often such a table would show it, before anything is trained. Assumed: a
question is as hard for all models as DISCORDANT says (that share of the answers of two models at 50 % is right for one
of them alone), a choice of the best configuration is settled, and experts differ as far as published means, maxima and
minima tell.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.papers import published as papers
from pipeline.report.render.text import align_columns
from pipeline.report.stats.claims import (
    CONTRADICTED,
    FACT,
    NOT_TESTABLE,
    SHOWN,
    UNDECIDED,
    Claim,
    Ranked,
    judge_difference,
    judge_wilcoxon,
)
from pipeline.report.stats.translations import CORPUS_METRICS
from pipeline.results.contrasts import DISCORDANT, of_score
from pipeline.results.placed_claims import RANKED, PlacedClaim, claims_of
from pipeline.results.questions import StoredAnswers, Vector, leaves
from pipeline.results.verdicts import JUDGES, Sides, ranked_pairs
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning

if TYPE_CHECKING:
    import numpy as np

DRAWS = 200  # of a bootstrap within a world
MOST = 1000  # answers a score; of more questions, each stands for the mean of several
SLOWER = 10  # a test on ranks permutes: it is simulated in one world of so many
WORDS = {SHOWN: "accepted", CONTRADICTED: "contradicted", UNDECIDED: "undecided", NOT_TESTABLE: "cannot be tested"}
RATE = 0.5  # of right answers, where nothing is published
NOT_SIMULATED = {FACT: "what runs record", **dict.fromkeys(CORPUS_METRICS, "translations")}


# ---------------------------------------------------------------------------------------------------- truth


def settled(plan: TablePlan) -> tuple[TablePlan, dict[ScoreRef, ScoreRef]]:
    """The plan with one model in place of each choice among shown candidates; that model -> one of the candidates."""
    candidates: dict[ScoreRef, ScoreRef] = {}

    def settle(item: Item) -> Item:
        readings = []
        for reading in item.readings:
            score = next(iter(reading.values()))
            settled_score = score if () in reading else replace(score, model=f"{item.choice} at {item.at}")
            candidates[settled_score] = score
            readings.append({(): settled_score})
        return replace(item, readings=tuple(readings), choice=None)

    cells = {key: replace(cell, items=list(map(settle, cell.items))) for key, cell in plan.cells.items()}
    return replace(plan, cells=cells), candidates


def equations(plan: TablePlan, cell: Cell) -> list[tuple[list[ScoreRef], float]]:
    """What a published cell says of its scores: (scores, their mean as a share). Of a settled plan.

    A maximum is that of the first item and a minimum that of the last one, in all cells alike.
    """
    if cell.published is None or cell.metric or cell.fact:
        return []
    printed = papers.published_value(*cell.published)
    items = [item for leaf in leaves(plan, cell) for item in leaf.items]
    steps = {how for leaf in [cell, *leaves(plan, cell)] for how, _ in leaf.reduce}
    if printed is None or not all(item.readings for item in items) or len(steps) > 1:
        return []
    part = {"max": slice(0, 1), "min": slice(-1, None)}.get(next(iter(steps), "mean"), slice(None))
    return [([score for item in items[part] for reading in item.readings for score in reading.values()], printed / 100)]


def published_rates(plan: TablePlan) -> dict[ScoreRef, float]:
    """The share of right answers of each score, such that the published cells of a settled plan are exactly true.

    What the cells leave open is as near to their own numbers as can be: the least squares of the differences.
    """
    import numpy as np

    cell_means = [equation for cell in plan.cells.values() for equation in equations(plan, cell)]
    near: dict[ScoreRef, list[float]] = {}
    for scores, value in cell_means:
        for score in scores:
            near.setdefault(score, []).append(value)
    if not cell_means:
        return {}
    start = {score: statistics.fmean(values) for score, values in near.items()}
    at = {score: place for place, score in enumerate(start)}
    matrix = np.zeros((len(cell_means), len(at)))
    for row, (scores, _) in enumerate(cell_means):
        for score, count in Counter(scores).items():
            matrix[row, at[score]] = count / len(scores)
    residual = np.array([value for _, value in cell_means]) - matrix @ np.array(list(start.values()))
    moved = np.linalg.lstsq(matrix, residual, rcond=None)[0]
    return {score: float(np.clip(start[score] + moved[place], 0, 1)) for score, place in at.items()}


def threshold_rates(placed: PlacedClaim) -> dict[ScoreRef, float]:
    """The left side's scores apart from RATE by the difference that a claim names."""
    claim = placed.claim
    left = RATE * (1 + claim.threshold / 100) if claim.relative else RATE + claim.margin
    return {score: left for side in placed.left for cell in side for score in scores_of(placed.plan, cell)}


def scores_of(plan: TablePlan, cell: Cell) -> list[ScoreRef]:
    items = [item for leaf in leaves(plan, cell) for item in leaf.items]
    return [score for item in items for reading in item.readings for score in reading.values()]


# ---------------------------------------------------------------------------------------------------- worlds


@dataclass
class World(StoredAnswers):
    """Answers of one world, in place of stored ones. rates: share of right answers; counts: questions of a score."""

    rates: Mapping[ScoreRef, float] = field(default_factory=dict)
    counts: Callable[[ScoreRef], int] = lambda score: 250
    seed: int = 0

    def __post_init__(self) -> None:
        import numpy as np

        self._rng = np.random.default_rng(self.seed)
        self._shared: dict[tuple[int, int], np.ndarray] = {}

    def read(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """A question's answer is right where a uniform number is below the rate: one for all models with the chance
        that makes DISCORDANT, the model's own otherwise."""
        count = self.counts(score)
        per_answer = -(-count // MOST)
        shape = (count // per_answer, per_answer)
        if shape not in self._shared:
            self._shared[shape] = self._rng.random(shape)
        is_own = self._rng.random(shape) >= (1 - 2 * DISCORDANT) ** 0.5
        hard = self._shared[shape].copy()
        hard[is_own] = self._rng.random(int(is_own.sum()))
        return dict(enumerate((hard < self.rates[score]).mean(axis=1).tolist()))


@dataclass(frozen=True)
class Odds:
    """shares: of the worlds in which a claim comes to each of WORDS, none of what is not simulated; basis: what is true
    in them, or why there are none."""

    claim: str
    shares: Sequence[float]
    basis: str


def odds(planning: Planning, worlds: int) -> list[Odds]:
    """For each claim about a table. Where its cells have no published numbers, the difference that it names is true."""
    plan, candidates = settled(planning.plan)
    rates = published_rates(plan)

    @cache
    def count(score: ScoreRef) -> int:
        task_size = of_score(planning, candidates.get(score, score))
        return task_size[1] if task_size else 0

    table = planning.bind()
    even = dict.fromkeys((score for cell in plan.cells.values() for score in scores_of(plan, cell)), RATE)
    placed: list[tuple[PlacedClaim, dict[ScoreRef, float], str]] = []  # without rates: not simulated
    for claim in claims_of(plan.table.name):
        try:
            claimed = PlacedClaim.of(claim, plan)
        except PipelineError:
            continue  # of a smaller table of the same name: its verdict says why it is not made
        needs_scores = {score for cell in claimed.cells for score in scores_of(plan, cell)}
        if why := NOT_SIMULATED.get(claim.metric) or ("unknown data" if min(map(count, needs_scores)) < 2 else None):
            placed.append((claimed, {}, f"not simulated: {why}"))
        elif needs_scores <= rates.keys():
            placed.append((claimed, rates, "published numbers"))
        elif told := named(claim):
            placed.append((claimed, even | threshold_rates(claimed), told))
        else:
            placed.append((claimed, even, "no difference"))
    tallies: dict[str, Counter[str]] = {claimed.claim.id: Counter() for claimed, _, _ in placed}
    for seed in range(worlds):
        drawn: dict[int, World] = {}  # claims of one truth share its answers
        for claimed, truth, _ in placed:
            if not truth or (claimed.claim.test in RANKED and seed >= max(1, worlds // SLOWER)):
                continue
            world = drawn.setdefault(id(truth), World(table, DRAWS, rates=truth, counts=count, seed=seed))
            tallies[claimed.claim.id][judged(claimed, world)] += 1
    shares = {name: [counter[word] / counter.total() for word in WORDS] for name, counter in tallies.items() if counter}
    return [Odds(claimed.claim.id, shares.get(claimed.claim.id, ()), basis) for claimed, _, basis in placed]


def judged(placed: PlacedClaim, answers: StoredAnswers) -> str:
    """The verdict as results would have it, in one word."""
    if placed.claim.test == "difference":
        return judge_difference(placed.claim, Sides.of(placed, answers).contrast(), 0, 0).verdict
    if placed.claim.test == "wilcoxon":
        pairs: list[tuple[Claim, Sequence[Ranked]]] = [(placed.claim, ranked_pairs(placed, answers))]
        return judge_wilcoxon(pairs)[0].verdict
    return JUDGES[placed.claim.test](placed, answers).verdict


def named(claim: Claim) -> str | None:
    """The difference that a claim names; None of one that is about any difference, or about none (on par)."""
    if claim.test in RANKED or claim.direction == "within" or claim.threshold <= 0:
        return None
    return f"a difference of {claim.threshold:g}{' %' if claim.relative else ' points'}"


def lines(planning: Planning, worlds: int) -> list[str]:
    """The odds of each claim as text, for stage=plan; none of a table without claims, and where worlds is 0."""
    claim_odds = odds(planning, worlds) if worlds else []
    if not claim_odds:
        return []
    head = ("claim", *WORDS.values(), "what is true")
    share_texts = [[f"{share:.0%}" for share in line.shares] or ["–"] * len(WORDS) for line in claim_odds]
    rows = [
        head,
        *((line.claim, *shares, line.basis) for line, shares in zip(claim_odds, share_texts, strict=True)),
    ]
    fewer = max(1, worlds // SLOWER)
    note = (
        f"(in {worlds} simulated worlds, of tests on ranks {fewer}; experts differ as published maxima and minima tell)"
    )
    return [*align_columns(rows), note]
