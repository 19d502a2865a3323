"""Columns side by side, as a terminal shows them."""

from __future__ import annotations

from pipeline.report.text import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("run", "seconds", "state"), ("math-full-s0", "7", "finished"), ("sw", "1234567890", "")]
    assert aligned(rows) == [
        "run           seconds     state",
        "math-full-s0  7           finished",
        "sw            1234567890",
    ]
    assert aligned([("1.0 MB", "a"), ("12.5 MB", "b")], right={0}) == [" 1.0 MB  a", "12.5 MB  b"]
    assert aligned([]) == []
