"""Charts: what they say, and the same bytes twice."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pipeline.report.render import plots


def test_plots_say_what_they_are_given():
    panel = plots.Panel("MGSM <$x_1$>", [23.0, None, 48.25], [(18.8, 27.2), None, None], chance=25, best=2)
    svg = plots.of_scores(["base", "soup", "swap"], [panel], 'a "label"')
    tree = ElementTree.fromstring(svg)
    told = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"MGSM <$x_1$>", "base", "23.0", "—", "48.2", "chance"} <= set(told)
    assert tree.get("aria-label") == 'a "label"'
    bars = [(one.get("fill"), float(one.get("width"))) for one in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert [fill.partition(",")[0] for fill, _ in bars] == ["var(--soft", "var(--accent"]
    assert bars[1][1] / bars[0][1] == pytest.approx(48.25 / 23, rel=0.01)
    alone = plots.standalone(svg)
    assert "var(" not in alone and "#2f6b9a" in alone and ElementTree.fromstring(alone) is not None


def test_bars_below_zero_end_where_bars_above_it_begin():
    """Bits are negative, a reading has either sign."""
    svg = plots.of_scores(["base", "soup"], [plots.Panel("reading", [-4.0, 2.0], [(-5.0, -3.0), (1.0, 3.0)])], "x")
    below, above = (
        (float(bar.get("x")), float(bar.get("width")))
        for bar in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    )
    assert below[0] + below[1] == pytest.approx(above[0], abs=0.2) and below[1] == pytest.approx(2 * above[1], abs=0.2)
    assert below[0] > 0 and above[0] + above[1] < plots.WIDTH


def test_curves_start_high_and_end_low():
    curve = plots.Curve([(step, 3 - step / 100) for step in range(100)], [(50, 2.6), (99, float("nan"))])
    tree = ElementTree.fromstring(plots.of_trainings({"math": [curve], "silent": [plots.Curve([], [])]}, "curves"))
    (line,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert points[0][0] < points[-1][0] and points[0][1] < points[-1][1]  # SVG counts from the top
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}circle"))) == 1
    assert "nothing logged" in "".join(tree.itertext())


@pytest.mark.parametrize(("low", "high"), [(0, 100), (0, 1), (0.81, 3.2), (0, 37.3), (5, 5.002), (0, 600)])
def test_ticks_are_few_and_round(low, high):
    found = plots.round_steps(low, high)
    assert 3 <= len(found) <= 6 and all(low <= tick <= high for tick in found)


def test_long_logs_are_averaged_in_blocks():
    assert plots.thin_points([(step, 2.0) for step in range(400)]) == [(step, 2.0) for step in range(400)]
    assert plots.thin_points([(step, step) for step in range(800)])[:2] == [(0.5, 0.5), (2.5, 2.5)]
