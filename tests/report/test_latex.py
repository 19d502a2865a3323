"""The table as LaTeX: what it says, and that LaTeX takes it."""

import re
import subprocess
from pathlib import Path

import pytest
from made_up_report import results_of

from pipeline.report.load.contents import CellResult
from pipeline.report.render.latex import cell_latex, cells_latex
from pipeline.report.write import write_report

HOSTILE = r"50 % of #1 & $x_1$ {\input{/etc/passwd}} ~^ é \\"
CELLS = [
    CellResult("swap", HOSTILE, 45.25, 41.0, 49.3, 1, published=44.8, best=True),
    CellResult("swap", "bits", -40.31),
    CellResult(HOSTILE, HOSTILE, missing="not computed yet"),
]


def test_a_cell_has_its_interval_and_the_published_number() -> None:
    assert (
        cell_latex(CELLS[0]) == r"\textbf{45.2} {\scriptsize [41.0, 49.3]} \textcolor{gray}{44.8}"
    )
    assert [cell_latex(cell) for cell in (CELLS[1], CELLS[2], None)] == ["-40.3", "--", ""]


def test_page_markdown_and_latex_show_the_same_numbers(tmp_path: Path) -> None:
    """Included are a score with three decimals, and the maximum of a best configuration."""
    cell = CellResult(
        "swap", "text", 0.89066, 0.75486, 1.02647, digits=3, maximum=0.8834, published=0.8
    )
    page = write_report(results_of([cell]), tmp_path)
    row = re.findall(
        r'<th scope="row">swap</th>(.*?)</tr>', page.read_text(encoding="utf-8"), re.DOTALL
    )[0]
    texts = [re.sub(r"<[^>]+>", " ", row), cell_latex(cell).replace("[", " ").replace(",", " ")]
    numbers = [set(re.findall(r"(?<![-+−.\d])\d+\.\d+", text)) for text in texts]
    assert numbers[0] == numbers[1] == {"0.891", "0.755", "1.026", "0.883", "0.8"}
    assert "0.891 max 0.883 [0.8]" in (tmp_path / "cells.md").read_text(encoding="utf-8")


def test_a_name_is_no_option_of_the_line_break_before_it() -> None:
    r"""LaTeX looks past the end of a line for the * of \\* and the [length] of \\[length]."""
    names = ["*", "[3 layers]", "swap*"]
    lines = cells_latex(results_of([CellResult(name, "math", 1.0) for name in names])).splitlines()
    assert [line.partition(" & ")[0] for line in lines[-6:-3]] == ["{}*", "{}[3 layers]", "swap*"]


def test_names_are_text() -> None:
    text = cells_latex(results_of(CELLS))
    assert (
        text.splitlines()[-2:] == [r"\end{tabular}", r"\end{table}"]
        and r"\input" not in text.partition("tabular")[2]
    )
    assert r"50 \% of \#1 \& \$x\_1\$" in text and text.count("\\\\\n") == 3  # a head and two rows


def test_caption_label_seeds_and_baselines() -> None:
    """The signs of baselines stand beside bold, and the caption names them.

    A title is text, too.
    """
    cells = [
        CellResult("swap", "sw", 45.2, best=True, marks="†‡"),
        CellResult("soup", "sw", 41.0, marks="†"),
    ]
    named = {
        "table": "my study",
        "title": HOSTILE,
        "baselines": {"math": "†", "mathstral": "†", "base": "‡"},
    }
    text = cells_latex(results_of(cells, **named))
    assert (
        "swap & \\textbf{45.2}$^\\dagger$$^\\ddagger$ \\\\\n" in text
        and "soup & 41.0$^\\dagger$ \\\\\n" in text
    )
    (caption,) = [
        line for line in text.splitlines() if line.startswith(r"\caption{50 \% of \#1 \& \$x\_1\$")
    ]
    assert r"$^\dagger$: significantly better than math or mathstral (" in caption
    assert r"$^\ddagger$: significantly better than base (" in caption and "Bold: " in caption
    assert r"\label{tab:my-study}" in text
    one = cells_latex(results_of([CellResult("swap", "sw", 45.2)], **named))
    (caption,) = [line for line in one.splitlines() if line.startswith(r"\caption")]
    assert "dagger" not in caption and "Bold" not in caption


@pytest.mark.latex
def test_latex_takes_it(tmp_path: Path) -> None:
    head = "\\documentclass{article}\\usepackage[paperwidth=60cm]{geometry}\n"
    head += "\\usepackage{booktabs}\\usepackage{xcolor}\\begin{document}\n"
    file = tmp_path / "table.tex"
    file.write_text(head + cells_latex(results_of(CELLS)) + "\\end{document}\n", encoding="utf-8")
    command = [
        "pdflatex",
        "-interaction=nonstopmode",
        "-halt-on-error",
        "-no-shell-escape",
        file.name,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    shown = subprocess.run(
        ["pdftotext", "-layout", "table.pdf", "-"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "45.2 [41.0, 49.3] 44.8" in shown.stdout and "50 % of #1 & $x" in shown.stdout
    assert "root:" not in shown.stdout
