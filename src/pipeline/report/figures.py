"""The figure of a report: the scores of its table as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pipeline.analyze.drawing import COLOURS
from pipeline.report.load.contents import CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a line
ROW = 0.24  # inches of a bar


def draw_scores(cells: Sequence[CellResult]) -> Figure:
    """Draw bars of scores with their 95 % intervals, a panel for each column.

    Diamonds are the published numbers. All panels share their limits if all numbers are shares.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    labels = ["\n".join(wrap(row, 34)) for row in rows]
    values = [cell.value or 0 for cell in cells]
    end = max(*values, *(cell.high or 0 for cell in cells))
    limits = None
    if min(values) >= 0 and end <= 100:
        limits = (0, 1.15 * end)
    wide = min(ACROSS, len(panels))
    high = math.ceil(len(panels) / ACROSS)
    inches = (1.5 + 2.4 * wide, (0.9 + ROW * len(rows)) * high)
    figure = Figure(figsize=inches, layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(high, wide, number)
        for cell in cells:
            if cell.column == panel:
                draw_score(axes, cell, rows.index(cell.row))
        axes.set_title(panel)
        axes.set_xlim(*limits or (None, None))
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(length=0, labelleft=(number - 1) % wide == 0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
    return figure


def draw_score(axes: Axes, cell: CellResult, height: int) -> None:
    value = cell.value or 0
    colour = COLOURS["accent" if cell.best else "soft"]
    axes.barh(height, value, 0.68, color=colour)
    end = max(value, 0, cell.high or 0)
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
    axes.annotate(f"{value:.1f}", (end, height), (4, 0), **style)
    if cell.published is not None:
        axes.plot(cell.published, height, "D", color=COLOURS["muted"], ms=4)
    if cell.low is not None and cell.high is not None:
        axes.plot([cell.low, cell.high], [height, height], color=COLOURS["ink"], lw=1.2)
