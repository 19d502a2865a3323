"""Figures: what is drawn is what the report's files say."""

import re
from pathlib import Path

import pytest
from made_up_report import results_of

from pipeline.errors import PipelineError
from pipeline.report import figures
from pipeline.report.load.contents import CellResult
from pipeline.report.render.cells import cell_lines

HOSTILE = r"50 % of $x_1$ </svg> \\ é"
CELLS = """row,column,value,low,high,maximum,n,published,difference,allowed,suspect,missing,runs
base,math,20.0,15.5,25.5,,1,21.3,,,,,a
swap,math,30.5,25.0,36.0,,1,,,,,,b
swap,bits,-40.3,-50.0,-30.0,,1,,,,,,b
lost,math,,,,,0,,,,,not computed yet,
"""
CONTRASTS = """left,right,place,over,left_value,right_value,difference,low,high,p_holm,n,detectable
swap,base,math,problems,30.5,20.0,10.5,5.0,16.0,0.002,100,7.5
swap,math expert,math,problems,30.5,28.0,2.5,-4.0,9.0,0.04,100,9.0
soup,base,math,problems,,,,,,,,
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "cells.csv").write_text(CELLS)
    (tmp_path / "contrasts.csv").write_text(CONTRASTS)
    return tmp_path


def test_bars_and_intervals_are_the_cells(report: Path) -> None:
    math, bits = figures.scores(report).axes
    bars = [(bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in math.patches]
    assert bars == [(20, 0), (30.5, 1)]
    intervals, (published,) = (
        [line for line in math.lines if len(line.get_xdata()) == size] for size in (2, 1)
    )
    assert [list(line.get_xdata()) for line in intervals] == [[15.5, 25.5], [25.0, 36.0]]
    assert list(published.get_xdata()) == [21.3] and list(published.get_ydata()) == [0]
    assert [bar.get_width() for bar in bits.patches] == [-40.3]
    assert [label.get_text() for label in math.get_yticklabels()] == ["base", "swap"]


def test_a_forest_has_differences_detectable_ones_and_significance(report: Path) -> None:
    (axes,) = figures.contrasts(report).axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(point.get_xdata()[0]) for point in points] == [10.5, 2.5]
    assert [point.get_markerfacecolor() != "none" for point in points] == [True, True]
    assert sorted((bar.get_x(), bar.get_width()) for bar in axes.patches) == [
        (-9.0, 18.0),
        (-7.5, 15.0),
    ]
    (report / "contrasts.csv").write_text(re.sub(r"0\.\d+,100", "0.06,100", CONTRASTS))
    (axes,) = figures.contrasts(report).axes
    assert [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"] == [
        "none",
        "none",
    ]


def test_without_corrected_p_nothing_is_called_insignificant() -> None:
    """results/laptop_translations was published by an earlier version, whose p is not corrected."""
    with pytest.raises(PipelineError, match="has no p_holm"):
        figures.contrasts(Path(__file__).parents[2] / "results/laptop_translations")


def test_files_depend_on_the_numbers_alone(report: Path, tmp_path: Path) -> None:
    for form in ("svg", "pdf"):
        files = [
            figures.save(figures.scores(report), tmp_path / f"{name}.{form}").read_bytes()
            for name in ("a", "b")
        ]
        assert files[0] == files[1]
    other = CELLS.replace("swap,math,30.5", "swap,math,31.5")
    (report / "cells.csv").write_text(other)
    assert (
        figures.save(figures.scores(report), tmp_path / "c.svg").read_bytes()
        != (tmp_path / "a.svg").read_bytes()
    )


def test_a_table_is_drawn_as_far_as_it_has_numbers(tmp_path: Path) -> None:
    cells = [
        CellResult(HOSTILE, HOSTILE, 45.25, 41.0, 49.3, 1),
        CellResult("swap", HOSTILE, missing="failed"),
    ]
    file = figures.save(figures.scores(cell_lines(results_of(cells))), tmp_path / "scores.svg")
    drawn = file.read_text()
    assert "</svg> " not in drawn and "&lt;/svg&gt;" in drawn
    with pytest.raises(
        PipelineError, match=r"cells.csv does not exist. Give the folder of a report"
    ):
        figures.scores(tmp_path)


def test_the_example_of_the_page_runs(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/reports.md").read_text("utf-8")
    (example,) = re.findall(
        r"```python\n(from pipeline.report import figures.*?)```", page, re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    exec(example.replace("runs/reports/sandbox", str(report)))
    assert (tmp_path / "scores.pdf").read_bytes().startswith(b"%PDF")
