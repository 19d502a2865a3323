"""The files of a report: exact for small made-up results.

Nothing missing is dropped, nothing unlike is compared.
"""

import csv
from pathlib import Path
from typing import Any

import pytest
from made_up_report import line_of, results_of, score, write_eval

from pipeline.report.load.contents import CellResult, CellScore
from pipeline.report.render.cells import BEST_NOTE, cells_markdown
from pipeline.report.write import write_report

COUNTS = "×2: computed from 2 values, for example the mean of the scores of 2 seeds."
PUBLISHED = "Square brackets: the published number."


def scored(row: str, column: str, *runs: str, **more: Any) -> CellResult:
    """Return a cell of MGSM with these evaluations, one per seed."""
    scores = [CellScore(run, {"seed": str(seed)}) for seed, run in enumerate(runs)]
    return CellResult(
        row, column, **{"task": "mgsm", "n": len(runs), "runs": runs, "scores": scores} | more
    )


def evaluations(root: Path, **rows: list[dict]) -> dict[str, Path]:
    return {name: write_eval(root / "runs" / name, written) for name, written in rows.items()}


def test_the_table_exactly(tmp_path):
    """One number a cell, of one seed or the mean of three.

    What is missing is there with its reason.
    """
    found = evaluations(
        tmp_path,
        base=[
            score("mgsm", 0.25, 100, "qac"),
            score("mgsm", 0.125, 100, "qac", filter="strict-match"),
        ],
        swap0=[score("mgsm", 0.4, 100, "qac")],
        swap1=[score("mgsm", 0.5, 50, "qac")],
        swap2=[score("mgsm", 0.6, 100, "qac")],
        to=[
            score("flores", 43.25, 50, "qac", "en-qac", stderr="N/A"),
            score("flores", 9.0, 50, "qac", "en-qac", metric="bleu"),
            score("flores", 70.0, 50, "qac", "qac-en"),
        ],
    )
    cells = [
        scored("base", "MGSM qac", "base", value=25.0, low=17.5, high=34.3),
        scored("base", "FLORES en-qac", "to", value=43.25, task="flores", pair="en-qac"),
        scored(
            "swap",
            "MGSM qac",
            "swap0",
            "swap1",
            "swap2",
            value=50.0,
            low=44.0,
            high=56.0,
        ),
        scored("swap", "FLORES en-qac", missing="to-2 no memory", task="flores", pair="en-qac"),
        CellResult("a|b", "MGSM qac", missing="to-2 no memory"),
        CellResult("a|b", "FLORES en-qac", missing="eval-x is not made yet"),
    ]
    lines = [line_of("swap", "base", "MGSM qac", 25.0, 0.001, n=100)]
    folder = tmp_path / "r"
    page = write_report(
        results_of(
            cells,
            found,
            contrasts=lines,
            failed={"to-2": "no memory"},
            missing={"eval-x": "not made (never made)"},
            sampled=["seed"],
        ),
        folder,
    )
    assert page == folder / "index.html"
    told = (folder / "cells.md").read_text()
    for line in (
        "| base | 25.0 | 43.2 |",
        "| swap | 50.0 ×3 | — |",
        "| a\\|b | — | — |",
        "- to-2: no memory",
    ):
        assert f"\n{line}\n" in told, line
    assert (
        (folder / "cells.csv").read_text()
        == "row,column,value,low,high,maximum,n,published,difference,suspect,missing,runs\nbase,MGSM qac,25.0,17.5,34.3,,1,,,,,base\nbase,FLORES en-qac,43.25,,,,1,,,,,to\nswap,MGSM qac,50.0,44.0,56.0,,3,,,,,swap0 swap1 swap2\nswap,FLORES en-qac,,,,,0,,,,to-2 no memory,\na|b,MGSM qac,,,,,0,,,,to-2 no memory,\na|b,FLORES en-qac,,,,,0,,,,eval-x is not made yet,\n"
    )
    text = page.read_text()
    assert (
        "swap, FLORES en-qac and 1 more: to-2 no memory" in text
        and text.count('title="to-2 no memory"') == 2
    )
    assert "5 finished, 1 failed, 1 not started" in text


def test_every_score_says_where_it_stands(tmp_path):
    """results.csv has each row of each run, other metrics too.

    A run behind several cells names them all.
    """
    found = evaluations(
        tmp_path,
        base=[score("mgsm", 0.25, 100, "qac"), score("mgsm", 0.5, 100, "qac", metric="unparsed")],
        swap0=[score("mgsm", 0.4, 100, "qac")],
        swap1=[score("mgsm", 0.5, 100, "qac")],
        dev=[score("mgsm", 0.5, 100, "qac")],
    )
    shared = [CellScore("base")]
    cells = [
        scored("base", "qaa", "base", value=25.0, scores=shared),
        scored("base", "qab", "base", value=25.0, scores=shared),
        scored("swap", "qaa", "swap0", "swap1", value=45.0),
    ]
    folder = write_report(results_of(cells, found), tmp_path / "r").parent
    with (folder / "results.csv").open(encoding="utf-8", newline="") as stream:
        rows = {(row["run"], row["metric"]): row for row in csv.DictReader(stream)}
    places = {
        key: (row["row"], row["column"], row["seed"], float(row["value"]))
        for key, row in rows.items()
    }
    assert places == {
        ("base", "exact_match"): ("base", "base | qaa; base | qab", "", 25.0),
        ("base", "unparsed"): ("base", "base | qaa; base | qab", "", 50.0),
        ("swap0", "exact_match"): ("swap", "swap | qaa", "0", 40.0),
        ("swap1", "exact_match"): ("swap", "swap | qaa", "1", 50.0),
        ("dev", "exact_match"): ("", "", "", 50.0),  # of a choice: no cell shows it
    }
    low, high = (float(rows["base", "exact_match"][end]) for end in ("low", "high"))
    assert (low, high) == pytest.approx((17.55, 34.30), abs=0.05)  # Wilson's interval of 25 of 100


@pytest.mark.parametrize(
    ("cell", "shown", "note"),
    [
        (CellResult("a", "b", 45.2), "45.2", []),
        (CellResult("a", "b", 45.2, n=9), "45.2 ×9", [COUNTS]),
        (
            CellResult("a", "b", 45.2, published=47.8, maximum=47.0),
            "45.2 max 47.0 [47.8]",
            [PUBLISHED, BEST_NOTE],
        ),
        (CellResult("a", "b", 45.2, n=9, published=44.8), "45.2 ×9 [44.8]", [COUNTS, PUBLISHED]),
    ],
)
def test_a_cell_in_markdown(cell, shown, note):
    lines = cells_markdown(results_of([cell]), "None.", []).splitlines()
    assert (
        lines[2] == "None."
        and lines[6] == f"| a | {shown} |"
        and [line for line in lines[7:] if line] == note
    )


def test_markdown_holds_no_html_of_a_name() -> None:
    cells = [CellResult("<img src=x onerror=alert(1)>", "math", value=20.0)]
    text = cells_markdown(results_of(cells, []), "p < 0.001", [])
    assert "&lt;img src=x" in text and "<" not in text
