"""Figures of a report, as matplotlib figures, for its page, for papers and notebooks:

from pipeline.report import figures
figures.save(figures.scores("runs/reports/sandbox"), "scores.pdf")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pipeline.analyze.drawing import COLOURS, styled
from pipeline.errors import PipelineError
from pipeline.report.compare import is_significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a line
ROW = 0.24  # inches of a bar
NAMES = (
    "row",
    "column",
    "left",
    "right",
    "place",
)  # columns of text, also where a name is a number
Lines = Sequence[Mapping[str, Any]]  # of a report's CSV file


def save(figure: Figure, file: str | Path) -> Path:
    """Write a figure as SVG or PDF, by the name of the file."""
    path = Path(file)
    date = "CreationDate"
    if path.suffix == ".svg":
        date = "Date"
    with styled():
        figure.savefig(path, transparent=True, metadata={date: None})
    return path


def scores(report: str | Path | Lines) -> Figure:
    """Bars of a report's cells with their 95 % intervals, a panel a column; diamonds are the
    published numbers. report: its folder, or the lines of its cells.csv, of which `best` and
    `chance` are drawn, too.
    """
    lines = [line for line in _read(report, "cells.csv") if line["value"] is not None]

    def draw(axes: Axes, line: Mapping[str, Any], height: int) -> None:
        value, published = line["value"], line["published"]
        axes.barh(height, value, 0.68, color=COLOURS["accent" if line.get("best") else "soft"])
        axes.annotate(
            f"{value:.1f}",
            (max(value, 0, line["high"] or 0), height),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
        if published is not None:
            axes.plot(published, height, "D", color=COLOURS["muted"], ms=4)
        chance = line.get("chance")
        if chance:
            axes.axvline(chance, color=COLOURS["warn"], lw=1, ls="--")

    ends = [line["value"] if line["high"] is None else line["high"] for line in lines]
    shares = lines and min(line["value"] for line in lines) >= 0 and max(ends) <= 100
    return _by_panel(lines, "column", "row", draw, (0, 1.15 * max(ends)) if shares else None)


def contrasts(report: str | Path | Lines) -> Figure:
    """Differences of a report's comparisons with their 95 % intervals, a panel a place.

    Filled: significant after Holm's correction over all of them; grey: less than the minimum
    detectable difference. report: its folder, or the lines of its contrasts.csv.
    """
    lines = _read(report, "contrasts.csv")
    missing = []
    for name in ("p_holm", "detectable"):
        if any(name not in line for line in lines):
            missing.append(name)
    if missing:
        raise PipelineError(
            f"contrasts.csv has no {missing[0]}, as an earlier version wrote it: run stage=report"
            " again"
        )
    lines = [
        {**line, "pair": f"{line['left']} − {line['right']}"}
        for line in lines
        if line["difference"] is not None
    ]

    def draw(axes: Axes, line: Mapping[str, Any], height: int) -> None:
        axes.axvline(0, color=COLOURS["line"], lw=1)
        detectable = line["detectable"]
        if detectable:
            axes.barh(height, 2 * detectable, 0.8, -detectable, color=COLOURS["line"], alpha=0.35)
        inside = "none"
        if is_significant(line):
            inside = COLOURS["accent"]
        axes.plot(line["difference"], height, "o", mfc=inside, mec=COLOURS["ink"], ms=5)
        axes.set_xlabel(f"difference ({line.get('unit') or 'points'})")

    return _by_panel(lines, "place", "pair", draw)


# --- drawing ---


def _by_panel(
    lines: Lines,
    across: str,
    down: str,
    draw: Callable[[Axes, Mapping[str, Any], int], None],
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw a panel for each value of `across`, with a row and a 95 % interval for each line.

    Args: limits: of the axis that all panels share, or None if each has its own.
    """
    from matplotlib.figure import Figure

    if not lines:
        raise PipelineError("nothing to draw: the report has no finished numbers for this figure")
    panels, rows = (list(dict.fromkeys(line[name] for line in lines)) for name in (across, down))
    wide, high = min(ACROSS, len(panels)), math.ceil(len(panels) / ACROSS)  # the number of panels
    with styled():
        figure = Figure(
            figsize=(1.5 + 2.4 * wide, (0.9 + ROW * len(rows)) * high), layout="constrained"
        )
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(high, wide, number)
            for line in (line for line in lines if line[across] == panel):
                height = rows.index(line[down])
                draw(axes, line, height)
                if line["low"] is not None:
                    axes.plot(
                        [line["low"], line["high"]], [height, height], color=COLOURS["ink"], lw=1.2
                    )
            axes.set_title(panel)
            axes.set_xlim(*limits or (None, None))
            axes.set_yticks(range(len(rows)), ["\n".join(wrap(row, 34)) for row in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            first = axes.get_subplotspec()
            axes.tick_params(length=0, labelleft=not first or first.is_first_col())
            axes.grid(axis="x")
            axes.set_axisbelow(True)
    return figure


def _read(folder: str | Path | Lines, name: str) -> Lines:
    """Read the lines of a report's CSV file, with None for what is empty."""
    if not isinstance(folder, str | Path):
        return folder
    import pandas as pd

    file = Path(folder) / name
    if not file.is_file():
        raise PipelineError(
            f"{file} does not exist: give the folder of a report, such as runs/reports/sandbox"
        )
    frame = pd.read_csv(
        file, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(NAMES, str)
    )
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
