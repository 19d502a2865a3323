"""A table's cells and choices as plain data: what stands in each, and how it is made of answers."""

from __future__ import annotations

from typing import Any

from pipeline.report.archive import shared
from pipeline.report.contents import TableCell
from pipeline.study.cells import Candidate, Cell, Choice, ScoreRef
from pipeline.study.outcome import Number, Outcome
from pipeline.study.planning import Planning


def table_cell(planning: Planning, place: tuple[str, str], number: Number) -> TableCell:
    cell = planning.plan.cells[place]
    return TableCell(
        *place, value=number.value, n=number.n, published=number.published, suspect=number.suspect,
        missing=shared(number.missing), runs=[folder.name for folder in number.runs], formula=formula(planning, cell),
    )  # fmt: skip


def formula(planning: Planning, cell: Cell) -> dict[str, Any]:
    """How a cell is made of answers (report/intervals.py); empty of facts, figures, and metrics beside the primary."""
    reduce = [[how, list(axes)] for how, axes in cell.reduce]
    if cell.of:
        return {"of": list(cell.of), "reduce": reduce}
    if cell.metric or any(item.model for item in cell.items):
        return {}
    items = [
        {
            "at": {axis: str(value) for axis, value in item.at.items()},
            "choice": item.choice,
            "readings": [
                {key_of(one): leaf for one, score in reading.items() if (leaf := leaf_of(planning, score, cell.pair))}
                for reading in item.readings
            ],
        }
        for item in cell.items
    ]
    return {"items": items, "reduce": reduce}


def key_of(candidate: Candidate) -> str:
    return " ".join(map(str, candidate))


def leaf_of(planning: Planning, score: ScoreRef, pair: str | None = None) -> list[list[str]]:
    run = planning.evaluation(score)
    return [[run.folder.name, run.config.eval.tasks[0].task, pair or score.language]] if run else []


def choices_of(planning: Planning, outcome: Outcome) -> dict[str, Any]:
    """What was chosen, of which candidates: each with its mean and the runs that scored it."""
    found = {}
    for key, made in outcome.choices.items():
        choice = planning.plan.choices[key]
        candidates = []
        for one, scores in choice.candidates.items():
            leaves = [leaf for score in scores if (leaf := leaf_of(planning, score))]
            told = {"mean": made.means[one], "scores": [leaf[0][0] for leaf in leaves]}
            candidates.append({**at_of(choice, one), **told, "key": key_of(one), "leaves": leaves})
        won = at_of(choice, made.winner) if made.winner else None
        found[key] = {"run": choice.run, "at": choice.at, "chosen": won, "candidates": candidates}
    return found


def at_of(choice: Choice, one: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, one, strict=True))
