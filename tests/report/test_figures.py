"""The chart of scores: what is drawn is what the cells say."""

from dataclasses import replace

from pipeline.analyze.drawing import draw_svg
from pipeline.report.figures import draw_scores
from pipeline.report.load.contents import CellResult

HOSTILE = r"50 % of $x_1$ </svg> \\ é"
CELLS = [
    CellResult("base", "math", 20.0, 15.5, 25.5, 1, published=21.3, task="mgsm"),
    CellResult("swap", "math", 30.5, 25.0, 36.0, 1, task="mgsm"),
    CellResult("swap", "bits", -40.3, -50.0, -30.0, 1, task="mgsm"),
    CellResult("lost", "math", missing="not computed yet", task="mgsm"),
]


def scored(cells: list[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.value is not None]


def svg_of(cells: list[CellResult]) -> str:
    return draw_svg(lambda: draw_scores(scored(cells)), "scores", "scores")


def test_bars_and_intervals_are_the_cells() -> None:
    math, bits = draw_scores(scored(CELLS)).axes
    bars = [(bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in math.patches]
    assert bars == [(20, 0), (30.5, 1)]
    intervals, (published,) = (
        [line for line in math.lines if len(line.get_xdata()) == size] for size in (2, 1)
    )
    assert [list(line.get_xdata()) for line in intervals] == [[15.5, 25.5], [25.0, 36.0]]
    assert list(published.get_xdata()) == [21.3] and list(published.get_ydata()) == [0]
    assert [bar.get_width() for bar in bits.patches] == [-40.3]
    assert [label.get_text() for label in math.get_yticklabels()] == ["base", "swap"]


def test_pictures_depend_on_the_numbers_alone() -> None:
    assert svg_of(CELLS) == svg_of(CELLS)
    assert svg_of(CELLS) != svg_of([replace(CELLS[0], value=21.0), *CELLS[1:]])


def test_a_table_is_drawn_as_far_as_it_has_numbers() -> None:
    cells = [
        CellResult(HOSTILE, HOSTILE, 45.25, 41.0, 49.3, 1, task="mgsm"),
        CellResult("swap", HOSTILE, missing="failed", task="mgsm"),
    ]
    drawn = svg_of(cells)
    assert "</svg> " not in drawn and "&lt;/svg&gt;" in drawn
