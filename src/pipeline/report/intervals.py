"""A table's cells and choices as plain data: each value with its interval over draws of problems."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.benchmarks import is_measure
from pipeline.config.stages import TrainStage
from pipeline.report.cell_values import VALIDATIONS, NoScore, Outcome
from pipeline.report.contrasts import sampled_axes
from pipeline.report.expression import is_plain_mean, leaf_cells, scores_under
from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.placed_claims import metrics_of, tasks_of
from pipeline.report.questions import StoredAnswers, questions_of
from pipeline.runs.run import Run, parent_runs
from pipeline.stats.statistics import replication_reach
from pipeline.stats.translations import CORPUS_METRICS
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import Candidate, Cell, Choice, Item, ScoreRef, TablePlan
from pipeline.tables.planned_runs import primary_value


def cell_result(outcome: Outcome, place: tuple[str, str], answers: StoredAnswers) -> CellResult:
    """A cell of the outcome with its interval and the evaluations that it was read from."""
    table, cell, found = outcome.table, outcome.table.plan.cells[place], outcome.cells[place]
    is_chosen = cell.fact is None and not is_plain_mean(table.plan, cell)
    estimated = estimate_interval(table.plan, cell, is_chosen, answers) if found.value is not None else None
    value, low, high = estimated or (found.value, None, None)
    is_comparable = found.value is not None and found.published is not None
    tasks = tasks_of(table.plan, cell) if cell.fact is None else set()
    leaf_scores = (score for leaf in leaf_cells(table.plan, cell) for _, score in shown_scores(table, leaf))
    return replace(
        found, value=value if is_chosen else found.value, low=low, high=high,
        maximum=found.value if is_chosen else None, digits=3 if cell.fact in VALIDATIONS else 1,
        base=is_comparable and is_untrained(table.plan, cell),
        experts=expert_reach(outcome, cell) if is_comparable else None,
        scores=[
            CellScore(run.name, {axis: str(value) for axis, value in item.at.items()})
            for item, score in shown_scores(table, cell) if (run := table.evaluations.get(score))
        ],
        task="".join(map(str, tasks - {None})) if len(tasks) == 1 else "", metric=cell.metric or "", pair=cell.pair,
        role=model_role(table, next(leaf_scores, None)),
    )  # fmt: skip


def shown_scores(table: BoundTable, cell: Cell) -> Iterator[tuple[Item, ScoreRef]]:
    """(item, score) of the scores that a cell shows: the winner's if there is a choice, none while it is open."""
    for item in cell.items:
        winner = table.winners[item.choice] if item.choice else ()
        for reading in item.readings:
            score = reading.get(()) or (reading.get(winner) if winner is not None else None)
            if score is not None:
                yield item, score


def model_role(table: BoundTable, score: ScoreRef | None) -> str:
    """base, expert or merge: the role of a scored model; empty if it is unknown. A training on several sets counts as a
    merge, an external checkpoint as an expert."""
    spec = table.spec_of(score) if score else None
    if spec is None:
        return ""
    if spec.kind != "stage":
        return "expert" if spec.kind == "checkpoint" else spec.kind
    training: Any = table.models.get(spec.key)
    while isinstance(training, Run) and not isinstance(training.config, TrainStage):
        training = next(
            iter(parent_runs(training.parents)), None
        )  # the training that a selection or a reset starts from
    is_joint = isinstance(training, Run) and training.config.sft.method in ("mixed", "simultaneous")
    return "merge" if is_joint or spec.words.get("stage") == "merge" else "expert"


def estimate_interval(
    plan: TablePlan, cell: Cell, is_chosen: bool, answers: StoredAnswers
) -> tuple[float, float, float] | None:
    """A cell and its 95 % interval over draws of problems, in percent or bits. What is chosen (the best configuration,
    a maximum) is scored on the half of the problems that it was not chosen on, and chosen again in each draw.

    Seeds and experts are treated as fixed. For BLEU and chrF++ it is the normal interval of the draws, whose standard
    deviation is at least that of one sentence. None for facts, figures and spBLEU, and where answers were not stored.
    """
    import numpy as np

    tasks = [str(task) for task in tasks_of(plan, cell)]
    metric = cell.metric or next(iter(metrics_of(tasks[0])), "") if len(tasks) == 1 else ""
    if cell.fact or not (metric in CORPUS_METRICS or is_measure(metric) or (metric and not cell.metric)):
        return None
    questions = questions_of(plan, answers, [cell], metric)
    try:
        value, variance = questions.mean_and_variance(cell)
        if is_chosen:
            value, draws = questions.split_half(partial(questions.cell, cell))
            variance = float(np.var(draws, ddof=1))
        low, high = questions.interval(value, variance)
    except NoScore:
        return None
    return 100 * value, 100 * low, 100 * high


def is_untrained(plan: TablePlan, cell: Cell) -> bool:
    """Whether all models that a cell scores are the unmodified model of `every`."""
    specs = plan.specs
    models = [score.model for _, score in scores_under(plan, cell)]
    return all(model in specs and specs[model].kind == "base" for model in models)


def expert_reach(outcome: Outcome, cell: Cell) -> float | None:
    """Points by which another set of experts may differ (95 %); None if a cell is not reduced over several experts."""
    plan, axis_numbers = outcome.table.plan, []
    steps = {axis: how for leaf in leaf_cells(plan, cell) for how, axes in leaf.reduce for axis in axes}
    for axis in sampled_axes(plan):
        if axis in steps and len(numbers := outcome.evaluate(cell, {}, [axis])) > 1:
            axis_numbers.append((list(numbers), steps[axis] == "mean"))
    return replication_reach(axis_numbers) if axis_numbers else None


def choices_of(table: BoundTable) -> dict[str, Any]:
    """Each choice: what was chosen, and the candidates, each with its mean (None while a score is missing) and the runs
    that scored it."""
    choices = {}
    for key, choice in table.plan.choices.items():
        candidates = []
        for candidate, scores in choice.candidates.items():
            runs = [run for score in scores if (run := table.evaluations.get(score))]
            numbers = [number for run in runs if (number := primary_value(run)) is not None]
            mean = statistics.fmean(numbers) if len(numbers) == len(scores) else None
            candidates.append({**at_of(choice, candidate), "mean": mean, "scores": [run.name for run in runs]})
        chosen = table.winners[key]
        winner = at_of(choice, chosen) if chosen else None
        choices[key] = {"run": choice.run, "at": choice.at, "chosen": winner, "candidates": candidates}
    return choices


def at_of(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, candidate, strict=True))
