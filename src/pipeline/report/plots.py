"""Charts as SVG text whose bytes depend on the data alone, and the same charts as PNG (for W&B).

Colours are drawn as the light theme's values; in the SVG each becomes a CSS variable of the page with that value as its
fallback, so that one chart serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.analyze.drawing import COLOURS, svg_and_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_POINTS = 400  # of a curve; more are averaged in blocks


@dataclass(frozen=True)
class Panel:
    """One task of a bar chart. values and spreads: one a row, in the unit shown; None where there is none. best: the
    place of a row that is better than all others beyond noise."""

    title: str
    values: Sequence[float | None]
    spreads: Sequence[float | None]
    chance: float | None = None
    best: int | None = None


@dataclass(frozen=True)
class Curve:
    """A training: (step, loss) points logged, (step, validation loss) points."""

    loss: Sequence[tuple[float, float]]
    validation: Sequence[tuple[float, float]]


def of_scores(rows: Sequence[str], panels: Sequence[Panel], name: str, label: str) -> tuple[str, bytes]:
    """Horizontal bars, a panel a task, a bar a row, as SVG and PNG. name: prefix of ids; label: for screen readers."""
    return svg_and_png(lambda: _scores(rows, panels), name, label)


def of_trainings(trainings: Mapping[str, Sequence[Curve]], name: str, label: str) -> tuple[str, bytes]:
    """Loss over steps, a panel a label, a line a training (its seeds); dots are validation losses. As SVG and PNG."""
    return svg_and_png(lambda: _trainings(trainings), name, label)


def _scores(rows: Sequence[str], panels: Sequence[Panel]) -> Figure:
    columns = min(3, len(panels))
    height = 0.62 + 0.27 * len(rows)
    figure, grid = _grid(len(panels), columns, height)
    places = range(len(rows))
    for index, panel in enumerate(panels):
        axes = grid[index]
        colours = [COLOURS["accent" if place == panel.best else "soft"] for place in places]
        axes.barh(places, [value or 0 for value in panel.values], height=0.66, color=colours, zorder=2)
        reach = max(
            [v + (s or 0) for v, s in zip(panel.values, panel.spreads, strict=True) if v is not None],
            default=0,
        )
        reach = max(reach, panel.chance or 0, 1.0)
        for place, value, spread in zip(places, panel.values, panel.spreads, strict=True):
            if value is not None and spread:
                low = min(spread, value)  # no score is below zero
                axes.errorbar(
                    value,
                    place,
                    xerr=[[low], [spread]],
                    color=COLOURS["ink"],
                    elinewidth=0.9,
                    capsize=1.8,
                    zorder=3,
                )
            end = 0 if value is None else value + (spread or 0)
            axes.text(
                end + reach * 0.03,
                place,
                "—" if value is None else f"{value:.1f}",
                va="center",
                fontsize=8,
                color=COLOURS["ink"],
            )
        if panel.chance is not None:
            axes.axvline(panel.chance, color=COLOURS["warn"], linewidth=1, linestyle=(0, (4, 3)), zorder=4)
            axes.text(panel.chance, -0.62, " chance", fontsize=7.5, color=COLOURS["warn"], va="bottom")
        axes.set_title(panel.title, pad=9)
        axes.set_xlim(0, reach * 1.2)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_yticks(places, rows if index % columns == 0 else [""] * len(rows))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", zorder=0)
        axes.set_axisbelow(True)
        axes.locator_params(axis="x", nbins=5)
    return figure


def _trainings(trainings: Mapping[str, Sequence[Curve]]) -> Figure:
    columns = min(3, len(trainings))
    figure, grid = _grid(len(trainings), columns, 2.1)
    for index, (label, curves) in enumerate(trainings.items()):
        axes = grid[index]
        for curve, colour in zip(curves, _cycle(len(curves)), strict=True):
            points = [point for point in thinned(curve.loss) if math.isfinite(point[1])]
            axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, linewidth=1.2)
            dots = [point for point in curve.validation if math.isfinite(point[1])]
            axes.plot(
                [p[0] for p in dots],
                [p[1] for p in dots],
                "o",
                markersize=4,
                color=COLOURS["warn"],
                markeredgecolor="none",
            )
        if not any(curve.loss or curve.validation for curve in curves):
            axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=COLOURS["muted"])
        axes.set_title(label)
        axes.grid(axis="y")
        axes.tick_params(axis="both", length=0)
        axes.tick_params(axis="y", labelcolor=COLOURS["muted"])
        axes.locator_params(axis="both", nbins=5)
        axes.set_xlabel("step", fontsize=8)
        if index % columns == 0:
            axes.set_ylabel("loss", fontsize=8)
    return figure


def _grid(panels: int, columns: int, panel_height: float) -> tuple[Figure, list[Axes]]:
    """A figure 10 inches wide and its `panels` axes, in reading order."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = math.ceil(panels / columns)
    figure = Figure(figsize=(10, panel_height * lines + 0.2), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    return figure, [figure.add_subplot(lines, columns, index + 1) for index in range(panels)]


def _cycle(n: int) -> list[str]:
    names = ("accent", "second", "third", "muted")
    return [COLOURS[names[index % len(names)]] for index in range(n)]


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points, each the mean of a block of neighbours."""
    size = math.ceil(len(points) / most)
    blocks = [points[at : at + size] for at in range(0, len(points), size)] if points else []
    return [(sum(p[0] for p in block) / len(block), sum(p[1] for p in block) / len(block)) for block in blocks]
