"""A table's cells and choices as plain data: what stands in each, and what of it is beyond the draw of problems."""

from __future__ import annotations

from typing import Any

from pipeline.report.archive import shared
from pipeline.report.contents import TableCell
from pipeline.study.answers import Questions, StoredAnswers, drawn
from pipeline.study.asked import metrics_of, tasks_of
from pipeline.study.cells import Candidate, Cell, Choice
from pipeline.study.cost import QUESTIONS
from pipeline.study.outcome import VALIDATIONS, NoScore, Number, Outcome
from pipeline.study.planning import Planning


def table_cell(planning: Planning, place: tuple[str, str], number: Number, answers: StoredAnswers) -> TableCell:
    digits = 3 if planning.plan.cells[place].fact in VALIDATIONS else 1
    low, high = bounds(planning, planning.plan.cells[place], answers) if number.value is not None else (None, None)
    return TableCell(
        *place, value=number.value, low=low, high=high, n=number.n, published=number.published, suspect=number.suspect,
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
