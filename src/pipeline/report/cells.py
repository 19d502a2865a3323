"""A table's cells as plain data: each value with its interval over draws of problems, and the
choices.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.benchmarks.harness import NO_SHARES
from pipeline.config.stages import TrainStage
from pipeline.papers import published as papers
from pipeline.report.expression import ScoreLine, is_plain_mean, lines_of
from pipeline.report.frame import NoScore
from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.metrics import stored_metric, tasks_of
from pipeline.report.stored import VALIDATIONS, StoredAnswers, page_text
from pipeline.runs.run import Run, parent_runs
from pipeline.tables.plan import Candidate, Cell, Choice, ScoreRef, difference_of
from pipeline.tables.planned_runs import Planning, primary_value


def describe_cell(stored: StoredAnswers, cell: Cell) -> CellResult:
    """Return a cell without its number: what it shows, and the evaluations that it is read from."""
    table, plan = stored.table, stored.table.plan
    lines = lines_of(plan, [cell])
    tasks = tasks_of(plan, [cell])
    task = ""
    if len(tasks) == 1:
        task = "".join(map(str, tasks - {None}))
    runs: dict[str, None] = {}
    for line in lines:
        further = None
        if isinstance(line.score, ScoreRef):
            further = difference_of(line.score, line.leaf.metric)
        for score in (line.score, *(further or ())[1:]):
            run = table.run_of(score)
            if run:
                runs[run.name] = None
    shown = [line for line in lines if is_shown(table, line)]
    scores = []
    for line in shown:
        run = table.run_of(line.score)
        if run and line.leaf is cell:
            at = {axis: str(value) for axis, value in line.item.at.items()}
            scores.append(
                CellScore(run.name, at, () if cell.fact else stored.rows_of(line.score, cell))
            )
    fine = cell.fact in VALIDATIONS or (cell.metric or primary_metric(task)[0]) in NO_SHARES
    return CellResult(
        cell.row,
        cell.column,
        digits=3 if fine else 1,
        n=len({(id(line.item), line.place) for line in lines}),
        published=papers.published_value(*cell.published) if cell.published else None,
        suspect=papers.reason_for_doubt(*cell.published) if cell.published else None,
        scores=scores,
        runs=list(runs),
        task=task,
        metric=cell.metric or "",
        pair=cell.pair,
        role=model_role(table, shown[0].score if shown else None),
    )


def cell_result(
    stored: StoredAnswers, cell: Cell, described: CellResult | None = None
) -> CellResult:
    """Return a cell with its number and 95 % interval, or with the reason why it has none.

    described: by `describe_cell`.
    """
    plan = stored.table.plan
    result = described or describe_cell(stored, cell)
    if cell.fact is None and any(item.model is not None for item in cell.items):
        return replace(result, n=len(result.runs), missing="a figure, in its run's folder")
    try:
        value = float(stored.value(cell))
    except NoScore as error:
        return replace(result, n=0, missing=page_text(str(error), stored.table.config.runs_dir))
    if cell.fact is None and not is_plain_mean(plan, cell):
        result = replace(result, maximum=value)
    estimate = estimate_interval(stored, cell)
    if estimate is None:
        return replace(result, value=value)
    return replace(
        result,
        value=value if result.maximum is None else estimate[0],
        low=estimate[1],
        high=estimate[2],
    )


def estimate_interval(stored: StoredAnswers, cell: Cell) -> tuple[float, float, float] | None:
    """Return a cell and its 95 % interval over draws of questions, in percent or bits.

    None for facts, figures and spBLEU, and if answers were not stored.
    """
    plan = stored.table.plan
    metric = stored_metric(plan, [cell])
    if metric is None:
        return None
    try:
        value, low, high = stored.frame(plan, [cell], metric).estimate(cell)
    except NoScore:
        return None
    return 100 * value, 100 * low, 100 * high


def is_shown(table: Planning, line: ScoreLine) -> bool:
    """Return True if a cell shows this score: if there is a choice, the winner's, and none while it
    is open.
    """
    if line.item.model is not None:
        return False
    return line.candidate == () or line.candidate == table.chosen_candidate(str(line.item.choice))


def model_role(table: Planning, score: ScoreRef | None) -> str:
    """Return the role of a scored model, base, expert or merge, or "" if it is unknown.

    A training on several sets counts as a merge, an external checkpoint as an expert.
    """
    model = table.model_of(score) if score else None
    if model is None:
        return ""
    spec = table.plan.specs[model]
    if spec.kind != "stage":
        if spec.kind == "checkpoint":
            return "expert"
        return spec.kind
    training: Any = table.models.get(spec.key)
    while isinstance(training, Run) and not isinstance(training.config, TrainStage):
        training = next(
            iter(parent_runs(training.parents)), None
        )  # the training that a selection or a reset starts from
    is_joint = isinstance(training, Run) and training.config.sft.method in ("mixed", "simultaneous")
    if is_joint or spec.words.get("stage") == "merge":
        return "merge"
    return "expert"


def choices_of(table: Planning) -> dict[str, Any]:
    """Each choice: what was chosen, and the candidates, each with its mean (None while a score is
    missing) and the runs that scored it.
    """
    choices = {}
    for key, choice in table.plan.choices.items():
        candidates = []
        for candidate, scores in choice.candidates.items():
            runs = []
            for score in scores:
                run = table.evaluation_of(score)
                if run:
                    runs.append(run)
            numbers = [number for run in runs if (number := primary_value(run)) is not None]
            mean = None
            if len(numbers) == len(scores):
                mean = statistics.fmean(numbers)
            candidates.append(
                {**at_of(choice, candidate), "mean": mean, "scores": [run.name for run in runs]}
            )
        chosen = table.chosen_candidate(key)
        winner = at_of(choice, chosen) if chosen else None
        choices[key] = {
            "run": choice.run,
            "at": choice.at,
            "chosen": winner,
            "candidates": candidates,
        }
    return choices


def at_of(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, candidate, strict=True))
