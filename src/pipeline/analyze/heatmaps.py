"""Heat maps: what training changed, layer by parameter, and scores over the configurations of a merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.analyze.changes import COLUMNS
from pipeline.analyze.drawing import COLOURS, draw_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREENS = ("#ffffff", "#0b4a24")  # the darker, the more: as the published maps
INK = "#16191d"  # of numbers in cells, which stay light on a dark page
DIGITS = 3


@dataclass(frozen=True)
class Map:
    """values[row][column], None where there is none; rows from the top. `best`: (row, column) to be framed."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    row_label: str = "layer"
    column_label: str = ""
    best: tuple[int, int] | None = None


def svg_of_maps(
    maps: Sequence[Map], name: str, label: str, scale: tuple[float, float] | None = (0.0, 1.0), png: Path | None = None
) -> str:
    """Maps side by side on one scale (None: that of their values), as SVG whose bytes depend on the data alone; written
    as `png` too."""
    return draw_svg(lambda: draw_maps(maps, scale), name, label, png)


def draw_maps(maps: Sequence[Map], scale: tuple[float, float] | None) -> Figure:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    grids = [np.array(heatmap.values, dtype=float) for heatmap in maps]  # None is NaN
    finite = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = scale or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
    high = high if high > low else low + 1
    rows, wide = np.max([grid.shape for grid in grids], axis=0)
    across = min(2, len(maps))
    down = math.ceil(len(maps) / across)
    size = max(2.2 + 0.78 * wide, 4.5) * across, down * (1.5 + 0.26 * rows)
    figure = Figure(figsize=size, layout="constrained")
    colours = LinearSegmentedColormap.from_list("greens", GREENS)
    for index, (heatmap, grid) in enumerate(zip(maps, grids, strict=True)):
        axes = figure.add_subplot(down, across, index + 1)
        axes.imshow(grid, cmap=colours, vmin=low, vmax=high, aspect="auto")
        for (y, x), value in np.ndenumerate(grid):
            text = "–" if math.isnan(value) else format_value(value, scale)
            colour = "#ffffff" if (value - low) / (high - low) > 0.55 else INK
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
        if heatmap.best is not None:
            y, x = heatmap.best
            frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=COLOURS["warn"], lw=1.6)
            axes.add_patch(frame)
        axes.set_title(heatmap.title)
        columns = heatmap.columns
        axes.set_xticks(range(len(columns)), columns, fontsize=7.5, rotation=30 if len(columns) > 4 else 0)
        axes.set_yticks(range(len(heatmap.rows)), heatmap.rows, fontsize=7.5)
        axes.set_ylabel(heatmap.row_label)
        axes.set_xlabel(heatmap.column_label)
        axes.tick_params(length=0)
    return figure


def format_value(value: float, scale: tuple[float, float] | None) -> str:
    """A share with three digits, a score with one; where the scale is that of the values, two that count: 1.2e-05."""
    if scale is None:
        return f"{value:.2g}"
    return f"{value:.{DIGITS}f}" if scale[1] <= 1 else f"{value:.1f}"


def map_of(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], measure: str) -> Map:
    """Map of one expert from delta.csv, layer by column of two dimensions: the relative norm of the change, or the
    share of rows above its threshold, as in the published figures."""
    by_place = {(row["layer"], row["column"]): float(row[measure]) for row in rows if row["expert"] == facts["name"]}
    layers = sorted({layer for layer, _ in by_place if layer != ""}, reverse=True)
    columns = [column for column in COLUMNS.values() if any((layer, column) in by_place for layer in layers)]
    values = [[by_place.get((layer, column)) for column in columns] for layer in layers]
    measured = f"rows above {facts['threshold']:g}" if measure == "share" else "norm of the change over the base's"
    note = f"{measured} · {facts['dtype']} · {facts['optimizer']}"
    return Map(f"{facts['name']}\n{note}", [str(layer) for layer in layers], columns, values)
