"""A table's contrasts: their minimum detectable difference before anything is run, and what they measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pipeline.benchmarks import kind_of
from pipeline.estimate.questions import count_questions, scored_file
from pipeline.report.load.contents import CellResult
from pipeline.report.stats.claims import Claim
from pipeline.report.stats.ranks import holm
from pipeline.report.stats.statistics import LEVEL, mcnemar, smallest_difference
from pipeline.report.stats.translations import CORPUS_METRICS
from pipeline.results.cell_values import NoScore
from pipeline.results.placed_claims import PlacedClaim, metrics_of, tasks_of
from pipeline.results.questions import StoredAnswers, leaves
from pipeline.results.verdicts import Sides
from pipeline.tables.plan import Cell, ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning

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
            if left in place and tuple(right if name == left else name for name in place) in cells
        ]
        sizes = [count for count in counts if count]
        if sizes:
            on_fewest, on_most = (100 * smallest_difference(count, DISCORDANT) for count in (min(sizes), max(sizes)))
            text = f"{on_fewest:.1f} points on {min(sizes)} questions"
            text += f", {on_most:.1f} on {max(sizes)}" if max(sizes) > min(sizes) else ""
            lines.append(f"{left} against {right}: minimum detectable difference {text}")
    note = f"(two-sided 5 %, power 80 %, {DISCORDANT:.0%} of answers right for one of the two alone)"
    return [*lines, note] if lines else []


def questions(planning: Planning, cell: Cell) -> int:
    """Different questions under a cell, of tasks whose answers are right or wrong."""
    if cell.of:
        return sum(questions(planning, planning.plan.cells[row, cell.column]) for row in cell.of)
    sizes: dict[tuple[str, str], int] = {}
    for item in cell.items:
        for reading in item.readings:
            score = next(iter(reading.values()))
            if task_size := of_score(planning, score):
                sizes[task_size[0], score.language] = task_size[1]
    return sum(sizes.values())


def of_score(planning: Planning, score: ScoreRef) -> tuple[str, int] | None:
    """(task, questions) of one score; None for translations, and where its data is not known."""
    run = planning.evaluation(score) or planning.like(score)
    if run is None:
        return None
    task, language, root = run.config.eval.tasks[0], run.config.languages[0], run.parents.get("data_root")
    unknown = root is not None and root.folder.is_dir() and scored_file(run, task, language) is None
    if unknown or kind_of(task.task) == "translation":
        return None
    return task.task, count_questions(run, task, language)


# ---------------------------------------------------------------------------------------------------- measured

MEASURED = ("left", "right", "place", "over", "left_value", "right_value", "difference", "low", "high", "p",
            "mcnemar_p", "n", "discordant", "could_see", "detail", "missing")  # fmt: skip


Pair = tuple[str, str, str]  # left, right, and the row or column that has both


def compared(plan: TablePlan) -> list[Pair]:
    """The pairs that a table's `compare` names, in each row (or column) that has both sides."""
    places = [plan.rows if left in plan.columns else plan.columns for left, _ in plan.compare]
    pairs = [(*sides, place) for sides, across in zip(plan.compare, places, strict=True) for place in across]
    return [pair for pair in pairs if all(key in plan.cells for key in keys_of(plan, pair))]


def default_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> list[Pair]:
    """For a table that compares nothing: in math, each merge with the base and with the best expert, which is chosen
    by these questions, in its own favour. A best configuration is no merge here: these questions chose it."""
    by_row = any(side.words.get("run") for side in plan.table.rows)
    by_place: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        if kind_of(cell.task) == "number" and cell.value is not None:
            model, place = (cell.row, cell.column) if by_row else (cell.column, cell.row)
            by_place.setdefault(place, {})[model] = cell
    pairs: list[Pair] = []
    for place, models in by_place.items():
        bases, experts, merges = ([name for name, cell in models.items() if cell.role == role]
                                  for role in ("base", "expert", "merge"))  # fmt: skip
        best = sorted(experts, key=lambda name: -(models[name].value or 0))[:1]
        merges = [name for name in merges if models[name].maximum is None]
        pairs += [(merge, rival, place) for merge in merges for rival in (*bases, *best)]
    return pairs


def keys_of(plan: TablePlan, pair: Pair) -> list[tuple[str, str]]:
    left, right, place = pair
    return [(place, name) if left in plan.columns else (name, place) for name in (left, right)]


def measured(plan: TablePlan, answers: StoredAnswers, pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """A line of contrasts.csv for each pair.

    Values, difference, interval and could_see (by the measured discordance) in points; over problems, and over the
    experts that both sides' means are over; of translations over sentences. Facts and figures have no lines.
    """
    lines = []
    for pair in pairs:
        cells = [plan.cells[key] for key in keys_of(plan, pair)]
        if metric := shared_metric(plan, cells):
            line = dict(zip(("left", "right", "place"), pair, strict=True)) | measure(
                plan, cells, metric, pair, answers
            )
            lines.append({key: line.get(key) for key in MEASURED})
    return lines


def shared_metric(plan: TablePlan, cells: Sequence[Cell]) -> str | None:
    """The one metric that cells show, where it is kept answer by answer; None where they show others, or facts."""
    tasks = {task for cell in cells for task in tasks_of(plan, cell)}
    primary = metrics_of(str(*tasks))[:1] if len(tasks) == 1 else []
    metrics = {cell.metric or metric for cell in cells for metric in primary}
    kinds = {kind_of(task) for task in tasks if task}
    per_answer = not kinds & {None, "translation"} or metrics <= set(CORPUS_METRICS)
    return metrics.pop() if len(metrics) == 1 and None not in tasks and per_answer else None


def sides_of(plan: TablePlan, cells: Sequence[Cell], metric: str, pair: Pair, answers: StoredAnswers) -> Sides:
    axes = tuple(axis for axis in sampled(plan) if averaged(plan, cells, axis))
    claim = Claim.plain(plan.table.name, pair[0], pair[1], metric, pair[2])
    return Sides.of(PlacedClaim(claim, plan, claim.over, axes, [[cells[0]]], [[cells[1]]]), answers)


def measure(plan: TablePlan, cells: Sequence[Cell], metric: str, pair: Pair, answers: StoredAnswers) -> dict[str, Any]:
    sides = sides_of(plan, cells, metric, pair, answers)
    line: dict[str, Any] = {"over": " ".join(["problems", *sides.asked.axes])}
    try:
        contrast, values = sides.contrast(), sides.values
        numbers = {name: getattr(contrast, name) for name in ("difference", "low", "high", "could_see")}
        numbers |= {"left_value": values[0], "right_value": values[1]}
        line |= {name: 100 * value for name, value in numbers.items()}
        line |= {"p": contrast.p, "n": contrast.n, "discordant": contrast.discordant, "detail": sides.detail()}
        answers_of_sides = [sides.side([[cell]], ()) for cell in cells]
        if sides.plain and metric not in CORPUS_METRICS and {*answers_of_sides[0], *answers_of_sides[1]} <= {0, 1}:
            line["mcnemar_p"] = mcnemar(*answers_of_sides).p
    except NoScore as error:
        line["missing"] = str(error)
    return line


def with_best(plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells, the best of each place marked: significantly above every other model there, after Holm's correction
    over them. A best configuration never is: these questions chose it."""
    by_row = any(side.words.get("run") for side in plan.table.rows)
    places: dict[tuple[str, str, str | None], list[CellResult]] = {}
    for cell in cells:
        if cell.value is not None and cell.task:
            places.setdefault((cell.column if by_row else cell.row, cell.task, cell.pair), []).append(cell)
    best = {id(top) for candidates in places.values() if (top := best_of(plan, answers, candidates)) is not None}
    return [replace(cell, best=id(cell) in best) for cell in cells]


def best_of(plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult]) -> CellResult | None:
    """The first rival that the highest is not significantly above ends it: contrasts of translations take seconds."""
    top, *rivals = sorted(cells, key=lambda cell: -(cell.value or 0))
    ps = []
    for rival in rivals if top.maximum is None else []:
        pair = [plan.cells[cell.row, cell.column] for cell in (top, rival)]
        metric = shared_metric(plan, pair)
        if metric is None:
            return None
        try:
            contrast = sides_of(plan, pair, metric, (top.row, rival.row, top.column), answers).contrast()
        except NoScore:
            return None
        if contrast.p >= LEVEL or contrast.difference <= 0:
            return None
        ps.append(contrast.p)
    return top if ps and max(holm(ps)) < LEVEL else None


def sampled(plan: TablePlan) -> list[str]:
    """The axes whose values are a sample: those that give trainings their seeds, of three values or more."""
    seeds = [str(run.words["seed"]) for run in plan.table.runs.values() if "seed" in run.words]
    return [axis for axis, values in plan.table.axes.items() if len(values) > 2 and f"{{{axis}}}" in seeds]


def averaged(plan: TablePlan, cells: Sequence[Cell], axis: str) -> bool:
    """Whether an axis is in these cells, and each that has it is a mean over it."""
    steps = [how for cell in cells for leaf in leaves(plan, cell) for how, axes in leaf.reduce if axis in axes]
    return bool(steps) and set(steps) == {"mean"}
