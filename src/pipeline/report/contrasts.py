"""A table's comparisons, their measurements, and the marks of cells that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.benchmarks import is_measure, lower_is_better, primary_metric
from pipeline.report.compare import (
    PAIR,
    Line,
    correct_contrasts,
    holm_level,
    is_gain,
    is_gain_shown,
    is_primary,
    is_significant,
)
from pipeline.report.expression import scores_of
from pipeline.report.frame import Comparison, NoScore
from pipeline.report.load.contents import CellResult
from pipeline.report.metrics import stored_metric, tasks_of
from pipeline.report.placed_claims import trainings_of
from pipeline.report.stored import StoredAnswers
from pipeline.stats.contrast import Contrast, ExpertPart
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
    "detectable",
    "missing",
    "unit",
    "trainings",
    "lower_is_better",
    "exploratory",
)
# with drawn subsets: the percent of subsets whose left side is better, and its interval
BEATS = ("beats", "beats_low", "beats_high")

Pair = tuple[str, str, str]  # left, right, and the row or column that has both
Axis = tuple[str, str]  # a metric and an axis of a table


# --- pairs ---


def compared_pairs(plan: TablePlan) -> list[Pair]:
    """Return the pairs that a table's `compare` declares, and each merge with its control.

    Each pair of rows (or columns) is compared in every column (or row) that has both.
    """
    pairs: dict[Pair, None] = {}
    for left, right in (*plan.compare, *plan.controls):
        across = plan.rows if left in plan.columns else plan.columns
        for place in across:
            pair = (left, right, place)
            if all(key in plan.cells for key in cell_keys(plan, pair)):
                pairs[pair] = None
    return list(pairs)


def cell_keys(plan: TablePlan, pair: Pair) -> list[tuple[str, str]]:
    """Return the keys (row, column) of both cells of a pair."""
    left, right, place = pair
    if left in plan.columns:
        return [(place, left), (place, right)]
    return [(left, place), (right, place)]


# --- measured ---


def measure_pairs(plan: TablePlan, answers: StoredAnswers, pairs: Iterable[Pair]) -> list[Line]:
    """Return the lines of contrasts.csv. Facts and figures have no lines.

    A variance that is estimated from three experts is imprecise. Among many contrasts, some
    estimates are near zero, and their p would survive any correction. So in each contrast the ratio
    of the variances between and within experts is at least the pooled ratio.
    """
    lines: list[dict[str, Any]] = []
    measured: list[tuple[dict[str, Any], list[Axis], Contrast]] = []
    for pair in pairs:
        cells = [plan.cells[key] for key in cell_keys(plan, pair)]
        metric = stored_metric(plan, cells)
        if not metric:
            continue
        line = describe_pair(plan, pair, cells, metric)
        lines.append(line)
        axes = averaged_axes(plan, cells)
        try:
            frame = answers.frame(plan, cells, metric)
            comparison = Comparison(frame, [(1.0, cells[0])], [(1.0, cells[1])], axes)
            contrast = comparison.contrast()
        except NoScore as error:
            line["missing"] = str(error)
            continue
        line |= facts_of_comparison(plan, cells, comparison, line["lower_is_better"])
        measured.append((line, [(metric, axis) for axis in comparison.varied], contrast))
    ratios = pooled_ratios((axes, contrast) for _, axes, contrast in measured)
    tested = [line for line, _, _ in measured if not line["exploratory"]]
    primary = plan.table.primary
    count = len(tested)
    if primary and not any(is_primary(line, primary) for line in tested):
        count += 1  # a missing primary comparison keeps its half
    for line, measured_axes, contrast in measured:
        level = LEVEL
        if not line["exploratory"]:
            level = holm_level(count, is_primary(line, primary), bool(primary))
        raised = contrast.with_least_between([ratios[axis] for axis in measured_axes])
        line |= {**raised.in_points(level), "p": raised.p}
    return correct_contrasts(lines, primary)


def describe_pair(
    plan: TablePlan, pair: Pair, cells: Sequence[Cell], metric: str
) -> dict[str, Any]:
    """Return a line of contrasts.csv without numbers."""
    (task,) = tasks_of(plan, cells)
    columns: tuple[str, ...] = COLUMNS
    if any(map(is_drawn, plan.table.axes.values())):
        columns += BEATS
    line: dict[str, Any] = dict.fromkeys(columns)
    line |= zip(PAIR, pair, strict=True)
    line["over"] = " ".join(["problems", *averaged_axes(plan, cells)])
    line["unit"] = "bits" if is_measure(metric) else "points"
    is_primary_metric = metric == primary_metric(str(task))[0]
    line["lower_is_better"] = is_primary_metric and lower_is_better(str(task))
    line["exploratory"] = bool(plan.table.family) and pair[2] not in plan.table.family
    return line


def facts_of_comparison(
    plan: TablePlan, cells: Sequence[Cell], comparison: Comparison, lower: bool
) -> dict[str, Any]:
    """Return the values of both sides, and what a line says of trainings and drawn subsets.

    `trainings` is "these", or "a sample" of three or more seeds. The share of subsets whose left
    side is better has Wilson's interval over subsets. With `lower`, less is better.
    """
    left, right = comparison.values
    facts: dict[str, Any] = {"left_value": 100 * left, "right_value": 100 * right}
    varied = comparison.varied
    if any(trainings_of(plan, score.model) for score, _ in scores_of(plan, cells)):
        facts["trainings"] = "a sample" if varied else "these"
    drawn = [axis for axis in varied if is_drawn(plan.table.axes[axis])]
    if drawn:
        means = comparison.frame.means
        differences = comparison.difference(means, means, drawn).reshape(-1)
        if lower:
            differences = -differences
        share = float((differences > 0).mean())
        low, high = wilson_interval(share, len(differences))
        facts |= {"beats": 100 * share, "beats_low": 100 * low, "beats_high": 100 * high}
    return facts


def is_drawn(values: Mapping[Any, Any]) -> bool:
    """Return True if the values of an axis are drawn subsets."""
    return any(MEMBERS in words for words in values.values())


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


# --- marks ---


def mark_cells(
    cells: Sequence[CellResult], lines: Sequence[Line], baselines: Mapping[str, str]
) -> list[CellResult]:
    """Return the cells with the results of the table's comparisons.

    A cell is the best if it has the best number of its place, and is significantly better than each
    model that it is compared with. It has the sign of each baseline that it significantly exceeds.
    """
    wins: dict[frozenset[str], list[bool]] = {}  # the row and column of a cell -> its comparisons
    signs: dict[frozenset[str], set[str]] = {}
    lines_at: dict[frozenset[str], Line] = {}
    for line in lines:
        if line["p_holm"] is None:
            continue
        left, right = (frozenset((line[side], line["place"])) for side in ("left", "right"))
        lines_at |= {left: line, right: line}
        wins.setdefault(left, []).append(is_gain_shown(line))
        wins.setdefault(right, []).append(is_significant(line) and not is_gain(line))
        if is_gain_shown(line) and line["right"] in baselines:
            signs.setdefault(left, set()).add(baselines[line["right"]])
    marked = []
    for cell in cells:
        names = frozenset((cell.row, cell.column))
        best = names in wins and all(wins[names]) and is_top(cell, cells, lines_at[names])
        marked.append(replace(cell, best=best, marks="".join(sorted(signs.get(names, ())))))
    return marked


def is_top(cell: CellResult, cells: Sequence[CellResult], line: Line) -> bool:
    """Return True if no cell of a place has a better number of the same task.

    `line` is a comparison at this place.
    """
    numbers = []
    for other in cells:
        is_rival = line["place"] in (other.row, other.column) and other.task == cell.task
        if is_rival and other.pair == cell.pair and other.value is not None:
            numbers.append(other.value)
    if not numbers:
        return False
    best = min(numbers) if line.get("lower_is_better") else max(numbers)
    return cell.value == best


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
    """Return the sampled axes over which some of these cells are reduced, always by the mean."""
    steps: dict[str, set[str]] = {}
    for cell in cells:
        for how, axes in cell.reduce:
            for axis in axes:
                steps.setdefault(axis, set()).add(how)
    return [axis for axis in sampled_axes(plan) if steps.get(axis) == {"mean"}]
