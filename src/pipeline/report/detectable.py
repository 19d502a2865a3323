"""Minimum detectable differences of a table's comparisons and claims, before anything is run and
afterwards.
"""

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
    """Return what is detectable in the primary comparison, else the first one, and what is compared
    besides, in words.

    None without questions.
    """
    plan = planning.plan
    family, primary = plan.table.family, tuple(plan.table.primary)
    pairs = pairs_across(plan, [*plan.compare, *plan.controls])
    compared = [pair for pair in pairs if not family or pair[2] in family]
    compared.sort(key=lambda pair: pair != primary)
    for pair in compared:
        counts = [questions_under(planning, [plan.cells[key]]) for key in cell_keys(plan, pair)]
        first = counts[0]
        if first.asked:
            is_primary = pair == primary
            name = "{} with {} in {}".format(*pair)
            text = f"{name} ({'primary' if is_primary else 'first'})"
            if len(compared) > 1:
                text += f" and {len(compared) - 1} more (Holm's correction)"
            detectable = Detectable.of(
                name,
                first.asked,
                holm_level(len(compared), is_primary, bool(primary)),
                seeds=min((len(plan.table.axes[axis]) for axis in sampled_axes(plan)), default=0),
                trains=any(run.stage in TRAININGS for run in plan.table.runs.values()),
                most=first.most,
                scores=min(count.scores for count in counts),
            )
            return detectable, text
    return None


class DetectableClaim(NamedTuple):
    """A claim about a table, before there are scores.

    points: its minimum detectable difference at 5 % on the fewest questions of its cells, or None
    if no answers could decide it; published: the smallest and largest difference; assumed: about
    means over languages and models.
    """

    id: str
    points: float | None
    published: tuple[float, float] | None = None
    assumed: str = ""

    def text(self) -> str:
        if self.points is None:
            return f"claim {self.id}: {NOT_TESTABLE}"
        text = (
            f"claim {self.id}: minimum detectable difference {self.points:.1f} points at p <"
            f" {LEVEL:g}{self.assumed}"
        )
        if self.published:
            return f"{text}, published {interval_text(self.published, '+.1f')}"
        return text

    def is_small(self) -> bool:
        """Return True if a published difference is smaller than what can be detected."""
        return bool(self.points and self.published and min(map(abs, self.published)) < self.points)


def detectable_claims(planning: Planning) -> list[DetectableClaim]:
    """Return the claims whose cells the plan has and that are decided by differences, or cannot be
    decided.
    """
    detectable = []
    for claim in claims_of(planning.plan.table.name):
        try:
            placed = PlacedClaim.of(claim, planning.plan)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        counts = [questions_under(planning, cells) for cells in (*placed.left, *placed.right)]
        asked, scores = min(count.asked for count in counts), min(count.scores for count in counts)
        if placed.untestable:
            detectable.append(DetectableClaim(claim.id, None))
        elif claim.test == "difference" and claim.metric != FACT and asked:
            if claim.units == "each":
                scores = max(1, scores // len(placed.places))
            points = 100 * planned_difference(
                asked, LEVEL, discordant=DISCORDANT * variance_of_mean(scores)
            )
            published = published_differences(placed)
            ends = None
            if published:
                ends = (min(published), max(published))
            detectable.append(DetectableClaim(claim.id, points, ends, describe_mean(scores)))
    return detectable


def published_differences(placed: PlacedClaim) -> list[float]:
    """Return left minus right of each candidate a side, as far as all of it is published."""
    if placed.claim.than:
        return []
    pairs = itertools.product(placed.left, placed.right)
    differences = [published_difference(placed.claim, left, right) for left, right in pairs]
    found = []
    for difference in differences:
        if difference is not None:
            found.append(difference)
    return found


def published_difference(claim: Claim, left: Sequence[Cell], right: Sequence[Cell]) -> float | None:
    """Left minus right as published, in points, the mean over places; None unless all of it is."""
    sides = [
        [cell.published and papers.published_value(*cell.published) for cell in cells]
        for cells in (left, right)
    ]
    values = [[value for value in side if value is not None] for side in sides]
    if values != sides:
        return None
    return fmean(values[0]) - (1 + claim.threshold / 100 if claim.relative else 1) * fmean(
        values[1]
    )


class QuestionCount(NamedTuple):
    """The questions under some cells: asked, in the benchmark, and how many scores are averaged on
    each.
    """

    asked: int
    most: int
    scores: int


def questions_under(planning: Planning, cells: Sequence[Cell]) -> QuestionCount:
    """Count the questions under cells whose answers are right or wrong.

    A problem counts once if it is asked in several languages, and a score once if only sampled
    trainings differ. Of a choice the first candidate counts.
    """
    sampled = sampled_axes(planning.plan)
    asked: dict[str, int] = {}
    most: dict[str, int] = {}
    scores, places = set(), set()
    for line in first_candidates(lines_of(planning.plan, cells)):
        if is_measure(line.leaf.metric):
            counted = None
        else:
            counted = task_and_questions(planning, line.score)
        if counted:
            task, of_score, of_task = counted
            if (of_score, of_task) > (asked.get(task, 0), most.get(task, 0)):
                asked[task], most[task] = of_score, of_task
            scores.add(line.score)
            at = []
            for axis, value in line.item.at.items():
                if axis not in sampled:
                    at.append(str(value))
            places.add((line.score.language, *at))
    return QuestionCount(
        sum(asked.values()), sum(most.values()), max(1, min(len(scores), len(places)))
    )


def first_candidates(lines: Sequence[ScoreLine]) -> list[ScoreLine]:
    """Return the lines of scores, without facts, and of a choice that of the first candidate."""
    first: dict[tuple[int, int], ScoreLine] = {}
    for line in lines:
        if line.item.model is None:
            first.setdefault((id(line.item), line.place), line)
    return list(first.values())


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int, int] | None:
    """(task, questions of one score, questions that its benchmark has); None for translations and
    text, and where its data is unknown. A small world can be given twice the items.
    """
    run = planning.representative_evaluation(score) or planning.evaluation_of(score)
    if run is None:
        return None
    task, language, root = (
        run.config.eval.tasks[0],
        run.config.languages[0],
        run.parents.get("data_root"),
    )
    unknown = root is not None and root.folder.is_dir() and scored_file(run, task, language) is None
    if unknown or kind_of(task.task) in ("translation", "text"):
        return None
    count, most = (count_questions(run, task, language, limited) for limited in (True, False))
    if isinstance(root, Run) and root.config.expert.questions(run.config.eval.split):
        most = max(most, 2 * count)
    return task.task, count, most


def measured_detectable(lines: Sequence[Line], trained: int) -> Detectable | None:
    """Return the detectable difference of the primary comparison, else of the first one, with what
    was measured of it.

    None if no question tells its models apart.

    Args: lines: of contrasts.csv. trained: the number of seeds of the trainings behind them.
    """
    tested = [line for line in lines if line["p_holm"] is not None]
    has_primary = any(line["primary"] for line in lines)
    line = next(
        (
            line
            for line in tested
            if line["primary"] or (line.get("discordant") and not has_primary)
        ),
        None,
    )
    if not (line and line.get("discordant")):
        return None
    level = holm_level(len(tested), line["primary"], has_primary)
    seeds = 0
    if line.get("trainings") == "a sample":
        seeds = max(3, trained)
    name = f"{line['left']} with {line['right']} in {line['place']}"
    if line.get("spread") is None:
        spread = SPREAD
    else:
        spread = line["spread"] / 100
    return Detectable.of(name, line["n"], level, seeds, trained > 0, line["discordant"], spread)
