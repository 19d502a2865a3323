"""A table's comparisons: which there are, and what they measured; the marks of the cells that
follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
BEATS = (
    "beats",
    "beats_low",
    "beats_high",
)  # of a table with drawn subsets: percent of subsets that are better

Pair = tuple[str, str, str]  # left, right, and the row or column that has both
Axis = tuple[str, str]  # a metric and an axis of a table
Ratios = Mapping[Axis, float]  # variance between experts as a multiple of that within them


# --- pairs ---


def compared_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """Return the pairs of a table's contrasts, each with the number of models that its right side
    was chosen of.

    They are those declared, or else the default ones, and each merge with its control.
    """
    return (pairs_across(plan, plan.compare) or default_pairs(plan, cells)) | pairs_across(
        plan, plan.controls
    )


def pairs_across(plan: TablePlan, compared: Sequence[tuple[str, str]]) -> dict[Pair, int]:
    """Each pair of rows (or columns) in every column (or row) that has both."""
    across_of = [plan.rows if left in plan.columns else plan.columns for left, _ in compared]
    pairs = []
    for sides, across in zip(compared, across_of, strict=True):
        for place in across:
            pairs.append((*sides, place))
    found = {}
    for pair in pairs:
        if all(key in plan.cells for key in cell_keys(plan, pair)):
            found[pair] = 1
    return found


def default_pairs(plan: TablePlan, cells: Sequence[CellResult]) -> dict[Pair, int]:
    """Return the pairs for a table without `compare`: in math, each merge with the base and with
    the best expert.

    The value is the number of experts that the best is chosen of, on these questions and so in its
    own favour. A best configuration is excluded: these questions chose it.
    """
    by_place: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        if kind_of(cell.task) == "number" and cell.value is not None:
            if models_in_rows(plan):
                model, place = (cell.row, cell.column)
            else:
                model, place = (cell.column, cell.row)
            by_place.setdefault(place, {})[model] = cell
    pairs: dict[Pair, int] = {}
    for place, models in by_place.items():
        bases, experts, merges = (
            [name for name, cell in models.items() if cell.role == role]
            for role in ("base", "expert", "merge")
        )
        best = sorted(experts, key=lambda name: -(models[name].value or 0))[:1]
        controls = {control for _, control in plan.controls}
        merges = [name for name in merges if models[name].maximum is None and name not in controls]
        for merge in merges:
            pairs |= {(merge, base, place): 1 for base in bases} | {
                (merge, top, place): len(experts) for top in best
            }
    return pairs


def cell_keys(plan: TablePlan, pair: Pair) -> list[tuple[str, str]]:
    """Return the keys (row, column) of both cells of a pair."""
    left, right, place = pair
    return [(place, name) if left in plan.columns else (name, place) for name in (left, right)]


# --- measured ---


@dataclass(frozen=True)
class Measured:
    """A comparison before the correction over all of them.

    axes: the axes of the sampled experts; chosen_of: the number of models that the right side is
    the best of on these questions; trainings: "these", or "a sample" of three or more seeds;
    missing: why there is no contrast; values: of left and right; beats: the share of drawn subsets
    in which the left side is better, with its interval.
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
        """Return the measured comparison, or the reason why it is missing."""
        try:
            return replace(self, contrast=comparison.contrast(), values=comparison.values)
        except NoScore as error:
            return replace(self, missing=str(error))


def measure_pairs(
    plan: TablePlan, answers: StoredAnswers, pairs: Mapping[Pair, int]
) -> tuple[list[Line], Ratios]:
    """Return the lines of contrasts.csv, one for each pair of scores, and the pooled ratios of
    their variances.

    pairs: with the number of models that the right side is the best of on these questions. Facts
    and figures have no lines.
    """
    measured = []
    for pair, chosen_of in pairs.items():
        cells = [plan.cells[key] for key in cell_keys(plan, pair)]
        metric = stored_metric(plan, cells)
        if metric:
            measured.append(measure_pair(plan, answers, pair, cells, metric, chosen_of))
    ratios = pooled_ratios([(one.axes, one.contrast) for one in measured if one.contrast])
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
    sampled = []
    for axis in sampled_axes(plan):
        if is_averaged(plan, cells, axis):
            sampled.append(axis)
    measured = Measured(
        pair,
        "bits" if is_measure(metric) else "points",
        less_is_better(str(task), metric),
        over=["problems", *sampled],
        chosen_of=chosen_of,
        exploratory=bool(plan.table.family) and pair[2] not in plan.table.family,
    )
    varied = varied_axes(plan, cells, sampled)
    if any(trainings_of(plan, score.model) for score, _ in scores_of(plan, cells)):
        measured = replace(measured, trainings="a sample" if varied else "these")
    try:
        comparison = compare_cells(plan, cells, metric, answers)
    except NoScore as error:
        return replace(measured, missing=str(error))
    drawn = []
    for axis in varied:
        if is_drawn(plan.table.axes[axis]):
            drawn.append(axis)
    if drawn:
        measured = replace(
            measured, beats=share_of_wins(comparison, drawn, measured.lower_is_better)
        )
    return replace(measured, axes=[(metric, axis) for axis in varied]).with_result(comparison)


def is_drawn(values: Mapping[Any, Any]) -> bool:
    """Return True if the values of an axis are drawn subsets."""
    return any(MEMBERS in words for words in values.values())


def share_of_wins(
    comparison: Comparison, drawn: Sequence[str], lower: bool
) -> tuple[float, float, float]:
    """Return the share of drawn subsets in which the left side is better, and its 95 % interval
    (Wilson's).

    The interval is over subsets. lower: less is better.
    """
    means = comparison.frame.means
    differences = comparison.difference(means, means, drawn).reshape(-1)
    wins = differences < 0 if lower else differences > 0
    share = float(wins.mean())
    low, high = wilson_interval(share, len(wins))
    return share, low, high


def contrast_lines(
    measured: Sequence[Measured], ratios: Ratios, primary: Sequence[str]
) -> list[Line]:
    """Return the lines of contrasts.csv.

    Three experts estimate their variance badly: among many contrasts some find it near zero, and
    their p then survives any correction. In each contrast the ratio of variances between and within
    experts is at least that of all together. Detectable differences are those after Holm's
    correction. The primary comparison has half of the error rate.
    """
    tested = [one for one in measured if one.contrast is not None]
    has_primary = any(list(one.pair) == list(primary) for one in tested)
    count = sum(not one.exploratory for one in tested)
    if primary and not has_primary:
        count += 1  # a missing primary comparison keeps its half
    lines = []
    for one in measured:
        level = LEVEL
        if not one.exploratory:
            level = holm_level(count, list(one.pair) == list(primary), bool(primary))
        lines.append(contrast_line(one, ratios, level))
    if any(one.beats for one in measured):
        for one, line in zip(measured, lines, strict=True):
            shares = one.beats or (None, None, None)
            line |= {
                key: None if share is None else 100 * share
                for key, share in zip(BEATS, shares, strict=True)
            }
    return correct_contrasts(lines, primary)


def contrast_line(measured: Measured, ratios: Ratios, level: float) -> dict[str, Any]:
    """Return a line of contrasts.csv, its numbers in points or bits.

    spread: standard deviation of the difference from training to training; detectable: at this
        level.
    """
    line: dict[str, Any] = {
        **dict.fromkeys(COLUMNS),
        **dict(zip(PAIR, measured.pair, strict=True)),
        "over": " ".join(measured.over),
        "missing": measured.missing,
        "unit": measured.unit,
        "chosen_of": measured.chosen_of,
        "trainings": measured.trainings,
        "lower_is_better": measured.lower_is_better,
        "exploratory": measured.exploratory,
    }
    if measured.contrast is not None:
        contrast = measured.contrast.with_least_between(
            [ratios.get(axis, 0.0) for axis in measured.axes]
        )
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
            "spread": None if contrast.spread is None else 100 * contrast.spread,
        }
    return line


def pooled_ratios(measured: Iterable[tuple[Sequence[Any], Contrast]]) -> dict[Any, float]:
    """Return the variance between experts as a multiple of that within them, of all contrasts, by
    their axes.
    """
    parts: dict[Any, list[ExpertPart]] = {}
    for axes, contrast in measured:
        for axis, part in zip(axes, contrast.parts, strict=True):
            parts.setdefault(axis, []).append(part)
    sums = {
        axis: [sum(values) for values in zip(*of_axis, strict=True)]
        for axis, of_axis in parts.items()
    }
    return {
        axis: between / within if within > 0 else 0.0 for axis, (between, within, _) in sums.items()
    }


def compare_cells(
    plan: TablePlan, cells: Sequence[Cell], metric: str, answers: StoredAnswers
) -> Comparison:
    """Compare the first cell with the second one, over questions and the sampled axes that both are
    means over.
    """
    left, right = cells
    axes = []
    for axis in sampled_axes(plan):
        if is_averaged(plan, cells, axis):
            axes.append(axis)
    return Comparison(answers.frame(plan, cells, metric), [(1.0, left)], [(1.0, right)], axes)


# --- marks ---


def mark_best(
    plan: TablePlan, answers: StoredAnswers, cells: Sequence[CellResult], ratios: Ratios
) -> list[CellResult]:
    """Return the cells, with the best of each place that is tested marked.

    ratios: by `measure_pairs`.
    """

    def contrast_of(*pair: CellResult) -> Contrast | None:
        compared = [plan.cells[cell.row, cell.column] for cell in pair]
        metric = stored_metric(plan, compared)
        if not metric:
            return None
        try:
            comparison = compare_cells(plan, compared, metric, answers)
            contrast = comparison.contrast()
        except NoScore:
            return None
        axes = varied_axes(plan, compared, comparison.axes)
        return contrast.with_least_between([ratios.get((metric, axis), 0.0) for axis in axes])

    rivals: dict[tuple[str, str, str | None], list[CellResult]] = {}
    for cell in cells:
        if models_in_rows(plan):
            place = cell.column
        else:
            place = cell.row
        is_tested = not plan.table.family or place in plan.table.family
        if cell.value is not None and cell.task and is_tested:
            rivals.setdefault((place, cell.task, cell.pair), []).append(cell)
    best = []
    for of_place in rivals.values():
        lower = less_is_better(of_place[0].task, of_place[0].metric)
        best.append(best_of(of_place, lower, contrast_of))
    return [replace(cell, best=cell in best) for cell in cells]


def best_of(
    cells: Sequence[CellResult],
    lower: bool,
    contrast_of: Callable[[CellResult, CellResult], Contrast | None],
) -> CellResult | None:
    """Return the cell that is significantly better than all others, after Holm's correction, or
    None.

    A best configuration is never returned: these questions chose it. lower: whether less is better.
    Contrasts of translations take seconds, so the first rival that is not worse ends the search.
    """
    top, *rivals = sorted(cells, key=lambda cell: cell.value or 0, reverse=not lower)
    ps: list[float] = []
    for rival in rivals if top.maximum is None else []:
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
    """Return the cells with the sign of each baseline that they are significantly better than."""
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
    """Whether the rows of a table name the runs, and not its columns."""
    return any(side.words.get("run") for side in plan.table.rows)


def sampled_axes(plan: TablePlan) -> list[str]:
    """Return the axes of three values or more that are a sample: seeds of trainings, and drawn
    subsets.
    """
    seeds = []
    for run in plan.table.runs.values():
        if "seed" in run.words:
            seeds.append(str(run.words["seed"]))
    sampled = []
    for axis, values in plan.table.axes.items():
        if len(values) > 2 and (f"{{{axis}}}" in seeds or is_drawn(values)):
            sampled.append(axis)
    return sampled


def is_averaged(plan: TablePlan, cells: Sequence[Cell], axis: str) -> bool:
    """Whether some of these cells are reduced over an axis, and all those by the mean."""
    steps = []
    for cell in cells:
        for leaf in leaf_cells(plan, cell):
            for how, axes in leaf.reduce:
                if axis in axes:
                    steps.append(how)
    return bool(steps) and set(steps) == {"mean"}
