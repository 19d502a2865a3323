"""Minimum detectable differences of a table's comparisons and claims, before there are scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.benchmarks import is_measure, kind_of
from pipeline.errors import PipelineError
from pipeline.estimate.questions import count_questions, scored_file
from pipeline.report.claims import FACT, NOT_TESTABLE
from pipeline.report.compare import holm_level
from pipeline.report.contrasts import cell_keys, pairs_across, sampled_axes
from pipeline.report.expression import ScoreLine, lines_of
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.stats.detectable import CORRELATION, planned_difference
from pipeline.stats.statistics import LEVEL
from pipeline.tables.plan import Cell, ScoreRef
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import TRAININGS

MORE_SEEDS = (3, 5, 8)  # fewer are no sample


def first_detectable(planning: Planning) -> tuple[str, list[list[str]]] | None:
    """Return the primary or first comparison, and a table of its detectable differences.

    The table has a column for each number of seeds. None if no comparison has questions.
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
        questions = counts[0].asked
        if not questions:
            continue
        rank = "primary" if pair == primary else "first"
        name = "{} with {} in {}".format(*pair)
        text = f"{name} ({rank})"
        if len(compared) > 1:
            text += f" and {len(compared) - 1} more (Holm's correction)"
        level = holm_level(len(compared), pair == primary, bool(primary))
        scores = min(count.scores for count in counts)
        seeds = {0, min((len(plan.table.axes[axis]) for axis in sampled_axes(plan)), default=0)}
        if any(run.stage in TRAININGS for run in plan.table.runs.values()):
            seeds.update(MORE_SEEDS)
        heads = [f"points detectable at p < {level:.2g}"]
        numbers = [f"{questions:,} questions{mean_text(scores)}"]
        for count in sorted(seeds):
            heads.append(f"{count} seeds" if count else "these trainings")
            numbers.append(f"{planned_difference(questions, level, count, scores):.1f}")
        return text, [heads, numbers]
    return None


def mean_text(scores: int) -> str:
    if scores < 2:
        return ""
    return f", mean of {scores} scores (assumed correlation {CORRELATION:g})"


def detectable_claims(planning: Planning) -> list[str]:
    """Return a line for each claim about a difference whose cells are in the plan.

    It has the minimum detectable difference at 5 %, on the fewest questions of its cells, or says
    that no answers could decide the claim.
    """
    lines = []
    for claim in claims_of(planning.plan.table.name):
        try:
            placed = PlacedClaim.of(claim, planning.plan)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        if placed.untestable:
            lines.append(f"claim {claim.id}: {NOT_TESTABLE}")
            continue
        counts = [questions_under(planning, cells) for cells in (*placed.left, *placed.right)]
        asked = min(count.asked for count in counts)
        if claim.test != "difference" or claim.metric == FACT or not asked:
            continue
        scores = min(count.scores for count in counts)
        if claim.units == "each":
            scores = max(1, scores // len(placed.places))
        points = f"{planned_difference(asked, LEVEL, scores=scores):.1f} points at p < {LEVEL:g}"
        lines.append(f"claim {claim.id}: minimum detectable difference {points}{mean_text(scores)}")
    return lines


class QuestionCount(NamedTuple):
    """The questions under some cells.

    Attributes:
        asked: The number of questions that are asked.
        scores: The number of scores that are averaged on each question.
    """

    asked: int
    scores: int


def questions_under(planning: Planning, cells: Sequence[Cell]) -> QuestionCount:
    """Count the questions under cells whose answers are right or wrong.

    A problem that is asked in several languages counts once. Scores that differ only in sampled
    trainings count as one score. A choice counts as its first candidate.
    """
    sampled = sampled_axes(planning.plan)
    asked: dict[str, int] = {}
    scores, places = set(), set()
    for line in first_candidates(lines_of(planning.plan, cells)):
        if is_measure(line.leaf.metric):
            continue
        counted = task_and_questions(planning, line.score)
        if counted is None:
            continue
        task, questions = counted
        asked[task] = max(asked.get(task, 0), questions)
        scores.add(line.score)
        at = []
        for axis, value in line.item.at.items():
            if axis not in sampled:
                at.append(str(value))
        places.add((line.score.language, *at))
    averaged = max(1, min(len(scores), len(places)))
    return QuestionCount(sum(asked.values()), averaged)


def first_candidates(lines: Sequence[ScoreLine]) -> list[ScoreLine]:
    """Return the lines of scores, without facts; for a choice, the first candidate's line."""
    first: dict[tuple[int, int], ScoreLine] = {}
    for line in lines:
        if line.item.model is None:
            first.setdefault((id(line.item), line.place), line)
    return list(first.values())


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int] | None:
    """Return the task of a score and the number of its questions.

    None for translations and text, and if the data is unknown.
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
    return task.task, count_questions(run, task, language, True)
