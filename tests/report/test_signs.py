"""Signs of what is significantly better than a named baseline, beside exploratory differences."""

from pathlib import Path

import pytest
from made_up_report import line_of, results_of

from pipeline.report.compare import correct_contrasts, headline_sentences
from pipeline.report.contrasts import mark_cells
from pipeline.report.load.contents import CellResult
from pipeline.report.render.cells import summary_text
from pipeline.report.write import write_report

LINES = [
    line_of("swap", "math", "sw", 9.0, 0.001),
    line_of("swap", "base", "sw", 12.0, 0.0001),
    line_of("swap", "sw", "sw", 9.0, 0.0001),
    line_of("soup", "math", "sw", 8.0, 0.002),
    line_of("soup", "base", "sw", 2.0, 0.4),
    line_of("ties", "base", "sw", -9.0, 0.001),
    line_of("swap", "base", "en", 30.0, 0.0001, exploratory=True),
    line_of("loss", "base", "sw", -9.0, 0.001, lower_is_better=True),
]
BASELINES = {"math": "†", "other math": "†", "base": "‡"}


def test_signs_mark_what_is_significantly_better_than_a_baseline(tmp_path: Path) -> None:
    """By Holm over the seven that are tested.

    A loss is no gain, less of a loss is one, and exploratory is none.
    """
    lines = correct_contrasts(LINES)
    cells = [
        CellResult(row, column, 40.0, task="mgsm")
        for row in ("swap", "soup", "ties", "loss")
        for column in ("sw", "en")
    ]
    marked = mark_cells(cells, lines, BASELINES)
    found = {(cell.row, cell.column): cell.marks for cell in marked if cell.marks}
    assert found == {("swap", "sw"): "†‡", ("soup", "sw"): "†", ("loss", "sw"): "‡"}
    by_column = mark_cells([CellResult("sw", "swap")], lines, BASELINES)
    assert by_column[0].marks == "†‡"
    results = results_of(marked, contrasts=LINES, baselines=BASELINES)
    html = write_report(results, tmp_path).read_text(encoding="utf-8")
    assert "40.0†‡" in html and "†: significantly better than math or other math (Holm" in html
    assert html.count("exploratory</td>") == 1 and "Exploratory differences are not tested" in html
    assert "+30.0" in html and "<b>+30.0" not in html
    text = summary_text(results, headline_sentences(results.contrasts), [])
    assert "40.0†‡" in text and "‡: significantly better than base (Holm" in text
    assert "+30.0" not in text


@pytest.mark.parametrize(("lower", "winner"), [(False, "swap"), (True, "soup")])
def test_only_the_best_of_a_place_is_bold(lower: bool, winner: str) -> None:
    """Two merges are better than the base, and were not compared with each other."""
    sign = -1 if lower else 1
    lines = [
        line_of(name, "base", "sw", sign * 20.0, 0.0001, lower_is_better=lower)
        for name in ("swap", "soup")
    ]
    values = {"swap": 62.0, "soup": 53.0, "base": 90.0 if lower else 25.0}
    cells = [CellResult(name, "sw", value, task="mgsm") for name, value in values.items()]
    marked = mark_cells(cells, correct_contrasts(lines), {})
    assert [cell.row for cell in marked if cell.best] == [winner]


def test_names_bring_no_escapes_of_a_terminal_into_files(tmp_path: Path) -> None:
    """`cat summary.txt` shows what is written: names come from other people's logs and studies."""
    cells = [CellResult("\x1b]0;title\x07swap", "sw\x1b[2J", 40.0, task="mgsm")]
    write_report(results_of(cells), tmp_path)
    for name in ("summary.txt", "cells.csv", "cells.md", "results.csv"):
        assert not {"\x1b", "\x07"} & {*(tmp_path / name).read_text(encoding="utf-8")}, name
