"""The table's cells as text, with the published numbers.

These are the lines of cells.csv, cells.md and summary.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pipeline.errors import first_few
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.templates import render
from pipeline.text import align_columns

COLUMNS = ("row column value low high maximum n published difference suspect missing runs").split()
MISSING = "—"
WIDTH = 120
NAMED_AT_MOST = 30  # runs with their names
COUNTS = "×2: computed from 2 values, for example the mean of the scores of 2 seeds."
INTERVAL = "Round brackets: 95 % confidence interval over questions."
BOLD = "Bold: the best of its place, significantly better than each model that it is compared with."
PUBLISHED = "Square brackets: the published number."
BEST_NOTE = (
    "A best configuration is chosen on one half of the questions and scored on the other, averaged"
    " both ways; max: chosen and scored on the same questions (the papers' method), which is biased"
    " upwards."
)


def cell_lines(results: Results) -> list[dict[str, Any]]:
    """Return the lines of cells.csv, one per cell.

    `low` and `high` are the 95 % interval of `value` over draws of problems. `value` and `maximum`
    are explained in CellResult. `difference` is the papers' number of this cell minus the published
    one.
    """
    lines = []
    for cell in results.cells:
        line = {**vars(cell), "difference": cell_difference(cell), "runs": " ".join(cell.runs)}
        lines.append({name: line[name] for name in COLUMNS})
    return lines


def cell_difference(cell: CellResult) -> float | None:
    """Return the number by the papers' method, minus the published one."""
    number = cell.maximum if cell.maximum is not None else cell.value
    if number is None or cell.published is None:
        return None
    return round(number - cell.published, 10)


def cell_text(cell: CellResult | None, interval: bool = False) -> str:
    """Return a cell such as 45.2 (38.9 to 51.6) ×9 max 46.0 [44.8].

    These are the number, its interval if `interval` is true, the count of the numbers that it is
    reduced from, a best configuration's maximum, and the published number.
    """
    if cell is None:
        return ""
    number = cell.decimal(cell.value) or MISSING
    parts = [number + cell.marks]
    if interval and cell.low is not None:
        low, high = cell.decimal(cell.low), cell.decimal(cell.high)
        parts.append(f"({low} to {high})")
    if cell.n > 1 and cell.value is not None:
        parts.append(f"×{cell.n}")
    if cell.maximum is not None:
        parts.append(f"max {cell.decimal(cell.maximum)}")
    if cell.published is not None:
        doubt = "?" if cell.suspect else ""
        parts.append(f"[{cell.published:g}{doubt}]")
    return " ".join(parts)


def legend(results: Results, published: str) -> list[str]:
    """Return the meaning of the marks that the cells have.

    `published` is the meaning of published numbers.
    """
    cells = results.cells
    notes = baseline_notes(results)
    if any(cell.n > 1 and cell.value is not None for cell in cells):
        notes.append(COUNTS)
    if any(cell.published is not None for cell in cells):
        notes.append(published)
    if any(cell.maximum is not None for cell in cells):
        notes.append(BEST_NOTE)
    return notes


def baseline_notes(results: Results) -> list[str]:
    """Return a note with the baselines of each mark that a cell has."""
    names: dict[str, list[str]] = {}
    for name, sign in results.baselines.items():
        names.setdefault(sign, []).append(name)
    used = {*"".join(cell.marks for cell in results.cells)}
    notes = []
    for sign in sorted(used):
        baselines = " or ".join(names[sign])
        notes.append(f"{sign}: significantly better than {baselines} (Holm-corrected p < 0.05).")
    return notes


def cell_texts(results: Results, interval: bool = False) -> list[list[str]]:
    """Return the rows of a table: the name of each, and its cells as `cell_text` gives them."""
    cells = results.by_place
    rows = []
    for row in results.rows:
        texts = [cell_text(cells.get((row, column)), interval) for column in results.columns]
        rows.append([row, *texts])
    return rows


def group_reasons(results: Results, name: str) -> list[str]:
    """Return the distinct reasons of cells, each with the cells concerned.

    `name` is `missing` or `suspect`.
    """
    messages = []
    for cell in results.cells:
        reason = getattr(cell, name)
        if reason:
            messages.append((reason, f"{cell.row}, {cell.column}"))
    lines = []
    for reason, names in by_message(messages):
        lines.append(f"{first_few(names, 1, ' ')}: {reason}")
    return lines


def by_message(messages: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return each distinct message, with the names of the runs or cells that have it.

    `messages` has the message and the name of each run or cell.
    """
    names_of: dict[str, list[str]] = {}
    for message, name in messages:
        names_of.setdefault(message, []).append(name)
    return list(names_of.items())


def cells_markdown(results: Results, headline: str, notes: Sequence[str]) -> str:
    """Return the text of cells.md: the table, its headline, its notes, and missing cells."""
    text = render(
        "cells.md.j2",
        results=results,
        headline=headline,
        notes=[*legend(results, PUBLISHED), *notes],
        rows=cell_texts(results),
        lines=[*choice_lines(results), *missing_lines(results)],
        named_at_most=NAMED_AT_MOST,
    )
    return escape(text.rstrip(), quote=False) + "\n"


def summary_text(results: Results, headline: Sequence[str], marks: Sequence[str]) -> str:
    """Return the text of summary.txt, as stage=table prints it.

    It has the headline, the cells in columns, and the meaning of the marks. Cells have their
    intervals if the lines are then not too wide.
    """
    notes = legend(results, PUBLISHED)
    table = aligned_cells(results, interval=True)
    if max(map(len, table)) > WIDTH:
        table = aligned_cells(results, interval=False)
    elif any(cell.low is not None for cell in results.cells):
        notes.insert(0, INTERVAL)
    reasons = [*missing_lines(results), *marks]
    texts = []
    for part in ([results.title, *headline], table, notes, reasons):
        if part:
            texts.append("\n".join(line.rstrip() for line in part))
    return "\n\n".join(texts) + "\n"


def aligned_cells(results: Results, interval: bool) -> list[str]:
    heads = ["", *results.columns]
    return align_columns([heads, *cell_texts(results, interval)], range(1, len(heads)))


def missing_lines(results: Results) -> list[str]:
    return [f"{MISSING} {reason}" for reason in group_reasons(results, "missing")]


def choice_lines(results: Results) -> list[str]:
    """Return each choice with its winner."""
    lines = []
    for key, choice in results.choices.items():
        winner = "not computed yet"
        if choice["chosen"]:
            winner = " ".join(map(str, choice["chosen"].values()))
        lines.append(f"{key}: {winner} (of {len(choice['candidates'])})")
    return lines
