"""Simulated worlds: a table's answers drawn so that the published numbers are true, and the verdicts on claims there.

For stage=plan, which reports how often such a table would show each claim, before anything is trained. Assumptions: a
question is equally hard for all models to the degree of DISCORDANT (that share of the answers of two models at 50 % is
right for only one of them), choices of the best configuration are settled, and experts differ only as published means,
maxima and minima show.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.papers import published as papers
from pipeline.report.claims import (
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
from pipeline.report.contrasts import DISCORDANT, task_and_questions
from pipeline.report.expression import leaf_cells, scores_under
from pipeline.report.placed_claims import RANKED, PlacedClaim, claims_of
from pipeline.report.questions import StoredAnswers, Vector
from pipeline.report.verdicts import Sides, judge, ranked_pairs
from pipeline.stats.translations import CORPUS_METRICS
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.text import align_columns

if TYPE_CHECKING:
    import numpy as np

DRAWS = 200  # of a bootstrap within a world
MAX_ANSWERS = 1000  # per score; with more questions, each answer is the mean of several
SLOWER = 10  # a rank test permutes: it is simulated in one of SLOWER worlds
WORDS = {SHOWN: "accepted", CONTRADICTED: "contradicted", UNDECIDED: "undecided", NOT_TESTABLE: "cannot be tested"}
RATE = 0.5  # share of right answers, where nothing is published
NOT_SIMULATED = {FACT: "what runs record", **dict.fromkeys(CORPUS_METRICS, "translations")}


# ---------------------------------------------------------------------------------------------------- truth


def settle_choices(plan: TablePlan) -> tuple[TablePlan, dict[ScoreRef, ScoreRef]]:
    """(plan with one model in place of each choice among shown candidates, that model -> one of the candidates)."""
    candidates: dict[ScoreRef, ScoreRef] = {}

    def settle_item(item: Item) -> Item:
        readings = []
        for reading in item.readings:
            score = next(iter(reading.values()))
            settled_score = score if () in reading else replace(score, model=f"{item.choice} at {item.at}")
            candidates[settled_score] = score
            readings.append({(): settled_score})
        return replace(item, readings=tuple(readings), choice=None)

    cells = {key: replace(cell, items=list(map(settle_item, cell.items))) for key, cell in plan.cells.items()}
    return replace(plan, cells=cells), candidates


def published_equations(plan: TablePlan, cell: Cell) -> list[tuple[list[ScoreRef], float]]:
    """(scores, their published mean as a share) of a cell of a settled plan; empty without a published number.

    A maximum is that of the first item and a minimum that of the last one, in all cells.
    """
    if cell.published is None or cell.metric or cell.fact:
        return []
    printed = papers.published_value(*cell.published)
    items = [item for leaf in leaf_cells(plan, cell) for item in leaf.items]
    steps = {how for leaf in [cell, *leaf_cells(plan, cell)] for how, _ in leaf.reduce}
    if printed is None or not all(item.readings for item in items) or len(steps) > 1:
        return []
    part = {"max": slice(0, 1), "min": slice(-1, None)}.get(next(iter(steps), "mean"), slice(None))
    return [([score for item in items[part] for reading in item.readings for score in reading.values()], printed / 100)]


def published_rates(plan: TablePlan) -> dict[ScoreRef, float]:
    """The share of right answers of each score, such that the published cells of a settled plan are exactly true.

    Degrees of freedom that the cells leave are settled by least squares, as near as possible to the cells' numbers.
    """
    import numpy as np

    cell_means = [equation for cell in plan.cells.values() for equation in published_equations(plan, cell)]
    cell_values: dict[ScoreRef, list[float]] = {}
    for scores, value in cell_means:
        for score in scores:
            cell_values.setdefault(score, []).append(value)
    if not cell_means:
        return {}
    start = {score: statistics.fmean(values) for score, values in cell_values.items()}
    columns = {score: column for column, score in enumerate(start)}
    matrix = np.zeros((len(cell_means), len(columns)))
    for row, (scores, _) in enumerate(cell_means):
        for score, count in Counter(scores).items():
            matrix[row, columns[score]] = count / len(scores)
    residual = np.array([value for _, value in cell_means]) - matrix @ np.array(list(start.values()))
    shifts = np.linalg.lstsq(matrix, residual, rcond=None)[0]
    return {score: float(np.clip(start[score] + shifts[column], 0, 1)) for score, column in columns.items()}


def threshold_rates(placed: PlacedClaim) -> dict[ScoreRef, float]:
    """The rates of the left side's scores, which differ from RATE by the difference that a claim names."""
    claim = placed.claim
    rate = RATE * (1 + claim.threshold / 100) if claim.relative else RATE + claim.margin
    return {score: rate for side in placed.left for cell in side for score in scores_of(placed.plan, cell)}


def scores_of(plan: TablePlan, cell: Cell) -> list[ScoreRef]:
    return [score for _, score in scores_under(plan, cell)]


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

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[Any, Any]:
        return {}  # its questions are independent

    def read_answers(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """doc_id -> share of right answers. An answer is right where a uniform number is below the rate: with the
        probability that gives DISCORDANT, the number is shared by all models; otherwise it is the model's own."""
        count = self.counts(score)
        per_answer = -(-count // MAX_ANSWERS)
        shape = (count // per_answer, per_answer)
        if shape not in self._shared:
            self._shared[shape] = self._rng.random(shape)
        is_own = self._rng.random(shape) >= (1 - 2 * DISCORDANT) ** 0.5
        difficulties = self._shared[shape].copy()
        difficulties[is_own] = self._rng.random(int(is_own.sum()))
        return dict(enumerate((difficulties < self.rates[score]).mean(axis=1).tolist()))


@dataclass(frozen=True)
class Odds:
    """shares: of the worlds, for each of the verdicts in WORDS; empty if not simulated. basis: what is true in these
    worlds, or why there are none."""

    claim: str
    shares: Sequence[float]
    basis: str


def simulate_claims(planning: Planning, worlds: int) -> list[Odds]:
    """The odds of each claim about a table. Without published numbers, the difference that the claim names is true."""
    plan, candidates = settle_choices(planning.plan)
    rates = published_rates(plan)

    @cache
    def count_answers(score: ScoreRef) -> int:
        task_size = task_and_questions(planning, candidates.get(score, score))
        return task_size[1] if task_size else 0

    table = planning.bind()
    even = dict.fromkeys((score for cell in plan.cells.values() for score in scores_of(plan, cell)), RATE)
    placed: list[tuple[PlacedClaim, dict[ScoreRef, float], str]] = []  # without rates: not simulated
    for claim in claims_of(plan.table.name):
        try:
            # what a choice is among is settled below, and decides whether the claim can be tested
            untestable = PlacedClaim.of(claim, planning.plan).untestable
            claimed = replace(PlacedClaim.of(claim, plan), untestable=untestable)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        claim_scores = {score for cell in claimed.all_cells for score in scores_of(plan, cell)}
        if reason := NOT_SIMULATED.get(claim.metric) or (
            "unknown data" if min(map(count_answers, claim_scores)) < 2 else None
        ):
            placed.append((claimed, {}, f"not simulated: {reason}"))
        elif claim_scores <= rates.keys():
            placed.append((claimed, rates, "published numbers"))
        elif difference := named_difference(claim):
            placed.append((claimed, even | threshold_rates(claimed), difference))
        else:
            placed.append((claimed, even, "no difference"))
    tallies: dict[str, Counter[str]] = {claimed.claim.id: Counter() for claimed, _, _ in placed}
    for seed in range(worlds):
        truth_worlds: dict[int, World] = {}  # claims with the same truth share its answers
        for claimed, truth, _ in placed:
            if not truth or (claimed.claim.test in RANKED and seed >= max(1, worlds // SLOWER)):
                continue
            world = truth_worlds.setdefault(
                id(truth), World(table, DRAWS, rates=truth, counts=count_answers, seed=seed)
            )
            tallies[claimed.claim.id][simulated_verdict(claimed, world)] += 1
    shares = {name: [counter[word] / counter.total() for word in WORDS] for name, counter in tallies.items() if counter}
    return [Odds(claimed.claim.id, shares.get(claimed.claim.id, ()), basis) for claimed, _, basis in placed]


def simulated_verdict(placed: PlacedClaim, answers: StoredAnswers) -> str:
    """The verdict in this world, one of the keys of WORDS."""
    claim = placed.claim
    if claim.test == "difference" and not (claim.units or placed.untestable or len(placed.left + placed.right) > 2):
        return judge_difference(placed.claim, Sides.of(placed, answers).contrast(), 0, 0).verdict
    if placed.claim.test == "wilcoxon":
        pairs: list[tuple[Claim, Sequence[Ranked]]] = [(placed.claim, ranked_pairs(placed, answers))]
        return judge_wilcoxon(pairs)[0].verdict
    return judge(placed, answers).verdict


def named_difference(claim: Claim) -> str | None:
    """The difference that a claim names, as text; None for a claim about any difference, or about none (on par)."""
    if claim.test in RANKED or claim.direction == "within" or claim.threshold <= 0:
        return None
    return f"a difference of {claim.threshold:g}{' %' if claim.relative else ' points'}"


def describe_odds(planning: Planning, worlds: int) -> list[str]:
    """The odds of each claim as text, for stage=plan; empty for a table without claims, or if worlds is 0."""
    claim_odds = simulate_claims(planning, worlds) if worlds else []
    if not claim_odds:
        return []
    head = ("claim", *WORDS.values(), "what is true")
    share_texts = [[f"{share:.0%}" for share in line.shares] or ["–"] * len(WORDS) for line in claim_odds]
    rows = [
        head,
        *((line.claim, *shares, line.basis) for line, shares in zip(claim_odds, share_texts, strict=True)),
    ]
    fewer = max(1, worlds // SLOWER)
    note = f"(in {worlds} simulated worlds, {fewer} for rank tests; experts differ as published maxima and minima show)"
    return [*align_columns(rows), note]
