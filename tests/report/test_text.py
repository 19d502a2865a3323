"""Columns side by side, as a terminal shows them."""

from __future__ import annotations

from pipeline.report.render.cells import contrasts_csv
from pipeline.text import align_columns


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("run", "seconds", "state"), ("math-full-s0", "7", "finished"), ("sw", "1234567890", "")]
    assert align_columns(rows) == [
        "run           seconds     state",
        "math-full-s0  7           finished",
        "sw            1234567890",
    ]
    assert align_columns([("1.0 MB", "a"), ("12.5 MB", "b")], right={0}) == [" 1.0 MB  a", "12.5 MB  b"]
    assert align_columns([]) == []


def test_a_negative_difference_stays_a_number() -> None:
    """An apostrophe before it would make text of it; names are text, and have one."""
    line = {"left": "-a", "difference": -19.0, "p": 0.000123456, "n": 100, "missing": ""}
    assert contrasts_csv([line]) == "left,difference,p,n,missing\n'-a,-19.0,0.00012,100,\n"
