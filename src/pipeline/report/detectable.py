"""Minimum detectable differences of a table's comparisons and claims, planned and measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from pipeline.benchmarks import is_measure, kind_of
from pipeline.errors import PipelineError
from pipeline.estimate.questions import count_questions, scored_file
from pipeline.papers import published as papers
from pipeline.report.claims import FACT, NOT_TESTABLE, Claim
from pipeline.report.compare import Line, holm_level, interval_text
from pipeline.report.contrasts import cell_keys, pairs_across, sampled_axes
from pipeline.report.expression import ScoreLine, lines_of
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.runs.run import Run
from pipeline.stats.detectable import (
    DISCORDANT,
    SPREAD,
    Detectable,
    describe_mean,
    planned_difference,
    variance_of_mean,
)
from pipeline.stats.statistics import LEVEL
from pipeline.tables.plan import Cell, ScoreRef
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import TRAININGS


def first_detectable(planning: Planning) -> tuple[Detectable, str] | None:
    """Return the detectable difference of the primary or first comparison, and its description.

    None if no comparison has questions.
    """
    plan = planning.plan
    family, primary = plan.table.family, tuple(plan.table.primary)
    compared = []
    for pair in pairs_across(plan, [*plan.compare, *plan.controls]):
        if not family or pair[2] in family:
            compared.append(pair)
    compared.sort(key=lambda pair: pair != primary)
    for pair in compared:
        counts = [questions_under(planning, [plan.cells[key]]) for key in cell_keys(plan, pair)]
        if not counts[0].asked:
            continue
        rank = "primary" if pair == primary else "first"
        name = "{} with {} in {}".format(*pair)
        text = f"{name} ({rank})"
        if len(compared) > 1:
            text += f" and {len(compared) - 1} more (Holm's correction)"
        seeds = [len(plan.table.axes[axis]) for axis in sampled_axes(plan)]
        detectable = Detectable.of(
            name,
            counts[0].asked,
            holm_level(len(compared), pair == primary, bool(primary)),
            seeds=min(seeds, default=0),
            trains=any(run.stage in TRAININGS for run in plan.table.runs.values()),
            most=counts[0].most,
            scores=min(count.scores for count in counts),
        )
        return detectable, text
    return None


class DetectableClaim(NamedTuple):
    """A claim about a table, before there are scores.

    Attributes:
        points: The minimum detectable difference at 5 %, on the fewest questions of its cells. None
            if no answers could decide the claim.
        published: The smallest and the largest published difference.
        assumed: A text about means over languages and models.
    """

    id: str
    points: float | None
    published: tuple[float, float] | None = None
    assumed: str = ""

    def text(self) -> str:
        if self.points is None:
            return f"claim {self.id}: {NOT_TESTABLE}"
        points = f"minimum detectable difference {self.points:.1f} points"
        text = f"claim {self.id}: {points} at p < {LEVEL:g}{self.assumed}"
        if self.published:
            return f"{text}, published {interval_text(self.published, '+.1f')}"
        return text

    def is_small(self) -> bool:
        """Return True if a published difference is smaller than the detectable one."""
        if not self.points or not self.published:
            return False
        return min(map(abs, self.published)) < self.points


def detectable_claims(planning: Planning) -> list[DetectableClaim]:
    """Return the claims about differences whose cells are in the plan.

    Claims that cannot be tested are included, without points.
    """
    detectable = []
    for claim in claims_of(planning.plan.table.name):
        try:
            placed = PlacedClaim.of(claim, planning.plan)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        if placed.untestable:
            detectable.append(DetectableClaim(claim.id, None))
            continue
        counts = [questions_under(planning, cells) for cells in (*placed.left, *placed.right)]
        asked = min(count.asked for count in counts)
        if claim.test != "difference" or claim.metric == FACT or not asked:
            continue
        scores = min(count.scores for count in counts)
        if claim.units == "each":
            scores = max(1, scores // len(placed.places))
        discordant = DISCORDANT * variance_of_mean(scores)
        points = 100 * planned_difference(asked, LEVEL, discordant=discordant)
        published = published_differences(placed)
        ends = (min(published), max(published)) if published else None
        detectable.append(DetectableClaim(claim.id, points, ends, describe_mean(scores)))
    return detectable


def published_differences(placed: PlacedClaim) -> list[float]:
    """Return left minus right for each pair of candidates that is fully published."""
    if placed.claim.than:
        return []
    differences = []
    for left, right in itertools.product(placed.left, placed.right):
        difference = published_difference(placed.claim, left, right)
        if difference is not None:
            differences.append(difference)
    return differences


def published_difference(claim: Claim, left: Sequence[Cell], right: Sequence[Cell]) -> float | None:
    """Return left minus right as published, in points, the mean over places.

    None unless all numbers are published.
    """
    left_mean, right_mean = published_mean(left), published_mean(right)
    if left_mean is None or right_mean is None:
        return None
    if claim.relative:
        return left_mean - (1 + claim.threshold / 100) * right_mean
    return left_mean - right_mean


def published_mean(cells: Sequence[Cell]) -> float | None:
    values = []
    for cell in cells:
        value = None
        if cell.published:
            value = papers.published_value(*cell.published)
        if value is None:
            return None
        values.append(value)
    return fmean(values)


class QuestionCount(NamedTuple):
    """The questions under some cells.

    Attributes:
        asked: The number of questions that are asked.
        most: The number of questions in the benchmarks.
        scores: The number of scores that are averaged on each question.
    """

    asked: int
    most: int
    scores: int


def questions_under(planning: Planning, cells: Sequence[Cell]) -> QuestionCount:
    """Count the questions under cells whose answers are right or wrong.

    A problem that is asked in several languages counts once. Scores that differ only in sampled
    trainings count as one score. A choice counts as its first candidate.
    """
    sampled = sampled_axes(planning.plan)
    asked: dict[str, int] = {}
    most: dict[str, int] = {}
    scores, places = set(), set()
    for line in first_candidates(lines_of(planning.plan, cells)):
        if is_measure(line.leaf.metric):
            continue
        counted = task_and_questions(planning, line.score)
        if counted is None:
            continue
        task, of_score, of_task = counted
        if (of_score, of_task) > (asked.get(task, 0), most.get(task, 0)):
            asked[task] = of_score
            most[task] = of_task
        scores.add(line.score)
        at = []
        for axis, value in line.item.at.items():
            if axis not in sampled:
                at.append(str(value))
        places.add((line.score.language, *at))
    averaged = max(1, min(len(scores), len(places)))
    return QuestionCount(sum(asked.values()), sum(most.values()), averaged)


def first_candidates(lines: Sequence[ScoreLine]) -> list[ScoreLine]:
    """Return the lines of scores, without facts; for a choice, the first candidate's line."""
    first: dict[tuple[int, int], ScoreLine] = {}
    for line in lines:
        if line.item.model is None:
            first.setdefault((id(line.item), line.place), line)
    return list(first.values())


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int, int] | None:
    """Return the task of a score, the number of its questions, and its benchmark's number.

    None for translations and text, and if the data is unknown. A small world can be built with
    twice the questions.
    """
    run = planning.representative_evaluation(score) or planning.evaluation_of(score)
    if run is None:
        return None
    task, language = run.config.eval.tasks[0], run.config.languages[0]
    root = run.parents.get("data_root")
    is_local = root is not None and root.folder.is_dir()
    if is_local and scored_file(run, task, language) is None:
        return None
    if kind_of(task.task) in ("translation", "text"):
        return None
    count = count_questions(run, task, language, True)
    most = count_questions(run, task, language, False)
    if isinstance(root, Run) and root.config.expert.questions(run.config.eval.split):
        most = max(most, 2 * count)
    return task.task, count, most


def measured_detectable(lines: Sequence[Line], trained: int) -> Detectable | None:
    """Return the detectable difference of the primary or first comparison, as measured.

    None if no comparison has been tested, or if the answers of its models do not differ.

    Args:
        lines: The lines of contrasts.csv.
        trained: The number of seeds of the trainings behind them.
    """
    tested = [line for line in lines if line["p_holm"] is not None]
    has_primary = any(line["primary"] for line in lines)
    first = None
    for line in tested:
        is_usable = not has_primary and line.get("discordant")
        if line["primary"] or is_usable:
            first = line
            break
    if first is None or not first.get("discordant"):
        return None
    level = holm_level(len(tested), first["primary"], has_primary)
    seeds = 0
    if first.get("trainings") == "a sample":
        seeds = max(3, trained)
    spread = SPREAD
    if first.get("spread") is not None:
        spread = first["spread"] / 100
    name = f"{first['left']} with {first['right']} in {first['place']}"
    discordant = first["discordant"]
    return Detectable.of(name, first["n"], level, seeds, trained > 0, discordant, spread)
