"""The figure of a report: the scores of its table as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pipeline.analyze.drawing import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a line
ROW = 0.24  # inches of a bar
Lines = Sequence[Mapping[str, Any]]  # lines of cells.csv with a value, and `best`


def draw_scores(lines: Lines) -> Figure:
    """Draw bars of scores with their 95 % intervals, a panel for each column.

    Diamonds are the published numbers. All panels share their limits if all numbers are shares.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(line["column"] for line in lines))
    rows = list(dict.fromkeys(line["row"] for line in lines))
    labels = ["\n".join(wrap(row, 34)) for row in rows]
    ends = [line["value"] if line["high"] is None else line["high"] for line in lines]
    limits = None
    if min(line["value"] for line in lines) >= 0 and max(ends) <= 100:
        limits = (0, 1.15 * max(ends))
    wide = min(ACROSS, len(panels))
    high = math.ceil(len(panels) / ACROSS)
    inches = (1.5 + 2.4 * wide, (0.9 + ROW * len(rows)) * high)
    figure = Figure(figsize=inches, layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(high, wide, number)
        for line in lines:
            if line["column"] == panel:
                draw_score(axes, line, rows.index(line["row"]))
        axes.set_title(panel)
        axes.set_xlim(*limits or (None, None))
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(length=0, labelleft=(number - 1) % wide == 0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
    return figure


def draw_score(axes: Axes, line: Mapping[str, Any], height: int) -> None:
    value, published = line["value"], line["published"]
    colour = COLOURS["accent" if line["best"] else "soft"]
    axes.barh(height, value, 0.68, color=colour)
    end = max(value, 0, line["high"] or 0)
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
    axes.annotate(f"{value:.1f}", (end, height), (4, 0), **style)
    if published is not None:
        axes.plot(published, height, "D", color=COLOURS["muted"], ms=4)
    if line["low"] is not None:
        ends = [line["low"], line["high"]]
        axes.plot(ends, [height, height], color=COLOURS["ink"], lw=1.2)
