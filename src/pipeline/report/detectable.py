"""Minimum detectable differences of a table's comparisons and claims, before anything is run and afterwards."""

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
from pipeline.report.expression import leaf_cells
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
    """That of the primary comparison, else of the first one, and what is compared besides, in words; None without
    questions."""
    plan = planning.plan
    family, primary = plan.table.family, tuple(plan.table.primary)
    pairs = pairs_across(plan, [*plan.compare, *plan.controls])
    compared = [pair for pair in pairs if not family or pair[2] in family]
    seeds = min((len(plan.table.axes[axis]) for axis in sampled_axes(plan)), default=0)
    trains = any(run.stage in TRAININGS for run in plan.table.runs.values())
    for first in sorted(compared, key=lambda pair: pair != primary):
        counts = [questions_under(planning, [plan.cells[key]]) for key in cell_keys(plan, first)]
        asked, most, _ = counts[0]
        if asked:
            scores = min(count.scores for count in counts)
            level = holm_level(len(compared), first == primary, bool(primary))
            name = "{} with {} in {}".format(*first)
            others = f" and {len(compared) - 1} more (Holm's correction)" if len(compared) > 1 else ""
            detectable = Detectable.of(name, asked, level, seeds, trains, most=most, scores=scores)
            return detectable, f"{name} ({'primary' if first == primary else 'first'}){others}"
    return None


class DetectableClaim(NamedTuple):
    """A claim about a table, before there are scores. points: its minimum detectable difference at 5 % on the fewest
    questions of its cells; None where no answers could decide it. published: the smallest and largest difference.
    assumed: about means over languages and models."""

    id: str
    points: float | None
    published: tuple[float, float] | None = None
    assumed: str = ""

    def text(self) -> str:
        if self.points is None:
            return f"claim {self.id}: {NOT_TESTABLE}"
        published = f", published {interval_text(self.published, '+.1f')}" if self.published else ""
        points = f"{self.points:.1f} points at p < {LEVEL:g}{self.assumed}"
        return f"claim {self.id}: minimum detectable difference {points}{published}"

    def is_small(self) -> bool:
        """Whether a published difference is smaller than what can be detected."""
        return bool(self.points and self.published and min(map(abs, self.published)) < self.points)


def detectable_claims(planning: Planning) -> list[DetectableClaim]:
    """The claims about a table that its plan has the cells of, and that are decided by differences, or by nothing."""
    detectable = []
    for claim in claims_of(planning.plan.table.name):
        try:
            placed = PlacedClaim.of(claim, planning.plan)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        counts = [questions_under(planning, cells) for cells in (*placed.left, *placed.right)]
        asked = min(count.asked for count in counts)
        if placed.untestable:
            detectable.append(DetectableClaim(claim.id, None))
        elif claim.test == "difference" and claim.metric != FACT and asked:
            pairs = itertools.product(placed.left, placed.right) if not claim.than else ()
            differences = [value for sides in pairs if (value := published_difference(claim, *sides)) is not None]
            ends = (min(differences), max(differences)) if differences else None
            scores = min(count.scores for count in counts)
            if claim.units == "each":
                scores = max(1, scores // len(placed.places))
            points = 100 * planned_difference(asked, LEVEL, discordant=DISCORDANT * variance_of_mean(scores))
            detectable.append(DetectableClaim(claim.id, points, ends, describe_mean(scores)))
    return detectable


def published_difference(claim: Claim, left: Sequence[Cell], right: Sequence[Cell]) -> float | None:
    """Left minus right as published, in points, the mean over places; None unless all of it is."""
    sides = [[cell.published and papers.published_value(*cell.published) for cell in cells] for cells in (left, right)]
    values = [[value for value in side if value is not None] for side in sides]
    if values != sides:
        return None
    return fmean(values[0]) - (1 + claim.threshold / 100 if claim.relative else 1) * fmean(values[1])


class QuestionCount(NamedTuple):
    """The questions under some cells: asked, in the benchmark, and how many scores are averaged on each."""

    asked: int
    most: int
    scores: int


def questions_under(planning: Planning, cells: Sequence[Cell]) -> QuestionCount:
    """Count the questions under cells whose answers are right or wrong. A problem counts once if it is asked in several
    languages, and a score once if only sampled trainings differ; of a choice the first candidate counts."""
    sampled = sampled_axes(planning.plan)
    sizes: dict[str, tuple[int, int]] = {}
    scores, places = set(), set()
    for leaf in itertools.chain.from_iterable(leaf_cells(planning.plan, cell) for cell in cells):
        for item in leaf.items:
            for reading in item.readings:
                score = next(iter(reading.values()))
                size = None if is_measure(leaf.metric) else task_and_questions(planning, score)
                if size:
                    sizes[size[0]] = max(sizes.get(size[0], (0, 0)), size[1:])
                    scores.add(score)
                    at = [str(value) for axis, value in item.at.items() if axis not in sampled]
                    places.add((score.language, *at))
    asked, most = (sum(counts) for counts in zip((0, 0), *sizes.values(), strict=True))
    return QuestionCount(asked, most, max(1, min(len(scores), len(places))))


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int, int] | None:
    """(task, questions of one score, questions that its benchmark has); None for translations and text, and where its
    data is unknown. A small world can be given twice the items."""
    run = planning.representative_evaluation(score) or planning.evaluation_of(score)
    if run is None:
        return None
    task, language, root = run.config.eval.tasks[0], run.config.languages[0], run.parents.get("data_root")
    unknown = root is not None and root.folder.is_dir() and scored_file(run, task, language) is None
    if unknown or kind_of(task.task) in ("translation", "text"):
        return None
    count, most = (count_questions(run, task, language, limited) for limited in (True, False))
    if isinstance(root, Run) and root.config.expert.questions(run.config.eval.split):
        most = max(most, 2 * count)
    return task.task, count, most


def measured_detectable(lines: Sequence[Line], trained: int) -> Detectable | None:
    """That of the primary comparison, else of the first one, with what was measured of it; None where no question tells
    its models apart. lines: of contrasts.csv; trained: the number of seeds of the trainings behind them."""
    tested = [line for line in lines if line["p_holm"] is not None]
    has_primary = any(line["primary"] for line in lines)
    line = next((line for line in tested if line["primary"] or (line.get("discordant") and not has_primary)), None)
    if not (line and line.get("discordant")):
        return None
    level = holm_level(len(tested), line["primary"], has_primary)
    seeds = max(3, trained) if line.get("trainings") == "a sample" else 0
    name = f"{line['left']} with {line['right']} in {line['place']}"
    spread = SPREAD if line.get("spread") is None else line["spread"] / 100
    return Detectable.of(name, line["n"], level, seeds, trained > 0, line["discordant"], spread)
