"""Charts: what they say, and the same bytes twice."""

from __future__ import annotations

from pipeline.report import plots


def test_plots_say_what_they_are_given():
    panel = plots.Panel("MGSM $x_1$", [23.0, None, 48.25], [4.2, None, None], chance=25)
    svg = plots.svg_of_scores(["base", "soup", "swap"], [panel], "p", 'a "label"')
    assert svg == plots.svg_of_scores(["base", "soup", "swap"], [panel], "p", 'a "label"')
    for text in (
        "MGSM $x_1$",
        "base",
        "23.0",
        "—",
        "48.2",
        "chance",
        'aria-label="a &quot;label&quot;"',
        "var(--accent",
    ):
        assert text in svg, text
    assert svg.startswith("<svg") and 'id="p-' in svg and "dc:date" not in svg


def test_long_logs_are_averaged_in_blocks():
    assert plots.thinned([(step, 2.0) for step in range(400)]) == [(step, 2.0) for step in range(400)]
    assert plots.thinned([(step, step) for step in range(800)])[:2] == [(0.5, 0.5), (2.5, 2.5)]
