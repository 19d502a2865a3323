"""A table as LaTeX, with booktabs, caption and label, for a paper."""

from __future__ import annotations

import re

from pipeline.report.load.contents import CellResult, Results
from pipeline.report.render.cells import BOLD, baseline_notes
from pipeline.report.templates import latex_text, render


def cells_latex(results: Results) -> str:
    """Return the text of a .tex file with the table's cells.

    It has a caption and a label.
    """
    captions = [results.title]
    if results.title[-1:] not in tuple(".?!"):
        captions = [f"{results.title}."]
    if any(cell.best for cell in results.cells):
        captions.append(BOLD)
    captions += baseline_notes(results)
    if any(cell.low is not None for cell in results.cells):
        captions.append("Small: 95 % intervals over questions.")
    return render(
        "table.tex.j2",
        results=results,
        captions=captions,
        bold=BOLD,
        cell_latex=cell_latex,
        label=re.sub(r"[^\w-]", "-", results.table),
    )


def cell_latex(cell: CellResult | None) -> str:
    r"""Return a cell: \textbf{45.2}$^\dagger$ {\scriptsize [41.0, 49.3]} \textcolor{gray}{44.8}."""
    if cell is None:
        return ""
    number = cell.decimal(cell.value) or "--"
    if cell.best:
        number = rf"\textbf{{{number}}}"
    parts = [number + latex_text(cell.marks)]
    if cell.low is not None:
        low, high = cell.decimal(cell.low), cell.decimal(cell.high)
        parts.append(rf"{{\scriptsize [{low}, {high}]}}")
    if cell.maximum is not None:
        parts.append(rf"{{\scriptsize max {cell.decimal(cell.maximum)}}}")
    if cell.published is not None:
        parts.append(rf"\textcolor{{gray}}{{{cell.published:g}}}")
    return " ".join(parts)
