"""The table's own cells as text: cells.csv, cells.md and choices.json, with what the paper prints beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.load.contents import CellResult, Results
from pipeline.report.render.sheets import comma_separated
from pipeline.report.render.text import markdown_line, plain

MISSING = "—"
MOST = 30  # runs that are named one by one
BEST_NOTE = (
    "A best configuration is chosen on one half of the questions and scored on the other, the mean of both ways; max: "
    "chosen and scored on the same questions, the papers' method, which is too high."
)


def cells_csv(results: Results) -> str:
    """A line a cell. low, high: 95 % of value over draws of problems; value, maximum: see CellResult; difference: from
    the published number, of the value or maximum by the papers' method, `allowed` or not."""
    head = "row column value low high maximum n published difference allowed suspect missing runs".split()
    lines = [
        [one.row, one.column, one.value, one.low, one.high, one.maximum, one.n, one.published, difference(one),
         allowed(one, results.base_tolerance) if one.published is not None else None, one.suspect, one.missing,
         " ".join(one.runs)]
        for one in results.cells
    ]  # fmt: skip
    return comma_separated([head, *lines])


def contrasts_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """A line for each of a table's comparisons in each row or column, numbers with five decimals."""
    rows = [[round(one, 5) if isinstance(one, float) else one for one in line.values()] for line in lines]
    return comma_separated([list(lines[0]), *rows])


def difference(one: CellResult) -> float | None:
    return None if one.as_published is None or one.published is None else round(one.as_published - one.published, 10)


def allowed(one: CellResult, base_tolerance: float) -> float | None:
    """Points by which the published number may differ where paper and table agree; None where nothing tells.

    Both sides answered the same questions, so the draw of questions is no reason to differ. Of untrained models only
    the scoring differs: `base_tolerance`. Of trained ones the experts do, too: the 95 % interval of another set, where
    the cell is reduced over several experts; one training shows nothing about others.
    """
    if one.base:
        return base_tolerance
    return None if one.experts is None else max(one.experts, base_tolerance)


def outside(one: CellResult, base_tolerance: float) -> bool:
    """Whether the published number, unless suspect, differs by more than `allowed` and its rounding to 0.1."""
    apart, most = difference(one), allowed(one, base_tolerance)
    return apart is not None and most is not None and not one.suspect and abs(apart) > most + 0.05


def choices_json(results: Results) -> str:
    """Who won each choice, with the mean of each candidate and the runs that scored it."""
    return json.dumps(results.choices, indent=1, ensure_ascii=False) + "\n"


def cell_text(one: CellResult | None) -> str:
    """45.2 (9) max 46.0 [44.8]: the number, how many it was made of where that is more than one, a best configuration's
    maximum, what the paper prints."""
    if one is None:
        return ""
    parts = [MISSING if one.value is None else f"{one.value:.{one.digits}f}"]
    parts += [f"({one.n})"] if one.n > 1 and one.value is not None else []
    parts += [f"max {one.maximum:.{one.digits}f}"] if one.maximum is not None else []
    parts += [f"[{one.published:g}{'?' if one.suspect else ''}]"] if one.published is not None else []
    return " ".join(parts)


def reasons(results: Results, name: str) -> list[str]:
    """Why cells are `missing` or their published numbers `suspect`, each reason with the cells that it concerns."""
    places: dict[str, list[str]] = {}
    for cell in results.cells:
        if reason := getattr(cell, name):
            places.setdefault(reason, []).append(f"{cell.row}, {cell.column}")
    more = {reason: f" and {len(where) - 1} more" if len(where) > 1 else "" for reason, where in places.items()}
    return [f"{where[0]}{more[reason]}: {reason}" for reason, where in places.items()]


def cells_markdown(results: Results, headline: str, notes: Sequence[str]) -> str:
    """The table with its headline, its notes, and why anything is missing."""
    cells = {(one.row, one.column): one for one in results.cells}
    columns = results.columns
    lines = [f"# {plain(results.title)}", "", *([plain(results.note), ""] if results.note else [])]
    lines += [plain(headline), ""]
    lines += [markdown_line(["", *columns]), "|---|" + "---:|" * len(columns)]
    rows = [[row, *(cell_text(cells.get((row, column))) for column in columns)] for row in results.rows]
    lines += [*map(markdown_line, rows), ""]
    texts = " ".join(text for _, *row in rows for text in row)
    brackets = ["round brackets how many numbers a cell is made of"] if "(" in texts else []
    brackets += ["square brackets what the paper prints"] if "[" in texts else []
    lines += [f"In {', in '.join(brackets)}.", ""] if brackets else []
    for note in [*notes, *([BEST_NOTE] if any(one.maximum is not None for one in cells.values()) else [])]:
        lines += [plain(note), ""]
    for key, choice in results.choices.items():
        lines += [f"- {plain(key)}: {chosen_text(choice)}"]
    lines += [f"- {MISSING} {plain(reason)}" for reason in reasons(results, "missing")]
    for title, runs in (("Failed runs:", results.failed), ("Not made:", results.missing)):
        lines += ["", title, "", *(f"- {run.name}: {plain(run.reason)}" for run in runs[:MOST])] if runs else []
        lines += [f"- and {len(runs) - MOST} more"] if len(runs) > MOST else []
    return "\n".join(lines).rstrip() + "\n"


def chosen_text(choice: dict[str, Any]) -> str:
    return " ".join(map(str, choice["chosen"].values())) if choice["chosen"] else "not made yet"
