"""What a reader sees first: the end of stage=table, and the first screen of the page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_report import line_of, results_of
from test_page import Page

from pipeline.report.figures import draw_scores
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.render.cells import BOLD
from pipeline.report.render.latex import cells_latex
from pipeline.report.stored import first_failure
from pipeline.report.write import write_report


@pytest.fixture
def report(one_language: Results, reports: Path) -> Path:
    """Of two columns."""
    columns = one_language.columns[:2]
    cells = [replace(cell, n=2) for cell in one_language.cells if cell.column in columns]
    results = replace(one_language, columns=columns, cells=cells)
    return write_report(results, reports)


def test_the_end_of_a_table_has_verdict_intervals_and_legend(report: Path) -> None:
    verdict, table, legend, *_ = (report.parent / "summary.txt").read_text().split("\n\n")
    assert verdict.splitlines()[1].startswith("“layer swap” is better than “base” in ")
    assert re.search(r"^base +\d+\.\d \(\d+\.\d to \d+\.\d\) ×2 ", table, re.MULTILINE)
    assert (
        "Round brackets: 95 % confidence interval" in legend
        and "×2: computed from 2 values" in legend
    )


def test_the_first_screen_is_one_sentence_and_notes_come_last(
    report: Path,
) -> None:
    html, page = report.read_text(), Page(report)
    first = html[html.index('<div class="first">') : html.index('id="table"')]
    assert first.count('<p class="headline">') == 1 and "<li>" in first
    table, comparisons = (
        html.index(f'aria-label="{name}"') for name in ("The table", "Comparisons")
    )
    assert (
        table
        < html.index("</table>", table)
        < html.index(BOLD)
        < html.index("Below a number: its 95")
        < comparisons
    )
    assert comparisons < html.index("In points (for bits and reading")
    following = page.text[page.text.index("What to do next", page.text.index("The table")) :]
    export, again = (
        following.index(f"python -m pipeline stage={stage} table=") for stage in ("export", "table")
    )
    assert "export.format=latex export.to=t.tex" in following[export:again]


def test_bars_share_their_axis_unless_a_number_is_no_share() -> None:
    cells = [CellResult("a", "x", 10.0), CellResult("a", "y", 80.0)]
    assert {axes.get_xlim() for axes in draw_scores(cells).axes} == {(0.0, 92.0)}
    cells[1] = replace(cells[1], value=250.0)  # a perplexity
    assert len({axes.get_xlim() for axes in draw_scores(cells).axes}) == 2


def test_a_failure_is_that_of_the_first_run() -> None:
    failed = {
        "math": "no room",
        "swap": "its parent math failed",
        "eval": "its parent swap failed",
        "x": "a sign",
    }
    assert [first_failure(name, failed) for name in ("eval", "swap", "math", "x", "y")] == [
        "math"
    ] * 3 + ["x", "y"]


def test_bold_and_comparisons_say_over_what_their_p_are_corrected(tmp_path: Path) -> None:
    results = results_of(
        [CellResult("swap", "mgsm", 1.0)], contrasts=[line_of("swap", "base", "mgsm", 4.0, 0.01)]
    )
    page = write_report(results, tmp_path)
    assert BOLD in page.read_text(
        encoding="utf-8"
    ) and f"% font that has it. {BOLD}" in cells_latex(results)
