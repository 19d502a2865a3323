"""Figures of a report, as matplotlib figures, for its page, for papers and notebooks.

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
NAMES = ("row", "column", "left", "right", "place")  # columns of text, even if a name is a number
Lines = Sequence[Mapping[str, Any]]  # the lines of a report's CSV file


def save(figure: Figure, file: str | Path) -> Path:
    """Write a figure as SVG or PDF, depending on the name of the file."""
    path = Path(file)
    date = "Date" if path.suffix == ".svg" else "CreationDate"
    with styled():
        figure.savefig(path, transparent=True, metadata={date: None})
    return path


def scores(report: str | Path | Lines) -> Figure:
    """Draw bars of a report's cells with their 95 % intervals, a panel for each column.

    Diamonds are the published numbers.

    Args:
        report: The report's folder, or the lines of its cells.csv. Lines may have `best`,
            which is drawn too.
    """
    lines = [line for line in _read(report, "cells.csv") if line["value"] is not None]
    values, ends = [], []
    for line in lines:
        values.append(line["value"])
        ends.append(line["value"] if line["high"] is None else line["high"])
    limits = None
    if lines and min(values) >= 0 and max(ends) <= 100:
        limits = (0, 1.15 * max(ends))
    return _by_panel(lines, "column", "row", _draw_score, limits)


def _draw_score(axes: Axes, line: Mapping[str, Any], height: int) -> None:
    value, published = line["value"], line["published"]
    colour = COLOURS["accent" if line.get("best") else "soft"]
    axes.barh(height, value, 0.68, color=colour)
    end = max(value, 0, line["high"] or 0)
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
    axes.annotate(f"{value:.1f}", (end, height), (4, 0), **style)
    if published is not None:
        axes.plot(published, height, "D", color=COLOURS["muted"], ms=4)


def contrasts(report: str | Path | Lines) -> Figure:
    """Draw differences of a report's comparisons with 95 % intervals, a panel for each place.

    Filled dots are significant after Holm's correction over all comparisons. Grey is less than the
    minimum detectable difference.

    Args:
        report: The report's folder, or the lines of its contrasts.csv.
    """
    lines = []
    for line in _read(report, "contrasts.csv"):
        for name in ("p_holm", "detectable"):
            if name not in line:
                raise PipelineError(
                    f"contrasts.csv has no {name}: an earlier version wrote it. Run stage=report"
                    " again."
                )
        if line["difference"] is not None:
            lines.append({**line, "pair": f"{line['left']} − {line['right']}"})
    return _by_panel(lines, "place", "pair", _draw_contrast)


def _draw_contrast(axes: Axes, line: Mapping[str, Any], height: int) -> None:
    axes.axvline(0, color=COLOURS["line"], lw=1)
    detectable = line["detectable"]
    if detectable:
        axes.barh(height, 2 * detectable, 0.8, -detectable, color=COLOURS["line"], alpha=0.35)
    inside = COLOURS["accent"] if is_significant(line) else "none"
    axes.plot(line["difference"], height, "o", mfc=inside, mec=COLOURS["ink"], ms=5)
    axes.set_xlabel(f"difference ({line.get('unit') or 'points'})")


# --- drawing ---


def _by_panel(
    lines: Lines,
    across: str,
    down: str,
    draw: Callable[[Axes, Mapping[str, Any], int], None],
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw a panel for each value of `across`, with a row and a 95 % interval for each line.

    Args:
        lines: The lines to draw.
        across: The column of `lines` that names the panel.
        down: The column of `lines` that names the row.
        draw: Draws one line at a height.
        limits: The limits of the axis that all panels share. None: each panel has other limits.
    """
    from matplotlib.figure import Figure

    if not lines:
        raise PipelineError("No number of this figure is finished yet. Run stage=table first.")
    panels = list(dict.fromkeys(line[across] for line in lines))
    rows = list(dict.fromkeys(line[down] for line in lines))
    labels = ["\n".join(wrap(row, 34)) for row in rows]
    wide = min(ACROSS, len(panels))
    high = math.ceil(len(panels) / ACROSS)
    inches = (1.5 + 2.4 * wide, (0.9 + ROW * len(rows)) * high)
    with styled():
        figure = Figure(figsize=inches, layout="constrained")
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(high, wide, number)
            for line in lines:
                if line[across] != panel:
                    continue
                height, low = rows.index(line[down]), line["low"]
                draw(axes, line, height)
                if low is not None:
                    ends = [low, line["high"]]
                    axes.plot(ends, [height, height], color=COLOURS["ink"], lw=1.2)
            axes.set_title(panel)
            axes.set_xlim(*limits or (None, None))
            axes.set_yticks(range(len(rows)), labels)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            first = axes.get_subplotspec()
            axes.tick_params(length=0, labelleft=not first or first.is_first_col())
            axes.grid(axis="x")
            axes.set_axisbelow(True)
    return figure


def _read(folder: str | Path | Lines, name: str) -> Lines:
    """Read the lines of a report's CSV file, with None for empty fields."""
    if not isinstance(folder, str | Path):
        return folder
    import pandas as pd

    file = Path(folder) / name
    if not file.is_file():
        raise PipelineError(
            f"{file} does not exist. Give the folder of a report, such as runs/reports/sandbox."
        )
    frame = pd.read_csv(
        file, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(NAMES, str)
    )
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
