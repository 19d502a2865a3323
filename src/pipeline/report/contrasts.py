"""A table's contrasts: their minimum detectable difference before anything is run, and what they measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from pipeline.benchmarks import is_measure, kind_of
from pipeline.errors import PipelineError
from pipeline.estimate.questions import count_questions, scored_file
from pipeline.papers import published as papers
from pipeline.report.claims import FACT, NOT_TESTABLE, Claim
from pipeline.report.compare import (
    PAIR,
    Line,
    correct_contrasts,
    holm_level,
    interval_text,
    is_gain_shown,
    is_primary,
)
from pipeline.report.expression import leaf_cells
from pipeline.report.load.contents import CellResult
from pipeline.report.placed_claims import PlacedClaim, claims_of, trainings_of
from pipeline.report.questions import questions_of, stored_metric, tasks_of
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.report.verdicts import Comparison
from pipeline.runs.run import Run
from pipeline.stats.contrast import Contrast, ExpertPart
from pipeline.stats.detectable import (
    DISCORDANT,
    SPREAD,
    Detectable,
    describe_mean,
    planned_difference,
    variance_of_mean,
)
from pipeline.stats.ranks import holm
from pipeline.stats.statistics import LEVEL
from pipeline.tables.plan import Cell, ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import TRAININGS


def first_detectable(planning: Planning) -> tuple[Detectable, str] | None:
    """That of the primary comparison, else of the first one, and what is compared besides, in words; None without
    questions."""
    plan = planning.plan
    family, primary = plan.table.family, tuple(plan.table.primary)
    pairs = pairs_across(plan, [*plan.compare, *plan.controls])
    compared = [pair for pair in pairs if not family or pair[2] in family]
    seeds = min((len(plan.table.axes[axis]) for axis in sampled_axes(plan)), default=0)
    trains = any(run.stage in TRAININGS for run in plan.table.runs.values())
    for first in sorted(compared, key=lambda pair: pair != primary):
        counts = [questions_under(planning, [plan.cells[key]]) for key in cell_keys(plan, first)]
        asked, most, _ = counts[0]
        if asked:
            scores = min(count.scores for count in counts)
            level = holm_level(len(compared), first == primary, bool(primary))
            name = "{} with {} in {}".format(*first)
            others = f" and {len(compared) - 1} more (Holm's correction)" if len(compared) > 1 else ""
            detectable = Detectable.of(name, asked, level, seeds, trains, most=most, scores=scores)
            return detectable, f"{name} ({'primary' if first == primary else 'first'}){others}"
    return None


class DetectableClaim(NamedTuple):
    """A claim about a table, before there are scores. points: its minimum detectable difference at 5 % on the fewest
    questions of its cells; None where no answers could decide it. published: the smallest and largest difference.
    assumed: about means over languages and models."""

    id: str
    points: float | None
    published: tuple[float, float] | None = None
    assumed: str = ""

    def text(self) -> str:
        if self.points is None:
            return f"claim {self.id}: {NOT_TESTABLE}"
        published = f", published {interval_text(self.published, '+.1f')}" if self.published else ""
        points = f"{self.points:.1f} points at p < {LEVEL:g}{self.assumed}"
        return f"claim {self.id}: minimum detectable difference {points}{published}"

    def is_small(self) -> bool:
        """Whether a published difference is smaller than what can be detected."""
        return bool(self.points and self.published and min(map(abs, self.published)) < self.points)


def detectable_claims(planning: Planning) -> list[DetectableClaim]:
    """The claims about a table that its plan has the cells of, and that are decided by differences, or by nothing."""
    detectable = []
    for claim in claims_of(planning.plan.table.name):
        try:
            placed = PlacedClaim.of(claim, planning.plan)
        except PipelineError:
            continue  # in a smaller table of the same name: its verdict reports why
        counts = [questions_under(planning, cells) for cells in (*placed.left, *placed.right)]
        asked = min(count.asked for count in counts)
        if placed.untestable:
            detectable.append(DetectableClaim(claim.id, None))
        elif claim.test == "difference" and claim.metric != FACT and asked:
            pairs = itertools.product(placed.left, placed.right) if not claim.than else ()
            differences = [value for sides in pairs if (value := published_difference(claim, *sides)) is not None]
            ends = (min(differences), max(differences)) if differences else None
            scores = min(count.scores for count in counts)
            if claim.units == "each":
                scores = max(1, scores // len(placed.places))
            points = 100 * planned_difference(asked, LEVEL, discordant=DISCORDANT * variance_of_mean(scores))
            detectable.append(DetectableClaim(claim.id, points, ends, describe_mean(scores)))
    return detectable


def published_difference(claim: Claim, left: Sequence[Cell], right: Sequence[Cell]) -> float | None:
    """Left minus right as published, in points, the mean over places; None unless all of it is."""
    sides = [[cell.published and papers.published_value(*cell.published) for cell in cells] for cells in (left, right)]
    values = [[value for value in side if value is not None] for side in sides]
    if values != sides:
        return None
    return fmean(values[0]) - (1 + claim.threshold / 100 if claim.relative else 1) * fmean(values[1])


class QuestionCount(NamedTuple):
    """The questions under some cells: asked, in the benchmark, and how many scores are averaged on each."""

    asked: int
    most: int
    scores: int


def questions_under(planning: Planning, cells: Sequence[Cell]) -> QuestionCount:
    """Count the questions under cells whose answers are right or wrong. A problem counts once if it is asked in several
    languages, and a score once if only sampled trainings differ; of a choice the first candidate counts."""
    sampled = sampled_axes(planning.plan)
    sizes: dict[str, tuple[int, int]] = {}
    scores, places = set(), set()
    for leaf in itertools.chain.from_iterable(leaf_cells(planning.plan, cell) for cell in cells):
        for item in leaf.items:
            for reading in item.readings:
                score = next(iter(reading.values()))
                size = None if is_measure(leaf.metric) else task_and_questions(planning, score)
                if size:
                    sizes[size[0]] = max(sizes.get(size[0], (0, 0)), size[1:])
                    scores.add(score)
                    at = [str(value) for axis, value in item.at.items() if axis not in sampled]
                    places.add((score.language, *at))
    asked, most = (sum(counts) for counts in zip((0, 0), *sizes.values(), strict=True))
    return QuestionCount(asked, most, max(1, min(len(scores), len(places))))


def task_and_questions(planning: Planning, score: ScoreRef) -> tuple[str, int, int] | None:
    """(task, questions of one score, questions that its benchmark has); None for translations and text, and where its
    data is unknown. A small world can be given twice the items."""
    run = planning.representative_evaluation(score) or planning.evaluation_of(score)
    if run is None:
        return None
    task, language, root = run.config.eval.tasks[0], run.config.languages[0], run.parents.get("data_root")
    unknown = root is not None and root.folder.is_dir() and scored_file(run, task, language) is None
    if unknown or kind_of(task.task) in ("translation", "text"):
        return None
    count, most = (count_questions(run, task, language, limited) for limited in (True, False))
    if isinstance(root, Run) and root.config.expert.questions(run.config.eval.split):
        most = max(most, 2 * count)
    return task.task, count, most


def measured_detectable(lines: Sequence[Line], trained: int) -> Detectable | None:
    """That of the primary comparison, else of the first one, with what was measured of it; None where no question tells
    its models apart. lines: of contrasts.csv; trained: the number of seeds of the trainings behind them."""
    tested = [line for line in lines if line["p_holm"] is not None]
    has_primary = any(line["primary"] for line in lines)
    line = next((line for line in tested if line["primary"] or (line.get("discordant") and not has_primary)), None)
    if not (line and line.get("discordant")):
        return None
    level = holm_level(len(tested), line["primary"], has_primary)
    seeds = max(3, trained) if line.get("trainings") == "a sample" else 0
    name = f"{line['left']} with {line['right']} in {line['place']}"
    spread = SPREAD if line.get("spread") is None else line["spread"] / 100
    return Detectable.of(name, line["n"], level, seeds, trained > 0, line["discordant"], spread)


# ---------------------------------------------------------------------------------------------------- measured

MEASURED = (*PAIR, "over", "left_value", "right_value", "difference", "low", "high", "p",
            "n", "discordant", "could_see", "missing", "unit", "chosen_of", "spread",
            "trainings", "lower_is_better", "exploratory")  # fmt: skip


Pair = tuple[str, str, str]  # left, right, and the row or column that has both


def compared_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """The pairs of a table's contrasts: those declared, or else the default ones, and each merge with its control; each
    with the number of models that its right side was chosen of."""
    return (pairs_across(plan, plan.compare) or default_pairs(plan, cells)) | pairs_across(plan, plan.controls)


def pairs_across(plan: TablePlan, compared: Sequence[tuple[str, str]]) -> dict[Pair, int]:
    """Each pair of rows (or columns) in every column (or row) that has both."""
    across_of = [plan.rows if left in plan.columns else plan.columns for left, _ in compared]
    pairs = [(*sides, place) for sides, across in zip(compared, across_of, strict=True) for place in across]
    return {pair: 1 for pair in pairs if all(key in plan.cells for key in cell_keys(plan, pair))}


def default_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """The pairs for a table without `compare`: in math, each merge with the base and with the best expert, which is
    chosen on these questions, in its own favour: of how many is the value. A best configuration is excluded: these
    questions chose it."""
    by_place: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        if kind_of(cell.task) == "number" and cell.value is not None:
            model, place = (cell.row, cell.column) if models_in_rows(plan) else (cell.column, cell.row)
            by_place.setdefault(place, {})[model] = cell
    pairs: dict[Pair, int] = {}
    for place, models in by_place.items():
        bases, experts, merges = ([name for name, cell in models.items() if cell.role == role]
                                  for role in ("base", "expert", "merge"))  # fmt: skip
        best = sorted(experts, key=lambda name: -(models[name].value or 0))[:1]
        controls = {control for _, control in plan.controls}
        merges = [name for name in merges if models[name].maximum is None and name not in controls]
        for merge in merges:
            pairs |= {(merge, base, place): 1 for base in bases} | {(merge, top, place): len(experts) for top in best}
    return pairs


def cell_keys(plan: TablePlan, pair: Pair) -> list[tuple[str, str]]:
    """The keys (row, column) of both cells of a pair."""
    left, right, place = pair
    return [(place, name) if left in plan.columns else (name, place) for name in (left, right)]


def measure_pairs(plan: TablePlan, answers: StoredAnswers, pairs: Mapping[Pair, int]) -> list[Line]:
    """The lines of contrasts.csv, one for each pair, with the number of models that its right side is the best of on
    these questions.

    Resampled are problems (for translations, sentences), and the experts that both sides average over; trainings:
    "these", or "a sample" of three or more seeds; could_see: by the measured discordance, after Holm's correction over
    all, of which `primary`, if there is one, has half; spread: standard deviation of the difference from training to
    training. Facts and figures have no lines.

    Three experts estimate their variance badly: among many contrasts some find it near zero, and their p then survives
    any correction. In each contrast the ratio of variances between and within experts is at least that of all together.
    """
    lines, measured, primary, family = [], [], plan.table.primary, plan.table.family
    for pair, chosen_of in pairs.items():
        cells = [plan.cells[key] for key in cell_keys(plan, pair)]
        if not (metric := stored_metric(plan, cells)):
            continue
        comparison = compare_cells(plan, cells, metric, answers)
        (task,) = tasks_of(plan, cells)
        line: dict[str, Any] = dict.fromkeys(MEASURED) | dict(zip(PAIR, pair, strict=True)) | {
            "over": " ".join(["problems", *comparison.axes]), "unit": "bits" if is_measure(metric) else "points",
            "lower_is_better": bool(task) and answers.less_is_better(str(task), metric), "chosen_of": chosen_of,
            "exploratory": bool(family) and pair[2] not in family,
        }  # fmt: skip
        lines.append(line)
        if any(trainings_of(plan, score.model) for score, _ in comparison.questions.needed_scores):
            line["trainings"] = "a sample" if comparison.varied_axes else "these"
        try:
            contrast, (left, right) = comparison.contrast(), comparison.values
        except NoScore as error:
            line["missing"] = str(error)
        else:
            line |= {"left_value": 100 * left, "right_value": 100 * right}
            measured.append((line, [(metric, axis) for axis in comparison.varied_axes], contrast))
    ratios = pooled_ratios((axes, contrast) for _, axes, contrast in measured)
    answers.ratios = ratios
    firsts = [is_primary(line, primary) for line, _, _ in measured]
    count = sum(not line["exploratory"] for line, _, _ in measured)
    count += bool(primary) and not any(firsts)  # a missing primary comparison keeps its half
    for (line, axes, contrast), is_first in zip(measured, firsts, strict=True):
        contrast = contrast.with_least_between([ratios[axis] for axis in axes])
        numbers = {name: getattr(contrast, name) for name in ("difference", "low", "high", "spread")}
        level = LEVEL if line["exploratory"] else holm_level(count, is_first, bool(primary))
        numbers["could_see"] = contrast.detectable(level)
        line |= {name: None if number is None else 100 * number for name, number in numbers.items()}
        line |= {"p": contrast.p, "n": contrast.n, "discordant": contrast.discordant}
    return correct_contrasts(lines, primary)


def pooled_ratios(measured: Iterable[tuple[Sequence[Any], Contrast]]) -> dict[Any, float]:
    """The variance between experts as a multiple of that within them, of all contrasts, by their axes."""
    parts: dict[Any, list[ExpertPart]] = {}
    for axes, contrast in measured:
        for axis, part in zip(axes, contrast.parts, strict=True):
            parts.setdefault(axis, []).append(part)
    sums = {axis: [sum(values) for values in zip(*of_axis, strict=True)] for axis, of_axis in parts.items()}
    return {axis: between / within if within > 0 else 0.0 for axis, (between, within, _) in sums.items()}


def compare_cells(plan: TablePlan, cells: Sequence[Cell], metric: str, answers: StoredAnswers) -> Comparison:
    """The first cell against the second one, over questions and the sampled axes that both are means over."""
    left, right = ([(1.0, cell)] for cell in cells)
    axes = [axis for axis in sampled_axes(plan) if is_averaged(plan, cells, axis)]
    return Comparison(questions_of(plan, answers, cells, metric), left, right, axes)


def mark_best(plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells, with the best of each place that is tested marked: significantly above every other model there, after
    Holm's correction. A best configuration is never marked: these questions chose it."""
    rivals: dict[tuple[str, str, str | None], list[CellResult]] = {}
    for cell in cells:
        place = cell.column if models_in_rows(plan) else cell.row
        is_tested = not plan.table.family or place in plan.table.family
        if cell.value is not None and cell.task and is_tested:
            rivals.setdefault((place, cell.task, cell.pair), []).append(cell)
    best = [top for of_place in rivals.values() if (top := best_of(plan, answers, of_place))]
    return [replace(cell, best=cell in best) for cell in cells]


def mark_gains(cells: Sequence[CellResult], lines: Sequence[Line], baselines: Mapping[str, str]) -> list[CellResult]:
    """Return the cells with the sign of each baseline that they are significantly better than."""
    signs: dict[frozenset[str], set[str]] = {}
    for line in lines:
        if is_gain_shown(line) and line["right"] in baselines:
            signs.setdefault(frozenset((line["left"], line["place"])), set()).add(baselines[line["right"]])
    return [replace(cell, marks="".join(sorted(signs.get(frozenset((cell.row, cell.column)), ())))) for cell in cells]


def models_in_rows(plan: TablePlan) -> bool:
    """Whether the rows of a table name the runs, and not its columns."""
    return any(side.words.get("run") for side in plan.table.rows)


def best_of(plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult]) -> CellResult | None:
    """The best cell if it is significantly above all others; None at the first rival that it is not above, as
    contrasts of translations take seconds."""
    lower, ps = answers.less_is_better(cells[0].task, cells[0].metric), []
    top, *rivals = sorted(cells, key=lambda cell: cell.value or 0, reverse=not lower)
    for rival in rivals if top.maximum is None else []:
        pair = [plan.cells[cell.row, cell.column] for cell in (top, rival)]
        metric = stored_metric(plan, pair)
        if not metric:
            return None
        comparison = compare_cells(plan, pair, metric, answers)
        try:
            contrast = comparison.contrast()
        except NoScore:
            return None
        ratios = [answers.ratios.get((metric, axis), 0.0) for axis in comparison.varied_axes]
        contrast = contrast.with_least_between(ratios)
        if contrast.p >= LEVEL or (contrast.difference <= 0) != lower:
            return None
        ps.append(contrast.p)
    return top if ps and max(holm(ps)) < LEVEL else None


def sampled_axes(plan: TablePlan) -> list[str]:
    """The axes whose values are a sample: those that set the seed of trainings and have at least three values."""
    seeds = [str(run.words["seed"]) for run in plan.table.runs.values() if "seed" in run.words]
    return [axis for axis, values in plan.table.axes.items() if len(values) > 2 and f"{{{axis}}}" in seeds]


def is_averaged(plan: TablePlan, cells: Sequence[Cell], axis: str) -> bool:
    """Whether some of these cells are reduced over an axis, and all those by the mean."""
    steps = [how for cell in cells for leaf in leaf_cells(plan, cell) for how, axes in leaf.reduce if axis in axes]
    return bool(steps) and set(steps) == {"mean"}
