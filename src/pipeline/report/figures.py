"""Figures for a paper or a notebook, drawn by matplotlib from the files of a report: as SVG and PDF, light and dark.

    from pipeline.report import figures
    figures.save(figures.scores("runs/reports/sandbox"), "scores.pdf")

A figure's bytes depend on its numbers alone. `dark`: for a dark page.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from pipeline.analyze.drawing import COLOURS, STYLE
from pipeline.analyze.heatmaps import Map, draw_maps
from pipeline.errors import PipelineError
from pipeline.report.html.runs import curves_of
from pipeline.report.html.write import write_report
from pipeline.report.load.contents import Results
from pipeline.report.render.plots import Curve, thin_points
from pipeline.report.stats.compare import correct_contrasts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from pipeline.report.stats.ranks import Friedman

DARK = {
    "ink": "#e6e8eb", "muted": "#9aa3ad", "line": "#3a4048", "accent": "#6fb1e0", "soft": "#47637a", "warn": "#e08a5f",
    "second": "#9cc47a", "third": "#b79be0",
}  # fmt: skip
ACROSS = 3  # panels in a line
ROW = 0.24  # inches of a bar
Lines = list[dict[str, str]]


@contextmanager
def _style(dark: bool) -> Iterator[Mapping[str, str]]:
    """matplotlib's settings for the drawing inside, whatever a user's are, and its colours by name."""
    import matplotlib

    colours = DARK if dark else COLOURS
    of_light = {value: colours[name] for name, value in COLOURS.items()}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings = {
            key: of_light.get(value, value) if isinstance(value, str) else value for key, value in STYLE.items()
        }
        matplotlib.rcParams.update(settings | {"axes.facecolor": "none", "pdf.fonttype": 42})
        yield colours


def save(figure: Figure, file: str | Path) -> Path:
    """Write a figure as SVG or PDF, by the name of the file."""
    path = Path(file)
    date = "Date" if path.suffix == ".svg" else "CreationDate"
    with _style(dark=False):
        figure.savefig(path, transparent=True, metadata={date: None})
    return path


# ---------------------------------------------------------------------------------------------------- files of a report


def scores(report: str | Path, dark: bool = False) -> Figure:
    """Bars of a report's cells with their 95 % intervals, a panel a column; diamonds are the published numbers."""
    lines = [line for line in _read(report, "cells.csv") if line["value"]]
    rows, columns = (list(dict.fromkeys(line[name] for line in lines)) for name in ("row", "column"))
    with _style(dark) as colours:
        figure, panels = _panels(len(columns), 0.9 + ROW * len(rows), 2.4 if len(rows) else 1)
        for column, axes in zip(columns, panels, strict=True):
            in_column = {line["row"]: line for line in lines if line["column"] == column}
            for place, row in enumerate(rows):
                if line := in_column.get(row):
                    value = float(line["value"])
                    axes.barh(place, value, 0.68, color=colours["soft"])
                    _interval(axes, line, place, colours["ink"])
                    axes.annotate(f"{value:.1f}", (max(value, 0, _number(line["high"]) or 0), place), (4, 0),
                                  textcoords="offset points", va="center", fontsize=7)  # fmt: skip
                    if line["published"]:
                        axes.plot(float(line["published"]), place, "D", color=colours["muted"], ms=4)
            _name_rows(axes, column, rows)
    return figure


def contrasts(report: str | Path, dark: bool = False, primary: Sequence[str] = ()) -> Figure:
    """Differences of a report's comparisons with their 95 % intervals, a panel a place. Filled: significant after
    Holm's correction over all of them; grey: less than the minimum detectable difference. primary: the table's."""
    lines = [line for line in _read(report, "contrasts.csv") if line["difference"]]
    numbers = "p", "difference", "chosen_of"
    tested = [{**line, **{name: _number(line.get(name)) for name in numbers}} for line in lines]
    significant = [contrast.significant for contrast in correct_contrasts(tested, primary)]
    places, pairs = _distinct(lines, "place"), _distinct([{"pair": _pair(line)} for line in lines], "pair")
    with _style(dark) as colours:
        figure, panels = _panels(len(places), 0.9 + ROW * len(pairs), 2.4)
        for place, axes in zip(places, panels, strict=True):
            axes.axvline(0, color=colours["line"], lw=1)
            for line, sure in zip(lines, significant, strict=True):
                if line["place"] != place:
                    continue
                at = pairs.index(_pair(line))
                if detectable := _number(line["could_see"]):
                    axes.barh(at, 2 * detectable, 0.8, -detectable, color=colours["line"], alpha=0.35)
                _interval(axes, line, at, colours["ink"])
                inside = colours["accent"] if sure else "none"
                axes.plot(float(line["difference"]), at, "o", mfc=inside, mec=colours["ink"], ms=5)
            _name_rows(axes, place, pairs)
            units = {line.get("unit") or "points" for line in lines if line["place"] == place}
            axes.set_xlabel(f"difference ({', '.join(sorted(units))})")
    return figure


def layers(sweep: str | Path, dark: bool = False) -> Figure:
    """Score against the number of swapped layers, of a sweep's scores.csv: a line for each number of top layers."""
    lines = [line for line in _read(sweep, "scores.csv") if line["score"]]
    if not lines or not {"bottom_layers", "top_layers"} <= lines[0].keys():
        raise PipelineError(f"{sweep} is no sweep of sweep.bottom_layers and sweep.top_layers with scores")
    from matplotlib.ticker import MaxNLocator

    with _style(dark) as colours:
        figure, (axes,) = _panels(1, 3.2, 4.5)
        cycle = [colours[name] for name in ("accent", "warn", "second", "third", "muted")]
        for number, top in enumerate(sorted({int(line["top_layers"]) for line in lines})):
            points = sorted((int(line["bottom_layers"]) + top, float(line["score"])) for line in lines
                            if int(line["top_layers"]) == top)  # fmt: skip
            axes.plot(*zip(*points, strict=True), "o-", color=cycle[number % len(cycle)], ms=4)
            axes.annotate(f"{top} top", points[-1], (6, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlabel("layers of the language expert, bottom and top")
        axes.set_title("score")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


# ---------------------------------------------------------------------------------------------------- other numbers


def trainings(curves: Mapping[str, Sequence[Curve]], dark: bool = False) -> Figure:
    """Loss over steps, a panel a training, a line a seed; dots are validation losses."""
    with _style(dark) as colours:
        figure, panels = _panels(len(curves), 2.2, 2.8)
        cycle = [colours[name] for name in ("accent", "second", "third", "muted")]
        for (name, seeds), axes in zip(curves.items(), panels, strict=True):
            for number, curve in enumerate(seeds):
                for points, mark in ((thin_points(curve.loss), "-"), (curve.validation, "o")):
                    finite = [point for point in points if math.isfinite(point[1])]
                    if finite:
                        axes.plot(*zip(*finite, strict=True), mark, color=cycle[number % len(cycle)], lw=1.2, ms=4)
            axes.set_title(name)
            axes.set_xlabel("step")
    return figure


def critical_difference(names: Sequence[str], found: Friedman, dark: bool = False) -> Figure:
    """Mean ranks of treatments, 1 the best; a bar joins those that Nemenyi's test does not tell apart (Demsar 2006,
    figure 1)."""
    ranks = [float(rank) for rank in found.mean_ranks]
    order = sorted(range(len(names)), key=lambda at: ranks[at])
    with _style(dark) as colours:
        figure, (axes,) = _panels(1, 1.2 + 0.28 * len(names), 6)
        for depth, at in enumerate(order):
            axes.plot([ranks[at], ranks[at]], [0, -1 - depth], color=colours["muted"], lw=1)
            axes.annotate(f"{names[at]}  {ranks[at]:.2f}", (ranks[at], -1 - depth), (4, -3), textcoords="offset points")
        for depth, (first, last) in enumerate(joined_ranks([ranks[at] for at in order], found.critical_difference)):
            height = -0.35 - 0.25 * depth
            axes.plot([ranks[order[first]], ranks[order[last]]], [height] * 2, color=colours["accent"], lw=3)
        axes.set_title(f"mean rank; critical difference {found.critical_difference:.2f}")
        axes.set_xlim(0.8, len(names) + 1.2)
        axes.set_ylim(-1.6 - len(names), 0)
        axes.xaxis.tick_top()
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
    return figure


def joined_ranks(ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """First and last place of each largest group of sorted ranks that lie within a critical difference."""
    groups: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = max(at for at in range(first, len(ranks)) if ranks[at] - ranks[first] < difference)
        if last > first and (not groups or last > groups[-1][1]):
            groups.append((first, last))
    return groups


def correlation(
    x: ArrayLike, y: ArrayLike, groups: Sequence[str], x_name: str, y_name: str, dark: bool = False
) -> Figure:
    """Two scores of each expert or merge, coloured by group, with Spearman's correlation within each."""
    from scipy.stats import spearmanr

    points = list(zip(x, y, groups, strict=True))  # type: ignore[arg-type]
    with _style(dark) as colours:
        figure, (axes,) = _panels(1, 3.4, 4.2)
        cycle = [colours[name] for name in ("accent", "warn", "second", "third", "muted")]
        for number, group in enumerate(dict.fromkeys(groups)):
            of_group = [(one, two) for one, two, name in points if name == group]
            rho = spearmanr(*zip(*of_group, strict=True)).statistic if len(of_group) > 2 else math.nan
            label = group if math.isnan(rho) else f"{group}: {rho:+.2f}"
            axes.plot(*zip(*of_group, strict=True), "o", color=cycle[number % len(cycle)], ms=4, label=label)
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.legend(frameon=False, fontsize=8, title="Spearman")
    return figure


def maps(ours: Map, published: Map, dark: bool = False) -> Figure:
    """A map of changes by training beside a published one, with their `similarity`."""
    score = similarity(ours, published)
    with _style(dark):
        title = (
            f"{published.title}\nSpearman {score:+.2f}" if score is not None else f"{published.title}\nof another shape"
        )
        return draw_maps([ours, replace(published, title=title)], (0.0, 1.0))


def similarity(one: Map, other: Map) -> float | None:
    """Spearman's correlation of two maps over the layers and parameters of both; None with fewer than three, or where
    one map is constant. Layers count by their relative depth, so that models of other depths compare."""
    from scipy.stats import spearmanr

    pairs = []
    for number, row in enumerate(one.values):
        depth = number / max(1, len(one.values) - 1)
        match = other.values[round(depth * (len(other.values) - 1))]
        for column, value in zip(one.columns, row, strict=True):
            theirs = match[other.columns.index(column)] if column in other.columns else None
            if value is not None and theirs is not None:
                pairs.append((value, theirs))
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


# ---------------------------------------------------------------------------------------------------- drawing


def write_all(results: Results, folder: Path) -> list[str]:
    """Each figure that a table has numbers for, as NAME.svg, NAME.pdf and in the colours of a dark page; gives the
    reasons why others were not drawn."""
    curves: dict[str, list[Curve]] = {}
    for run in results.trainings:
        if curve := curves_of([run])[run.name]:
            curves.setdefault(run.label or run.name, []).append(curve)
    missing = []
    with tempfile.TemporaryDirectory() as report:
        write_report(results, Path(report))
        draw: dict[str, Callable[..., Figure]] = {
            "scores": partial(scores, report), "contrasts": partial(contrasts, report, primary=results.primary),
            "trainings": partial(trainings, curves),
        }  # fmt: skip
        for name, figure in draw.items():
            try:
                for ending, dark in ("", False), ("-dark", True):
                    drawn = figure(dark=dark)
                    for form in "svg", "pdf":
                        save(drawn, folder / f"{name}{ending}.{form}")
            except PipelineError as error:
                missing.append(f"{name}: {error}")
    return missing


def _panels(count: int, height: float, width: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    if not count:
        raise PipelineError("nothing to draw: the report has no finished numbers for this figure")
    across = min(ACROSS, count)
    down = math.ceil(count / across)
    figure = Figure(figsize=(1.5 + width * across, height * down), layout="constrained")
    return figure, [figure.add_subplot(down, across, at + 1) for at in range(count)]


def _name_rows(axes: Axes, title: str, rows: Sequence[str]) -> None:
    axes.set_title(title)
    axes.set_yticks(range(len(rows)), ["\n".join(wrap(row, 34)) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    first = axes.get_subplotspec()
    if first and not first.is_first_col():
        axes.tick_params(labelleft=False)


def _interval(axes: Axes, line: Mapping[str, str], at: int, colour: str) -> None:
    if line["low"] and line["high"]:
        axes.plot([float(line["low"]), float(line["high"])], [at, at], color=colour, lw=1.2)


def _pair(line: Mapping[str, str]) -> str:
    return f"{line['left']} − {line['right']}"


def _distinct(lines: Sequence[Mapping[str, str]], name: str) -> list[str]:
    return list(dict.fromkeys(line[name] for line in lines))


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _read(folder: str | Path, name: str) -> Lines:
    file = Path(folder) / name
    if not file.is_file():
        raise PipelineError(f"{file} does not exist: give the folder of a report, such as runs/reports/sandbox")
    with open(file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
