"""A table's cells as plain data: each value with its interval over draws of problems, and the choices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.benchmarks.harness import NO_SHARES
from pipeline.config.stages import TrainStage
from pipeline.papers import published as papers
from pipeline.report.expression import is_plain_mean, leaf_cells, scores_under
from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.questions import questions_of, stored_metric, tasks_of
from pipeline.report.stored import VALIDATIONS, NoScore, StoredAnswers, page_text
from pipeline.runs.run import Run, parent_runs
from pipeline.tables.plan import Candidate, Cell, Choice, Item, ScoreRef, difference_of
from pipeline.tables.planned_runs import Planning, primary_value


def describe_cell(stored: StoredAnswers, cell: Cell) -> CellResult:
    """A cell without its number: what it shows, and the evaluations that it is read from."""
    table, plan = stored.table, stored.table.plan
    tasks = tasks_of(plan, [cell])
    shown = [(item, score) for leaf in leaf_cells(plan, cell) for item, score in shown_scores(table, leaf)]
    keys: list[Any] = [item.model for leaf in leaf_cells(plan, cell) for item in leaf.items if item.model]
    for leaf, score in scores_under(plan, cell):
        keys += [score, *(difference_of(score, leaf.metric) or ())[1:]]
    task = "".join(map(str, tasks - {None})) if len(tasks) == 1 else ""
    fine = cell.fact in VALIDATIONS or (cell.metric or primary_metric(task)[0]) in NO_SHARES
    return CellResult(
        cell.row, cell.column, digits=3 if fine else 1,
        n=sum(max(1, len(item.readings)) for leaf in leaf_cells(plan, cell) for item in leaf.items),
        published=papers.published_value(*cell.published) if cell.published else None,
        suspect=papers.reason_for_doubt(*cell.published) if cell.published else None,
        scores=[
            CellScore(run.name, {axis: str(value) for axis, value in item.at.items()},
                      () if cell.fact else stored.rows_of(score, cell))
            for item, score in shown_scores(table, cell) if (run := stored.run_of(score))
        ],
        runs=list(dict.fromkeys(run.name for key in keys if (run := stored.run_of(key)))),
        task=task, metric=cell.metric or "", pair=cell.pair, role=model_role(table, shown[0][1] if shown else None),
    )  # fmt: skip


def cell_result(stored: StoredAnswers, cell: Cell, described: CellResult | None = None) -> CellResult:
    """A cell with its number and 95 % interval, or with the reason why it has none. described: by `describe_cell`."""
    result = described or describe_cell(stored, cell)
    if cell.fact is None and any(item.model is not None for item in cell.items):
        return replace(result, n=len(result.runs), missing="a figure, in its run's folder")
    try:
        value = float(stored.value(cell))
    except NoScore as error:
        return replace(result, n=0, missing=page_text(str(error), stored.table.config.runs_dir))
    is_chosen = cell.fact is None and not is_plain_mean(stored.table.plan, cell)
    estimate, low, high = estimate_interval(stored, cell, is_chosen) or (value, None, None)
    maximum = value if is_chosen else None
    return replace(result, value=estimate if is_chosen else value, low=low, high=high, maximum=maximum)


def shown_scores(table: Planning, cell: Cell) -> Iterator[tuple[Item, ScoreRef]]:
    """(item, score) of the scores that a cell shows: the winner's if there is a choice, none while it is open."""
    for item in cell.items:
        winner = table.chosen_candidate(item.choice) if item.choice else ()
        for reading in item.readings:
            score = reading.get(()) or (reading.get(winner) if winner is not None else None)
            if score is not None:
                yield item, score


def model_role(table: Planning, score: ScoreRef | None) -> str:
    """base, expert or merge: the role of a scored model; empty if it is unknown. A training on several sets counts as a
    merge, an external checkpoint as an expert."""
    model = table.model_of(score) if score else None
    if model is None:
        return ""
    spec = table.plan.specs[model]
    if spec.kind != "stage":
        return "expert" if spec.kind == "checkpoint" else spec.kind
    training: Any = table.models.get(spec.key)
    while isinstance(training, Run) and not isinstance(training.config, TrainStage):
        training = next(
            iter(parent_runs(training.parents)), None
        )  # the training that a selection or a reset starts from
    is_joint = isinstance(training, Run) and training.config.sft.method in ("mixed", "simultaneous")
    return "merge" if is_joint or spec.words.get("stage") == "merge" else "expert"


def estimate_interval(stored: StoredAnswers, cell: Cell, is_chosen: bool) -> tuple[float, float, float] | None:
    """A cell and its 95 % interval over draws of problems, in percent or bits. What is chosen (the best configuration,
    a maximum) is scored on the half of the problems that it was not chosen on, and chosen again in each draw.

    Seeds and experts are treated as fixed. For BLEU and chrF++ it is the normal interval of the draws, whose standard
    deviation is at least that of one sentence. None for facts, figures and spBLEU, and where answers were not stored.
    """
    import numpy as np

    metric = stored_metric(stored.table.plan, [cell])
    if metric is None:
        return None
    questions = questions_of(stored.table.plan, stored, [cell], metric)
    try:
        value, variance = questions.mean_and_variance(cell)
        if is_chosen:
            value, draws = questions.split_half(partial(questions.cell, cell))
            variance = float(np.var(draws, ddof=1))
        low, high = questions.interval(value, variance)
    except NoScore:
        return None
    return 100 * value, 100 * low, 100 * high


def choices_of(table: Planning) -> dict[str, Any]:
    """Each choice: what was chosen, and the candidates, each with its mean (None while a score is missing) and the runs
    that scored it."""
    choices = {}
    for key, choice in table.plan.choices.items():
        candidates = []
        for candidate, scores in choice.candidates.items():
            runs = [run for score in scores if (run := table.evaluation_of(score))]
            numbers = [number for run in runs if (number := primary_value(run)) is not None]
            mean = statistics.fmean(numbers) if len(numbers) == len(scores) else None
            candidates.append({**at_of(choice, candidate), "mean": mean, "scores": [run.name for run in runs]})
        chosen = table.chosen_candidate(key)
        winner = at_of(choice, chosen) if chosen else None
        choices[key] = {"run": choice.run, "at": choice.at, "chosen": winner, "candidates": candidates}
    return choices


def at_of(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, candidate, strict=True))
