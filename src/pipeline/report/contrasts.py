"""A table's comparisons, their measurements, and the marks of cells that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.benchmarks import is_measure, kind_of
from pipeline.report.compare import PAIR, Line, correct_contrasts, holm_level, is_gain_shown
from pipeline.report.expression import leaf_cells, scores_of
from pipeline.report.frame import Comparison, NoScore, varied_axes
from pipeline.report.load.contents import CellResult
from pipeline.report.metrics import stored_metric, tasks_of
from pipeline.report.placed_claims import trainings_of
from pipeline.report.stored import StoredAnswers, less_is_better
from pipeline.stats.contrast import Contrast, ExpertPart
from pipeline.stats.ranks import holm
from pipeline.stats.statistics import LEVEL, wilson_interval
from pipeline.tables.plan import Cell, TablePlan
from pipeline.tables.schema import MEMBERS

COLUMNS = (
    *PAIR,
    "over",
    "left_value",
    "right_value",
    "difference",
    "low",
    "high",
    "p",
    "n",
    "discordant",
    "detectable",
    "missing",
    "unit",
    "chosen_of",
    "spread",
    "trainings",
    "lower_is_better",
    "exploratory",
)
# with drawn subsets: the percent of subsets whose left side is better
BEATS = ("beats", "beats_low", "beats_high")

Pair = tuple[str, str, str]  # left, right, and the row or column that has both
Axis = tuple[str, str]  # a metric and an axis of a table
Ratios = Mapping[Axis, float]  # variance between experts / variance within experts


# --- pairs ---


def compared_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """Return the pairs of a table's contrasts.

    They are the declared pairs, otherwise the default pairs, and each merge with its control. The
    value is the number of models that a pair's right side was chosen from.
    """
    pairs = pairs_across(plan, plan.compare) or default_pairs(plan, cells)
    return pairs | pairs_across(plan, plan.controls)


def pairs_across(plan: TablePlan, compared: Sequence[tuple[str, str]]) -> dict[Pair, int]:
    """Return each pair of rows (or columns) in every column (or row) that has both."""
    pairs = {}
    for left, right in compared:
        across = plan.rows if left in plan.columns else plan.columns
        for place in across:
            pair = (left, right, place)
            if all(key in plan.cells for key in cell_keys(plan, pair)):
                pairs[pair] = 1
    return pairs


def default_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """Return the pairs for a table without `compare`.

    In math, each merge is compared with the base and with the best expert. The value is the number
    of experts from which the best was chosen. The choice favours that expert, because it used the
    same questions. A best configuration is excluded, because these questions chose it.
    """
    models_at: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        if kind_of(cell.task) == "number" and cell.value is not None:
            model, place = model_and_place(plan, cell)
            models_at.setdefault(place, {})[model] = cell
    controls = {control for _, control in plan.controls}
    pairs: dict[Pair, int] = {}
    for place, models in models_at.items():
        names: dict[str, list[str]] = {"base": [], "expert": [], "merge": []}
        for name, cell in models.items():
            names.setdefault(cell.role, []).append(name)
        experts = sorted(names["expert"], key=lambda name: -(models[name].value or 0))
        for merge in names["merge"]:
            if models[merge].maximum is not None or merge in controls:
                continue
            for base in names["base"]:
                pairs[merge, base, place] = 1
            if experts:
                pairs[merge, experts[0], place] = len(experts)
    return pairs


def model_and_place(plan: TablePlan, cell: CellResult) -> tuple[str, str]:
    if models_in_rows(plan):
        return cell.row, cell.column
    return cell.column, cell.row


def cell_keys(plan: TablePlan, pair: Pair) -> list[tuple[str, str]]:
    """Return the keys (row, column) of both cells of a pair."""
    left, right, place = pair
    if left in plan.columns:
        return [(place, left), (place, right)]
    return [(left, place), (right, place)]


# --- measured ---


@dataclass(frozen=True)
class Measured:
    """A comparison before the correction over all of them.

    Attributes:
        axes: The axes of the sampled experts.
        chosen_of: The right side is the best of this number of models, on the same questions.
        trainings: "these", or "a sample" of three or more seeds.
        missing: Why there is no contrast.
        values: The values of left and right.
        beats: The share of drawn subsets in which the left side is better, with its interval.
    """

    pair: Pair
    unit: str
    lower_is_better: bool
    over: Sequence[str] = ("problems",)
    axes: Sequence[Axis] = ()
    chosen_of: int = 1
    exploratory: bool = False
    trainings: str | None = None
    contrast: Contrast | None = None
    values: tuple[float, float] = (0.0, 0.0)
    missing: str | None = None
    beats: tuple[float, float, float] | None = None

    def with_result(self, comparison: Comparison) -> Measured:
        """Return the comparison with its contrast, or with the reason why it is missing."""
        try:
            return replace(self, contrast=comparison.contrast(), values=comparison.values)
        except NoScore as error:
            return replace(self, missing=str(error))


def measure_pairs(
    plan: TablePlan, answers: StoredAnswers, pairs: Mapping[Pair, int]
) -> tuple[list[Line], Ratios]:
    """Return the lines of contrasts.csv, and the pooled ratios of their variances.

    Facts and figures have no lines.
    """
    measured = []
    for pair, chosen_of in pairs.items():
        cells = [plan.cells[key] for key in cell_keys(plan, pair)]
        metric = stored_metric(plan, cells)
        if metric:
            measured.append(measure_pair(plan, answers, pair, cells, metric, chosen_of))
    contrasts = []
    for comparison in measured:
        if comparison.contrast:
            contrasts.append((comparison.axes, comparison.contrast))
    ratios = pooled_ratios(contrasts)
    return contrast_lines(measured, ratios, plan.table.primary), ratios


def measure_pair(
    plan: TablePlan,
    answers: StoredAnswers,
    pair: Pair,
    cells: Sequence[Cell],
    metric: str,
    chosen_of: int,
) -> Measured:
    (task,) = tasks_of(plan, cells)
    sampled = averaged_axes(plan, cells)
    varied = varied_axes(plan, cells, sampled)
    unit = "bits" if is_measure(metric) else "points"
    trainings = None
    if any(trainings_of(plan, score.model) for score, _ in scores_of(plan, cells)):
        trainings = "a sample" if varied else "these"
    family = plan.table.family
    measured = Measured(
        pair,
        unit,
        less_is_better(str(task), metric),
        over=["problems", *sampled],
        chosen_of=chosen_of,
        exploratory=bool(family) and pair[2] not in family,
        trainings=trainings,
    )
    try:
        comparison = compare_cells(plan, cells, metric, answers)
    except NoScore as error:
        return replace(measured, missing=str(error))
    drawn = [axis for axis in varied if is_drawn(plan.table.axes[axis])]
    if drawn:
        beats = share_of_wins(comparison, drawn, measured.lower_is_better)
        measured = replace(measured, beats=beats)
    axes = [(metric, axis) for axis in varied]
    return replace(measured, axes=axes).with_result(comparison)


def is_drawn(values: Mapping[Any, Any]) -> bool:
    """Return True if the values of an axis are drawn subsets."""
    return any(MEMBERS in words for words in values.values())


def share_of_wins(
    comparison: Comparison, drawn: Sequence[str], lower: bool
) -> tuple[float, float, float]:
    """Return the share of drawn subsets whose left side is better, and its 95 % interval.

    It is Wilson's interval over subsets.

    With `lower`, less is better.
    """
    means = comparison.frame.means
    differences = comparison.difference(means, means, drawn).reshape(-1)
    if lower:
        differences = -differences
    share = float((differences > 0).mean())
    low, high = wilson_interval(share, len(differences))
    return share, low, high


def contrast_lines(
    measured: Sequence[Measured], ratios: Ratios, primary: Sequence[str]
) -> list[Line]:
    """Return the lines of contrasts.csv.

    A variance that is estimated from three experts is imprecise. Among many contrasts, some
    estimates are near zero, and their p would survive any correction. So in each contrast the ratio
    of the variances between and within experts is at least the pooled ratio. Detectable differences
    are at the level of Holm's correction. The primary comparison has half of the error rate.
    """
    count = 0
    is_primary_tested = False
    for comparison in measured:
        if comparison.contrast is None:
            continue
        count += not comparison.exploratory
        if [*comparison.pair] == [*primary]:
            is_primary_tested = True
    if primary and not is_primary_tested:
        count += 1  # a missing primary comparison keeps its half
    has_beats = any(comparison.beats for comparison in measured)
    lines = []
    for comparison in measured:
        level = LEVEL
        if not comparison.exploratory:
            level = holm_level(count, [*comparison.pair] == [*primary], bool(primary))
        line = contrast_line(comparison, ratios, level)
        if has_beats:
            line |= dict.fromkeys(BEATS)
        if comparison.beats:
            for name, share in zip(BEATS, comparison.beats, strict=True):
                line[name] = 100 * share
        lines.append(line)
    return correct_contrasts(lines, primary)


def contrast_line(measured: Measured, ratios: Ratios, level: float) -> dict[str, Any]:
    """Return a line of contrasts.csv, with its numbers in points or bits.

    `level` is the level of the detectable difference.
    """
    line: dict[str, Any] = dict.fromkeys(COLUMNS)
    line |= zip(PAIR, measured.pair, strict=True)
    line["over"] = " ".join(measured.over)
    for name in ("missing", "unit", "chosen_of", "trainings", "lower_is_better", "exploratory"):
        line[name] = getattr(measured, name)
    if measured.contrast is None:
        return line
    least = [ratios.get(axis, 0.0) for axis in measured.axes]
    contrast = measured.contrast.with_least_between(least)
    left, right = measured.values
    line |= {
        "left_value": 100 * left,
        "right_value": 100 * right,
        "difference": 100 * contrast.difference,
        "low": 100 * contrast.low,
        "high": 100 * contrast.high,
        "p": contrast.p,
        "n": contrast.n,
        "discordant": contrast.discordant,
        "detectable": 100 * contrast.detectable(level),
    }
    if contrast.spread is not None:
        line["spread"] = 100 * contrast.spread
    return line


def pooled_ratios(measured: Iterable[tuple[Sequence[Any], Contrast]]) -> dict[Any, float]:
    """Return, for each axis, the variance between experts divided by the variance within experts.

    Both variances are summed over all contrasts with that axis.
    """
    parts_of_axis: dict[Any, list[ExpertPart]] = {}
    for axes, contrast in measured:
        for axis, part in zip(axes, contrast.parts, strict=True):
            parts_of_axis.setdefault(axis, []).append(part)
    ratios = {}
    for axis, parts in parts_of_axis.items():
        between = sum(part.between for part in parts)
        within = sum(part.within for part in parts)
        ratios[axis] = 0.0
        if within > 0:
            ratios[axis] = between / within
    return ratios


def compare_cells(
    plan: TablePlan, cells: Sequence[Cell], metric: str, answers: StoredAnswers
) -> Comparison:
    """Compare the first cell with the second one, over questions and sampled axes."""
    left, right = cells
    frame = answers.frame(plan, cells, metric)
    return Comparison(frame, [(1.0, left)], [(1.0, right)], averaged_axes(plan, cells))


# --- marks ---


def mark_best(
    plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult], ratios: Ratios
) -> list[CellResult]:
    """Return the cells, with the significantly best cell of each tested place marked.

    `ratios` come from `measure_pairs`.
    """
    rivals: dict[tuple[str, str, str | None], list[CellResult]] = {}
    family = plan.table.family
    for cell in cells:
        _, place = model_and_place(plan, cell)
        is_tested = not family or place in family
        if cell.value is not None and cell.task and is_tested:
            rivals.setdefault((place, cell.task, cell.pair), []).append(cell)
    contrast_of = partial(contrast_of_results, plan, answers, ratios)
    best = []
    for of_place in rivals.values():
        lower = less_is_better(of_place[0].task, of_place[0].metric)
        best.append(best_of(of_place, lower, contrast_of))
    return [replace(cell, best=cell in best) for cell in cells]


def contrast_of_results(
    plan: TablePlan, answers: StoredAnswers, ratios: Ratios, left: CellResult, right: CellResult
) -> Contrast | None:
    """Return the contrast of two cells, or None if they cannot be compared."""
    cells = [plan.cells[left.row, left.column], plan.cells[right.row, right.column]]
    metric = stored_metric(plan, cells)
    if not metric:
        return None
    try:
        comparison = compare_cells(plan, cells, metric, answers)
        contrast = comparison.contrast()
    except NoScore:
        return None
    axes = varied_axes(plan, cells, comparison.axes)
    return contrast.with_least_between([ratios.get((metric, axis), 0.0) for axis in axes])


def best_of(
    cells: Sequence[CellResult],
    lower: bool,
    contrast_of: Callable[[CellResult, CellResult], Contrast | None],
) -> CellResult | None:
    """Return the cell that is significantly better than all others, after Holm's correction.

    None if there is no such cell. A best configuration is never returned, because these questions
    chose it. Contrasts of translations take seconds, so the first rival that is not worse ends the
    search.

    Args:
        cells: The cells of one place.
        lower: True if less is better.
        contrast_of: Returns the contrast of two cells.
    """
    top, *rivals = sorted(cells, key=lambda cell: cell.value or 0, reverse=not lower)
    if top.maximum is not None:
        return None
    ps: list[float] = []
    for rival in rivals:
        contrast = contrast_of(top, rival)
        if contrast is None or contrast.p >= LEVEL or (contrast.difference <= 0) != lower:
            return None
        ps.append(contrast.p)
    if ps and max(holm(ps)) < LEVEL:
        return top
    return None


def mark_gains(
    cells: Sequence[CellResult], lines: Sequence[Line], baselines: Mapping[str, str]
) -> list[CellResult]:
    """Return the cells with the sign of each baseline that they significantly exceed."""
    signs: dict[frozenset[str], set[str]] = {}
    for line in lines:
        if is_gain_shown(line) and line["right"] in baselines:
            names = frozenset((line["left"], line["place"]))
            signs.setdefault(names, set()).add(baselines[line["right"]])
    marked = []
    for cell in cells:
        own = signs.get(frozenset((cell.row, cell.column)), set())
        marked.append(replace(cell, marks="".join(sorted(own))))
    return marked


def models_in_rows(plan: TablePlan) -> bool:
    """Return True if the rows of a table name the runs, and not its columns."""
    return any(side.words.get("run") for side in plan.table.rows)


def sampled_axes(plan: TablePlan) -> list[str]:
    """Return the axes of at least three values that are a sample.

    These are seeds of trainings, and drawn subsets.
    """
    seeds = []
    for run in plan.table.runs.values():
        seeds.append(str(run.words.get("seed")))
    sampled = []
    for axis, values in plan.table.axes.items():
        is_sample = f"{{{axis}}}" in seeds or is_drawn(values)
        if len(values) > 2 and is_sample:
            sampled.append(axis)
    return sampled


def averaged_axes(plan: TablePlan, cells: Sequence[Cell]) -> list[str]:
    """Return the sampled axes over which some of these cells are means."""
    return [axis for axis in sampled_axes(plan) if is_averaged(plan, cells, axis)]


def is_averaged(plan: TablePlan, cells: Sequence[Cell], axis: str) -> bool:
    """Return True if some of these cells are reduced over an axis, and always by the mean."""
    steps = []
    for cell in cells:
        for leaf in leaf_cells(plan, cell):
            for how, axes in leaf.reduce:
                if axis in axes:
                    steps.append(how)
    return bool(steps) and set(steps) == {"mean"}
