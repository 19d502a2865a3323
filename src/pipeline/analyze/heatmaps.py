"""Heat maps: what training changed, layer by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.analyze.changes import COLUMNS
from pipeline.analyze.drawing import draw_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREENS = ("#ffffff", "#0b4a24")  # the darker, the more: as the published maps
INK = "#16191d"  # of numbers in cells, which stay light on a dark page
DIGITS = 3


@dataclass(frozen=True)
class Map:
    """Shares from 0 to 1: values[row][column], or None without a parameter; rows from the top."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


def svg_of_maps(maps: Sequence[Map], name: str, label: str) -> str:
    """Return maps side by side as SVG, whose bytes depend on the data alone."""
    return draw_svg(lambda: draw_maps(maps), name, label)


def draw_maps(maps: Sequence[Map]) -> Figure:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    rows = max(len(heatmap.rows) for heatmap in maps)
    wide = max(len(heatmap.columns) for heatmap in maps)
    across = min(2, len(maps))
    down = math.ceil(len(maps) / across)
    size = max(2.2 + 0.78 * wide, 4.5) * across, down * (1.5 + 0.26 * rows)
    figure = Figure(figsize=size, layout="constrained")
    colours = LinearSegmentedColormap.from_list("greens", GREENS)
    for number, heatmap in enumerate(maps, start=1):
        axes = figure.add_subplot(down, across, number)
        grid = np.array(heatmap.values, dtype=float)  # None is NaN
        axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (y, x), value in np.ndenumerate(grid):
            if math.isnan(value):
                text = "–"
            else:
                text = f"{value:.{DIGITS}f}"
            colour = "#ffffff" if value > 0.55 else INK
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
        axes.set_title(heatmap.title)
        columns = heatmap.columns
        axes.set_xticks(
            range(len(columns)), columns, fontsize=7.5, rotation=30 if len(columns) > 4 else 0
        )
        axes.set_yticks(range(len(heatmap.rows)), heatmap.rows, fontsize=7.5)
        axes.set_ylabel("layer")
        axes.tick_params(length=0)
    return figure


def map_of(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Map:
    """Return the map of one expert from delta.csv, layer by column of two dimensions.

    Its values are the shares of rows above the expert's threshold, as in the published figures.
    """
    shares = {}
    for row in rows:
        if row["expert"] == facts["name"]:
            shares[row["layer"], row["column"]] = float(row["share"])
    layers = sorted({layer for layer, _ in shares if layer != ""}, reverse=True)
    columns = []
    for column in COLUMNS.values():
        if any((layer, column) in shares for layer in layers):
            columns.append(column)
    values = [[shares.get((layer, column)) for column in columns] for layer in layers]
    note = f"rows above {facts['threshold']:g} · {facts['dtype']} · {facts['optimizer']}"
    return Map(f"{facts['name']}\n{note}", [str(layer) for layer in layers], columns, values)
