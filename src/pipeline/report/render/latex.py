"""A table as LaTeX, with booktabs, caption and label, for a paper."""

from __future__ import annotations

import re
from collections import Counter

from pipeline.report.compare import exploratory_sentence
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.render.cells import BOLD, baseline_notes
from pipeline.tables.schema import TRAININGS
from pipeline.text import one_line

HEAD = r"""% {title}
% Needs \usepackage{{booktabs}} and \usepackage{{xcolor}}, and for names beyond Latin script LuaLaTeX or XeLaTeX with a
% font that has it. {bold}
% Small: 95 % interval; max: of a best configuration, chosen and scored on the same questions; grey: published.
"""
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "†": r"$^\dagger$",
    "‡": r"$^\ddagger$", **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def cells_latex(results: Results) -> str:
    """Return the text of a .tex file: the table's cells, with a caption, a label and the number of seeds."""
    from pandas import DataFrame

    cells, columns = results.by_place, results.columns
    texts = [[cell_latex(cells.get((row, column))) for column in columns] for row in results.rows]
    frame = DataFrame(texts, index=list(map(one_line, results.rows)), columns=list(map(one_line, columns)))
    styled = frame.style.format_index(escape="latex", axis="index").format_index(escape="latex", axis="columns")
    captions = [results.title.rstrip(".") + ".", *baseline_notes(results), seeds_text(results)]
    captions += exploratory_sentence(results.contrasts)
    if any(cell.best for cell in results.cells):
        captions.insert(1, BOLD.partition(",")[0] + ".")
    tabular = styled.to_latex(
        hrules=True, column_format="l" + "r" * len(columns), position_float="centering",
        caption=latex_text(" ".join(captions)), label="tab:" + re.sub(r"[^\w-]", "-", results.table),
    )  # fmt: skip
    tabular = re.sub(r"^(?=[*\[])", "{}", tabular, flags=re.MULTILINE)  # \\ before it would take it for its option
    notes = "".join(f"% {one_line(text)}\n" for text in [*results.merged, *results.other_bases])
    return HEAD.format(title=one_line(results.title), bold=BOLD) + notes + tabular


def latex_text(text: str) -> str:
    return re.sub("[" + re.escape("".join(SPECIAL)) + "]", lambda match: SPECIAL[match[0]], one_line(text))


def seeds_text(results: Results) -> str:
    """Return how many seeds each training has; empty without trainings."""
    seeds = Counter(run.label for run in results.runs if run.stage in TRAININGS and run.finished)
    count = max(seeds.values(), default=0)
    return f"{count} seeds of each training." if count > 1 else "One seed of each training." * count


def cell_latex(cell: CellResult | None) -> str:
    r"""\textbf{45.2} {\scriptsize [41.0, 49.3]} \textcolor{gray}{44.8}"""
    if cell is None:
        return ""
    number = cell.decimal(cell.value) or "--"
    parts = [(rf"\textbf{{{number}}}" if cell.best else number) + latex_text(cell.marks)]
    if cell.low is not None:
        parts += [rf"{{\scriptsize [{cell.decimal(cell.low)}, {cell.decimal(cell.high)}]}}"]
    parts += [rf"{{\scriptsize max {cell.decimal(cell.maximum)}}}"] if cell.maximum is not None else []
    parts += [rf"\textcolor{{gray}}{{{cell.published:g}}}"] if cell.published is not None else []
    return " ".join(parts)
