"""A table's cells and choices as plain data: what stands in each, and what of it is beyond the draw of problems."""

from __future__ import annotations

from typing import Any

from pipeline.report.archive import shared
from pipeline.report.contents import TableCell
from pipeline.report.statistics import replication_reach
from pipeline.study.answers import Questions, StoredAnswers, drawn, leaves
from pipeline.study.asked import metrics_of, tasks_of
from pipeline.study.cells import Candidate, Cell, Choice
from pipeline.study.contrasts import sampled
from pipeline.study.cost import QUESTIONS
from pipeline.study.outcome import VALIDATIONS, NoScore, Outcome
from pipeline.study.planning import Planning


def table_cell(outcome: Outcome, place: tuple[str, str], answers: StoredAnswers) -> TableCell:
    planning, cell, number = outcome.planning, outcome.planning.plan.cells[place], outcome.cells[place]
    digits = 3 if cell.fact in VALIDATIONS else 1
    low, high = bounds(planning, cell, answers) if number.value is not None else (None, None)
    judged = number.value is not None and number.published is not None
    return TableCell(
        *place, value=number.value, low=low, high=high, n=number.n, published=number.published,
        base=judged and untrained(planning, cell), experts=experts(outcome, cell) if judged else None,
        suspect=number.suspect,
        missing=shared(number.missing), runs=[folder.name for folder in number.runs], digits=digits,
    )  # fmt: skip


def bounds(planning: Planning, cell: Cell, answers: StoredAnswers) -> tuple[float | None, float | None]:
    """95 % of a cell in percent, over draws of problems in each of which its choices are made again.

    What it is reduced over besides (seeds, experts) is taken as it is. None of facts, of figures, of metrics of whole
    sets (chrF++), and where answers were not kept.
    """
    import numpy as np

    plan = planning.plan
    tasks = [str(task) for task in tasks_of(plan, cell)]
    if cell.fact or cell.metric or len(tasks) != 1 or tasks[0] not in QUESTIONS:
        return None, None
    try:
        draws = Questions(plan, answers, [cell], metrics_of(tasks[0])[0]).draws
        low, high = np.quantile(100 * drawn(plan, cell, draws, draws)[1], [0.025, 0.975])
    except NoScore:
        return None, None
    return float(low), float(high)


def untrained(planning: Planning, cell: Cell) -> bool:
    """Whether all that a cell scores is the model of `every`, as it is."""
    specs = planning.plan.specs
    models = [
        s.model for leaf in leaves(planning.plan, cell) for one in leaf.items for r in one.readings for s in r.values()
    ]
    return all(model in specs and specs[model].kind == "base" for model in models)


def experts(outcome: Outcome, cell: Cell) -> float | None:
    """Points by which another set of experts may differ (95 %); None where a cell is not reduced over several."""
    plan, found = outcome.planning.plan, []
    steps = {axis: how for leaf in leaves(plan, cell) for how, axes in leaf.reduce for axis in axes}
    for axis in sampled(plan):
        if axis in steps and len(levels := outcome.levels(cell, axis)) > 1:
            found.append((levels, steps[axis] == "mean"))
    return replication_reach(found) if found else None


def choices_of(planning: Planning, outcome: Outcome) -> dict[str, Any]:
    """What was chosen, of which candidates: each with its mean and the runs that scored it."""
    found = {}
    for key, made in outcome.choices.items():
        choice = planning.plan.choices[key]
        candidates = [
            {
                **at_of(choice, one), "mean": made.means[one],
                "scores": [run.name for score in scores if (run := planning.evaluation(score))],
            }
            for one, scores in choice.candidates.items()
        ]  # fmt: skip
        won = at_of(choice, made.winner) if made.winner else None
        found[key] = {"run": choice.run, "at": choice.at, "chosen": won, "candidates": candidates}
    return found


def at_of(choice: Choice, one: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, one, strict=True))
