"""Measured against published numbers: what may differ, and by how much."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_report import results_of

from pipeline.report.load.contents import CellResult
from pipeline.report.render.cells import allowed_difference, cells_csv, cells_markdown, is_outside
from pipeline.report.write import write_report
from pipeline.stats.statistics import replication_reach

BASE = CellResult("sw", "base", 24.8, 20.0, 30.0, 1, 24.8, base=True)


@pytest.mark.parametrize(
    ("value", "tolerance", "far"), [(24.8, 1.2, False), (26.0, 1.2, False), (26.4, 1.2, True), (23.6, 1.2, False),
                                    (23.2, 1.2, True), (26.4, 2.0, False), (25.2, 0.0, True), (0.0, 1.2, True)]
)  # fmt: skip
def test_a_base_row_may_differ_by_three_of_250_questions(value: float, tolerance: float, far: bool) -> None:
    """Its interval over draws of questions, 10 points wide, has no part in it: both sides answered the same ones."""
    assert is_outside(replace(BASE, value=value), tolerance) == far


def test_a_trained_row_may_differ_by_what_another_set_of_experts_would() -> None:
    trained = replace(BASE, base=False, experts=5.0)
    assert allowed_difference(trained, 1.2) == 5.0 and allowed_difference(replace(trained, experts=0.0), 1.2) == 1.2
    assert not is_outside(replace(trained, value=29.8), 1.2) and is_outside(replace(trained, value=30.2), 1.2)
    assert not is_outside(replace(trained, value=99.0, suspect="why"), 1.2)
    alone = replace(trained, experts=None, value=99.0)  # one training shows nothing about others
    assert allowed_difference(alone, 1.2) is None and not is_outside(alone, 1.2)
    assert not is_outside(replace(trained, value=None), 1.2) and not is_outside(replace(trained, published=None), 1.2)


def test_the_page_says_that_the_tolerance_is_assumed(tmp_path: Path) -> None:
    cells = [replace(BASE, value=27.0), replace(BASE, row="te", base=False, experts=2.0, value=20.0)]
    made = results_of(cells, base_tolerance=1.5)
    text = write_report(made, tmp_path).read_text(encoding="utf-8")
    assert "1.5 points" in text and "assumed, not measured" in text and "report.base_tolerance" in text
    assert text.count('class="far"') == 2
    assert text.count("scoring differences (assumed)") == 1 and text.count("another set of experts would (95 %)") == 1
    lines = list(csv.DictReader(io.StringIO(cells_csv(made))))
    assert [line["allowed"] for line in lines] == ["1.5", "2.0"]


# ---------------------------------------------------------------------------------------------------- experts


def test_reach_by_hand() -> None:
    """Three experts 1, 2, 3: s^2 = 1, a difference of two means of three has variance 2/3, t of 2 degrees is 4.3027;
    of two maxima 2. With a second axis 2, 2, 5 (s^2 = 3): 2/3 + 2 and (8/3)^2 / ((2/3)^2 / 2 + 2^2 / 2) = 3.2 degrees,
    of which the t table gives 3.182 (3) and 2.776 (4)."""
    assert replication_reach([([1, 2, 3], True)]) == pytest.approx(4.3027 * (2 / 3) ** 0.5, abs=1e-3)
    assert replication_reach([([1, 2, 3], False)]) == pytest.approx(4.3027 * 2**0.5, abs=1e-3)
    both = replication_reach([([1, 2, 3], True), ([2, 2, 5], True)]) / (8 / 3) ** 0.5
    assert 2.776 < both < 3.182
    assert replication_reach([([4, 4], True)]) == 0


@pytest.mark.parametrize(("reduce", "mean", "low", "high"), [(np.mean, True, 0.93, 0.98), (np.max, False, 0.93, 1.0)])
def test_another_set_of_experts_lies_within_reach(reduce, mean: bool, low: float, high: float) -> None:
    """Nine pairs of 3 x 3 crossed experts, twice, 95 %. Of a maximum the bound is a careful one."""
    rng, within = np.random.default_rng(0), 0
    for _ in range(1000):
        both = rng.normal(0, 2, (2, 3, 1)) + rng.normal(0, 1, (2, 1, 3)) + rng.normal(0, 0.5, (2, 3, 3))
        ours, theirs = both
        levels = [([reduce(part) for part in parts], mean) for parts in (ours, ours.T)]
        within += abs(reduce(ours) - reduce(theirs)) <= replication_reach(levels)
    assert low <= within / 1000 <= high


def test_markdown_holds_no_html_of_a_name() -> None:
    cells = [CellResult("<img src=x onerror=alert(1)>", "math", value=20.0)]
    text = cells_markdown(results_of(cells, []), "p < 0.001", [])
    assert "&lt;img src=x" in text and "<" not in text
