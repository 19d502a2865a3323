"""A table as LaTeX: a tabular with booktabs, for a paper."""

from __future__ import annotations

import re

from pipeline.report.load.contents import CellResult, Results
from pipeline.report.render.cells import BOLD
from pipeline.text import one_line

HEAD = r"""% {title}
% Needs \usepackage{{booktabs}} and \usepackage{{xcolor}}, and for names beyond Latin script LuaLaTeX or XeLaTeX with a
% font that has it. {bold}
% Small: 95 % interval; max: of a best configuration, chosen and scored on the same questions; grey: published.
"""


def cells_latex(results: Results) -> str:
    """Text of a .tex file, the tabular of the table's cells, to be put into a table environment."""
    from pandas import DataFrame

    cells, columns = results.by_place, results.columns
    texts = [[cell_latex(cells.get((row, column))) for column in columns] for row in results.rows]
    frame = DataFrame(texts, index=list(map(one_line, results.rows)), columns=list(map(one_line, columns)))
    styled = frame.style.format_index(escape="latex", axis="index").format_index(escape="latex", axis="columns")
    tabular = styled.to_latex(hrules=True, column_format="l" + "r" * len(columns))
    tabular = re.sub(r"^(?=[*\[])", "{}", tabular, flags=re.MULTILINE)  # \\ before it would take it for its option
    notes = "".join(f"% {one_line(text)}\n" for text in [*results.merged, *results.other_bases])
    return HEAD.format(title=one_line(results.title), bold=BOLD) + notes + tabular


def cell_latex(cell: CellResult | None) -> str:
    r"""\textbf{45.2} {\scriptsize [41.0, 49.3]} \textcolor{gray}{44.8}"""
    if cell is None:
        return ""
    number = cell.decimal(cell.value) or "--"
    parts = [rf"\textbf{{{number}}}" if cell.best else number]
    if cell.low is not None:
        parts += [rf"{{\scriptsize [{cell.decimal(cell.low)}, {cell.decimal(cell.high)}]}}"]
    parts += [rf"{{\scriptsize max {cell.decimal(cell.maximum)}}}"] if cell.maximum is not None else []
    parts += [rf"\textcolor{{gray}}{{{cell.published:g}}}"] if cell.published is not None else []
    return " ".join(parts)
