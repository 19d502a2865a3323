"""A table's cells and choices as plain data: what stands in each, and what of it is beyond the draw of problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.report.load.archive import without_private
from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.stats.statistics import replication_reach
from pipeline.report.stats.translations import CORPUS_METRICS
from pipeline.results.cell_values import VALIDATIONS, NoScore, Outcome
from pipeline.results.contrasts import sampled
from pipeline.results.placed_claims import metrics_of, tasks_of
from pipeline.results.questions import StoredAnswers, drawn, leaves, linear, questions_of
from pipeline.runs.run import Run, runs_behind
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import Candidate, Cell, Choice, Item, ScoreRef, TablePlan


def cell_result(outcome: Outcome, place: tuple[str, str], answers: StoredAnswers) -> CellResult:
    """A cell as the report has it, with the evaluations behind it."""
    table, cell, number = outcome.table, outcome.table.plan.cells[place], outcome.cells[place]
    digits = 3 if cell.fact in VALIDATIONS else 1
    is_chosen = cell.fact is None and not linear(table.plan, cell)
    estimated = estimate(table.plan, cell, is_chosen, answers) if number.value is not None else None
    value, low, high = estimated or (number.value, None, None)
    judged = number.value is not None and number.published is not None
    tasks = tasks_of(table.plan, cell) if cell.fact is None else set()
    scores = list(shown(table, cell))
    return CellResult(
        *place, value=value if is_chosen else number.value, low=low, high=high, n=number.n, published=number.published,
        base=judged and untrained(table.plan, cell), experts=experts(outcome, cell) if judged else None,
        suspect=number.suspect, missing=without_private(number.missing), runs=[folder.name for folder in number.runs],
        digits=digits, maximum=number.value if is_chosen else None,
        scores=[
            CellScore(run.name, {axis: str(value) for axis, value in item.at.items()})
            for item, score in scores if (run := table.evaluations.get(score))
        ],
        task="".join(map(str, tasks - {None})) if len(tasks) == 1 else "", metric=cell.metric or "", pair=cell.pair,
        role=role(table, next((score for leaf in leaves(table.plan, cell) for _, score in shown(table, leaf)),
                                 None)),
    )  # fmt: skip


def shown(table: BoundTable, cell: Cell) -> Iterator[tuple[Item, ScoreRef]]:
    """The scores that a cell shows: of what is chosen, the winner's; none while a choice is open."""
    for item in cell.items:
        winner = table.winners[item.choice] if item.choice else ()
        for reading in item.readings:
            score = reading.get(()) or (reading.get(winner) if winner is not None else None)
            if score is not None:
                yield item, score


def role(table: BoundTable, score: ScoreRef | None) -> str:
    """base, expert or merge, of a scored model; a training on several sets counts as a merge."""
    spec = table.spec_of(score) if score else None
    if spec is None or spec.kind != "stage":
        return "" if spec is None else spec.kind if spec.kind in ("base", "merge") else "expert"
    training: Any = table.models.get(spec.key)
    while isinstance(training, Run) and not isinstance(training.config, TrainStage):
        training = next(iter(runs_behind(training.parents)), None)  # of a selection, a reset: what it was made of
    joint = isinstance(training, Run) and training.config.sft.method in ("mixed", "simultaneous")
    return "merge" if joint or spec.words.get("stage") == "merge" else "expert"


def estimate(plan: TablePlan, cell: Cell, is_chosen: bool, answers: StoredAnswers) -> tuple[float, float, float] | None:
    """A cell and its 95 % interval over draws of problems, in percent. What is chosen (the best configuration, a
    maximum) is scored on the half of the problems that it was not chosen on, and chosen again in each draw.

    What it is reduced over besides (seeds, experts) is taken as it is. Of BLEU and chrF++ it is the normal interval of
    the draws, whose standard deviation is one sentence's at least. None of facts, of figures, of spBLEU, and where
    answers were not kept.
    """
    import numpy as np

    tasks = [str(task) for task in tasks_of(plan, cell)]
    metric = cell.metric or next(iter(metrics_of(tasks[0])), "") if len(tasks) == 1 else ""
    if cell.fact or not (metric in CORPUS_METRICS or (metric and not cell.metric)):
        return None
    questions = questions_of(plan, answers, [cell], metric)
    try:
        value, variance = questions.plain(cell)
        if is_chosen:
            value, draws = questions.halved(lambda choosing, shown: drawn(plan, cell, choosing, shown)[1])
            variance = float(np.var(draws, ddof=1))
        low, high = questions.interval(value, variance)
    except NoScore:
        return None
    return 100 * value, 100 * low, 100 * high


def untrained(plan: TablePlan, cell: Cell) -> bool:
    """Whether all that a cell scores is the model of `every`, as it is."""
    specs = plan.specs
    models = [s.model for leaf in leaves(plan, cell) for item in leaf.items for r in item.readings for s in r.values()]
    return all(model in specs and specs[model].kind == "base" for model in models)


def experts(outcome: Outcome, cell: Cell) -> float | None:
    """Points by which another set of experts may differ (95 %); None where a cell is not reduced over several."""
    plan, axes_levels = outcome.table.plan, []
    steps = {axis: how for leaf in leaves(plan, cell) for how, axes in leaf.reduce for axis in axes}
    for axis in sampled(plan):
        if axis in steps and len(levels := outcome.levels(cell, axis)) > 1:
            axes_levels.append((levels, steps[axis] == "mean"))
    return replication_reach(axes_levels) if axes_levels else None


def choices_of(outcome: Outcome) -> dict[str, Any]:
    """What was chosen, of which candidates: each with its mean and the runs that scored it."""
    choices = {}
    for key, decided in outcome.choices.items():
        choice = outcome.table.plan.choices[key]
        candidates = [
            {
                **at_of(choice, candidate), "mean": decided.means[candidate],
                "scores": [run.name for score in scores if (run := outcome.table.evaluations.get(score))],
            }
            for candidate, scores in choice.candidates.items()
        ]  # fmt: skip
        won = at_of(choice, decided.winner) if decided.winner else None
        choices[key] = {"run": choice.run, "at": choice.at, "chosen": won, "candidates": candidates}
    return choices


def at_of(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    return dict(zip(choice.axes, candidate, strict=True))
