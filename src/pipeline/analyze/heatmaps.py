"""Heat maps of the changes by training, layer by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.analyze.changes import COLUMNS
from pipeline.analyze.drawing import draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

GREENS = ("#ffffff", "#0b4a24")  # darker is more, as in the published maps
INK = "#16191d"  # the colour of numbers in cells, which stay light on a dark page
DIGITS = 3


@dataclass(frozen=True)
class Map:
    """Shares from 0 to 1: values[row][column], or None without a parameter.

    Rows start at the top.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


def svg_of_maps(maps: Sequence[Map], name: str, label: str) -> str:
    """Return maps side by side as SVG. The bytes depend on the data only."""
    return draw_svg(lambda: draw_maps(maps), name, label)


def draw_maps(maps: Sequence[Map]) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    rows = max(len(heatmap.rows) for heatmap in maps)
    columns = max(len(heatmap.columns) for heatmap in maps)
    across = min(2, len(maps))
    down = math.ceil(len(maps) / across)
    width, height = max(2.2 + 0.78 * columns, 4.5), 1.5 + 0.26 * rows
    figure = Figure(figsize=(width * across, down * height), layout="constrained")
    colours = LinearSegmentedColormap.from_list("greens", GREENS)
    for number, heatmap in enumerate(maps, start=1):
        draw_map(figure.add_subplot(down, across, number), heatmap, colours)
    return figure


def draw_map(axes: Axes, heatmap: Map, colours: Colormap) -> None:
    import numpy as np

    grid = np.array(heatmap.values, dtype=float)  # None is NaN
    axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(grid):
        text = "–"
        if not math.isnan(value):
            text = f"{value:.{DIGITS}f}"
        colour = "#ffffff" if value > 0.55 else INK
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    columns, rows = heatmap.columns, heatmap.rows
    rotation = 30 if len(columns) > 4 else 0
    axes.set_title(heatmap.title)
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5, rotation=rotation)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axes.set_ylabel("layer")
    axes.tick_params(length=0)


def map_of(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Map:
    """Return the map of one expert from delta.csv, layer by column of two dimensions.

    Its values are the shares of rows above the expert's threshold, as in the published figures.
    """
    shares, names = {}, set()
    for row in rows:
        if row["expert"] == facts["name"]:
            layer = row["layer"]
            shares[layer, row["column"]] = float(row["share"])
            if layer != "":
                names.add(layer)
    layers = sorted(names, reverse=True)
    columns = []
    for column in COLUMNS.values():
        if any((layer, column) in shares for layer in layers):
            columns.append(column)
    values = [[shares.get((layer, column)) for column in columns] for layer in layers]
    note = f"rows above {facts['threshold']:g} · {facts['dtype']} · {facts['optimizer']}"
    title = f"{facts['name']}\n{note}"
    return Map(title, [str(layer) for layer in layers], columns, values)
