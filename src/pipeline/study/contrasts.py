"""A table's contrasts: their minimum detectable difference before anything is run, and what they measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.report.claims import Claim
from pipeline.report.statistics import mcnemar, smallest_difference
from pipeline.report.translations import CORPUS_METRICS
from pipeline.study import history
from pipeline.study.answers import StoredAnswers, leaves
from pipeline.study.asked import PlacedClaim, metrics_of, tasks_of
from pipeline.study.cells import Cell, ScoreRef, TablePlan
from pipeline.study.cost import QUESTIONS
from pipeline.study.outcome import NoScore
from pipeline.study.planning import Planning
from pipeline.study.verdicts import Sides

DISCORDANT = 0.2  # the share of answers that are right for one model alone: assumed until scores are there


def contrasts(planning: Planning) -> list[str]:
    """A line for each of `compare`: the minimum detectable difference on the fewest and the most questions.

    Only different questions count: a mean over seeds or models asks the same again, which lessens other noise alone.
    """
    lines = []
    cells = planning.plan.cells
    for left, right in planning.plan.compare:
        counts = [
            questions(planning, cell)
            for place, cell in cells.items()
            if left in place and tuple(right if one == left else one for one in place) in cells
        ]
        asked = [count for count in counts if count]
        if asked:
            least, most = (100 * smallest_difference(count, DISCORDANT) for count in (min(asked), max(asked)))
            told = f"{least:.1f} points on {min(asked)} questions"
            told += f", {most:.1f} on {max(asked)}" if max(asked) > min(asked) else ""
            lines.append(f"{left} against {right}: minimum detectable difference {told}")
    note = f"(two-sided 5 %, power 80 %, {DISCORDANT:.0%} of answers right for one of the two alone)"
    return [*lines, note] if lines else []


def questions(planning: Planning, cell: Cell) -> int:
    """Different questions under a cell, of tasks whose answers are right or wrong."""
    if cell.of:
        return sum(questions(planning, planning.plan.cells[row, cell.column]) for row in cell.of)
    asked: dict[tuple[str, str], int] = {}
    for item in cell.items:
        for reading in item.readings:
            score = next(iter(reading.values()))
            if found := of_score(planning, score):
                asked[found[0], score.language] = found[1]
    return sum(asked.values())


def of_score(planning: Planning, score: ScoreRef) -> tuple[str, int] | None:
    """(task, questions) of one score; None for translations, and where its data is not known."""
    run = planning.evaluation(score) or planning.like(score)
    if run is None:
        return None
    task, language, root = run.config.eval.tasks[0], run.config.languages[0], run.parents.get("data_root")
    unknown = root is not None and root.folder.is_dir() and history.scored_file(run, task, language) is None
    return (task.task, history.questions(run, task, language)) if task.task in QUESTIONS and not unknown else None


# ---------------------------------------------------------------------------------------------------- measured

MEASURED = ("left", "right", "place", "over", "left_value", "right_value", "difference", "low", "high", "p",
            "mcnemar_p", "n", "discordant", "could_see", "detail", "missing")  # fmt: skip


def measured(plan: TablePlan, answers: StoredAnswers) -> list[dict[str, Any]]:
    """A line of contrasts.csv for each of `compare`, in each row (or column) that has both sides.

    Values, difference, interval and could_see (by the measured discordance) in points; over problems, and over the
    experts that both sides' means are over; of translations over sentences. Facts and figures have no lines.
    """
    found = []
    for left, right in plan.compare:
        columns = left in plan.columns
        for place in plan.rows if columns else plan.columns:
            keys = [(place, name) if columns else (name, place) for name in (left, right)]
            cells = [plan.cells[key] for key in keys if key in plan.cells]
            tasks = {task for cell in cells for task in tasks_of(plan, cell)}
            primary = metrics_of(str(*tasks))[:1] if len(tasks) == 1 else []  # none of a fact
            metrics = {cell.metric or metric for cell in cells for metric in primary}
            per_answer = tasks <= QUESTIONS.keys() or metrics <= set(CORPUS_METRICS)
            if len(cells) == 2 and len(metrics) == 1 and None not in tasks and per_answer:
                (metric,) = metrics
                told = {"left": left, "right": right, "place": place}
                found.append(
                    told | line(Claim.plain(plan.table.name, left, right, metric, place), plan, cells, answers)
                )
    return found


def line(claim: Claim, plan: TablePlan, cells: Sequence[Cell], answers: StoredAnswers) -> dict[str, Any]:
    axes = tuple(axis for axis in sampled(plan) if averaged(plan, cells, axis))
    sides = Sides.of(PlacedClaim(claim, plan, claim.over, axes, [[cells[0]]], [[cells[1]]]), answers)
    told: dict[str, Any] = {"over": " ".join(["problems", *axes])}
    try:
        one, values, metric = sides.contrast(), sides.values, claim.metric
        numbers = {name: getattr(one, name) for name in ("difference", "low", "high", "could_see")}
        numbers |= {"left_value": values[0], "right_value": values[1]}
        told |= {name: 100 * value for name, value in numbers.items()}
        told |= {"p": one.p, "n": one.n, "discordant": one.discordant, "detail": sides.detail()}
        both = [sides.side([[cell]], ()) for cell in cells]
        if sides.plain and metric not in CORPUS_METRICS and {*both[0], *both[1]} <= {0, 1}:
            told["mcnemar_p"] = mcnemar(*both).p
    except NoScore as error:
        told["missing"] = str(error)
    return told


def sampled(plan: TablePlan) -> list[str]:
    """The axes whose values are a sample: those that give trainings their seeds, of three values or more."""
    seeds = [str(run.words["seed"]) for run in plan.table.runs.values() if "seed" in run.words]
    return [axis for axis, values in plan.table.axes.items() if len(values) > 2 and f"{{{axis}}}" in seeds]


def averaged(plan: TablePlan, cells: Sequence[Cell], axis: str) -> bool:
    """Whether an axis is in these cells, and each that has it is a mean over it."""
    steps = [how for cell in cells for leaf in leaves(plan, cell) for how, axes in leaf.reduce if axis in axes]
    return bool(steps) and set(steps) == {"mean"}
