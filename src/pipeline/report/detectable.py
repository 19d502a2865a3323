"""Detectable differences and testable claims of a table, before there are scores."""

from __future__ import annotations

from pipeline.benchmarks import is_measure, kind_of
from pipeline.errors import PipelineError
from pipeline.estimate.questions import count_questions, scored_file
from pipeline.report.compare import holm_level
from pipeline.report.contrasts import cell_keys, compared_pairs, sampled_axes
from pipeline.report.expression import lines_of
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.stats.detectable import CORRELATION, planned_difference
from pipeline.tables.plan import Cell, ScoreRef
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import TRAININGS

MORE_SEEDS = (3, 5, 8)  # fewer are no sample


def first_detectable(planning: Planning) -> tuple[str, list[list[str]]] | None:
    """Return the primary or first comparison, and a table of its detectable differences.

    The table has a column for each number of seeds. None if no comparison has questions.
    """
    plan = planning.plan
    family, primary = plan.table.family, plan.table.primary
    compared = []
    for pair in compared_pairs(plan):
        if not family or pair[2] in family:
            compared.append(pair)
    compared.sort(key=lambda pair: pair != primary)
    for pair in compared:
        counts = [questions_under(planning, plan.cells[key]) for key in cell_keys(plan, pair)]
        questions, _ = counts[0]
        if not questions:
            continue
        rank = "primary" if pair == primary else "first"
        name = "{} with {} in {}".format(*pair)
        text = f"{name} ({rank})"
        if len(compared) > 1:
            text += f" and {len(compared) - 1} more (Holm's correction)"
        level = holm_level(len(compared), pair == primary, bool(primary))
        scores = min(averaged for _, averaged in counts)
        seeds = {0, min((len(plan.table.axes[axis]) for axis in sampled_axes(plan)), default=0)}
        if any(run.stage in TRAININGS for run in plan.table.runs.values()):
            seeds.update(MORE_SEEDS)
        heads = [f"points detectable at p < {level:.2g}"]
        numbers = [f"{questions:,} questions"]
        if scores > 1:
            numbers[0] += f", mean of {scores} scores (assumed correlation {CORRELATION:g})"
        for count in sorted(seeds):
            heads.append(f"{count} seeds" if count else "these trainings")
            numbers.append(f"{planned_difference(questions, level, count, scores):.1f}")
        return text, [heads, numbers]
    return None


def untestable_claims(planning: Planning) -> list[str]:
    """Return a line for each claim about a table that no answers could decide, with the reason."""
    lines = []
    for claim in claims_of(planning.plan.table.name):
        try:
            reason = PlacedClaim.of(claim, planning.plan).untestable
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        if reason:
            lines.append(f"claim {claim.id} cannot be tested: {reason}")
    return lines


def questions_under(planning: Planning, cell: Cell) -> tuple[int, int]:
    """Return the number of questions under a cell, and of the scores averaged on each question.

    Only questions whose answers are right or wrong are counted.
    A problem that is asked in several languages counts once. Scores that differ only in sampled
    trainings, or in the candidate of a choice, count as one score.
    """
    sampled = sampled_axes(planning.plan)
    asked: dict[str, int] = {}
    scores, places = set(), set()
    for line in lines_of([cell]):
        if line.item.model is not None or is_measure(line.cell.metric):
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
    return sum(asked.values()), averaged


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int] | None:
    """Return the task of a score and the number of its questions.

    None for translations and text, and if the data is unknown.
    """
    run = planning.expected_evaluation(score)
    if run is None:
        return None
    task, language = run.config.eval.tasks[0], run.config.languages[0]
    root = run.parents.get("data_root")
    is_local = root is not None and root.folder.is_dir()
    if is_local and scored_file(run, task, language) is None:
        return None
    if kind_of(task.task) in ("translation", "text"):
        return None
    return task.task, count_questions(run, task, language)
