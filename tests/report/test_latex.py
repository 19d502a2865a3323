"""The table as LaTeX: what it says, and that LaTeX takes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from made_up_report import results_of

from pipeline.report.load.contents import CellResult
from pipeline.report.render.latex import cell_latex, cells_latex

HOSTILE = r"50 % of #1 & $x_1$ {\input{/etc/passwd}} ~^ é \\"
CELLS = [
    CellResult("swap", HOSTILE, 45.25, 41.0, 49.3, 1, published=44.8, best=True),
    CellResult("swap", "bits", -40.31),
    CellResult(HOSTILE, HOSTILE, missing="not computed yet"),
]


def test_a_cell_has_its_interval_and_the_published_number() -> None:
    assert cell_latex(CELLS[0]) == r"\textbf{45.2} {\scriptsize [41.0, 49.3]} \textcolor{gray}{44.8}"
    assert [cell_latex(cell) for cell in (CELLS[1], CELLS[2], None)] == ["-40.3", "--", ""]


def test_names_are_text() -> None:
    text = cells_latex(results_of(CELLS))
    assert text.splitlines()[-1] == r"\end{tabular}" and r"\input" not in text.partition("tabular")[2]
    assert r"50 \% of \#1 \& \$x\_1\$" in text and text.count("\\\\\n") == 3  # a head and two rows


@pytest.mark.latex
def test_latex_takes_it(tmp_path: Path) -> None:
    head = "\\documentclass{article}\\usepackage[paperwidth=60cm]{geometry}\n"
    head += "\\usepackage{booktabs}\\usepackage{xcolor}\\begin{document}\n"
    file = tmp_path / "table.tex"
    file.write_text(head + cells_latex(results_of(CELLS)) + "\\end{document}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", file.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    shown = subprocess.run(["pdftotext", "-layout", "table.pdf", "-"], cwd=tmp_path, capture_output=True, text=True)
    assert "45.2 [41.0, 49.3] 44.8" in shown.stdout and "50 % of #1 & $x" in shown.stdout
    assert "root:" not in shown.stdout
