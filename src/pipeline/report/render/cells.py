"""The table's cells as text, with the published numbers: lines of cells.csv, cells.md and
summary.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report.compare import p_text
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.templates import render
from pipeline.text import align_columns, first_few

MISSING = "—"
WIDTH, MOST_COMPARED = 120, 8
NAMED_AT_MOST = 30  # runs listed by name
COUNTS = "×2: computed from 2 values, for example the mean of the scores of 2 seeds."
INTERVAL = "Round brackets: 95 % confidence interval over questions."
BOLD = (
    "Bold: significantly better than each other model of its column (or row), with p Holm-corrected"
    " over these models alone; p of the comparisons are corrected over all comparisons, so that"
    " these can differ from bold."
)
HOLM = "p (Holm): corrected over all tested comparisons of the table."
PUBLISHED = "Square brackets: the published number."
BEST_NOTE = (
    "A best configuration is chosen on one half of the questions and scored on the other, averaged"
    " both ways; max: chosen and scored on the same questions (the papers' method), which is biased"
    " upwards."
)


def cell_lines(results: Results) -> list[dict[str, Any]]:
    """Return the lines of cells.csv, one per cell.

    low and high are the 95 % interval of value over draws of problems. value and maximum: see
    CellResult. difference is that of the number by the papers' method from the published one.
    """
    return [
        {
            "row": cell.row,
            "column": cell.column,
            "value": cell.value,
            "low": cell.low,
            "high": cell.high,
            "maximum": cell.maximum,
            "n": cell.n,
            "published": cell.published,
            "difference": cell_difference(cell),
            "suspect": cell.suspect,
            "missing": cell.missing,
            "runs": " ".join(cell.runs),
        }
        for cell in results.cells
    ]


def cell_difference(cell: CellResult) -> float | None:
    """Return the number by the papers' method, minus the published one."""
    if cell.maximum is None:
        number = cell.value
    else:
        number = cell.maximum
    if number is None or cell.published is None:
        return None
    return round(number - cell.published, 10)


def cell_text(cell: CellResult | None, interval: bool = False) -> str:
    """Write a cell such as 45.2 (38.9 to 51.6) ×9 max 46.0 [44.8].

    These are the number, its interval if that is asked for, how many it is reduced from if more
    than one, a best configuration's maximum, and the published number.
    """
    if cell is None:
        return ""
    parts = [(cell.decimal(cell.value) or MISSING) + cell.marks]
    if interval and cell.low is not None:
        parts += [f"({cell.decimal(cell.low)} to {cell.decimal(cell.high)})"]
    if cell.n > 1 and cell.value is not None:
        parts += [f"×{cell.n}"]
    if cell.maximum is not None:
        parts += [f"max {cell.decimal(cell.maximum)}"]
    if cell.published is not None:
        parts += [f"[{cell.published:g}{'?' if cell.suspect else ''}]"]
    return " ".join(parts)


def legend(results: Results, published: str) -> list[str]:
    """Return what the marks mean that the cells have.

    Args: published: what the published numbers mean.
    """
    cells = results.cells
    notes = baseline_notes(results)
    if any(cell.n > 1 and cell.value is not None for cell in cells):
        notes += [COUNTS]
    if any(cell.published is not None for cell in cells):
        notes += [published]
    return notes + ([BEST_NOTE] if any(cell.maximum is not None for cell in cells) else [])


def baseline_notes(results: Results) -> list[str]:
    """Name the baselines of each mark that a cell has."""
    used = sorted({*"".join(cell.marks for cell in results.cells)})
    names = {
        sign: [name for name, mark in results.baselines.items() if mark == sign] for sign in used
    }
    return [
        f"{sign}: significantly better than {' or '.join(names[sign])} (Holm-corrected p < 0.05)."
        for sign in used
    ]


def cell_texts(results: Results, interval: bool = False) -> list[list[str]]:
    """Return the rows of a table: the name of each, and its cells as `cell_text` gives them."""
    cells = results.by_place
    return [
        [row, *(cell_text(cells.get((row, column)), interval) for column in results.columns)]
        for row in results.rows
    ]


def group_reasons(results: Results, name: str) -> list[str]:
    """Reasons why cells are `missing` or their published numbers `suspect`, each with the cells
    concerned.
    """
    cells = by_message(
        (getattr(cell, name), f"{cell.row}, {cell.column}") for cell in results.cells
    )
    found = []
    for reason, names in cells:
        if reason:
            found.append(f"{' '.join(first_few(names, 1))}: {reason}")
    return found


def by_message(messages: Iterable[tuple[str | None, str]]) -> list[tuple[str, list[str]]]:
    """Each distinct message, with the names of the runs or cells that have it; messages: (message,
    name).
    """
    names_of: dict[str, list[str]] = {}
    for message, name in messages:
        names_of.setdefault(message or "", []).append(name)
    return list(names_of.items())


def cells_markdown(results: Results, headline: str, notes: Sequence[str]) -> str:
    """Text of cells.md: the table with its headline, its notes, and reasons for missing cells."""
    text = render(
        "cells.md.j2",
        results=results,
        headline=headline,
        notes=[*legend(results, PUBLISHED), *results.merged, *notes],
        rows=cell_texts(results),
        lines=[*choice_lines(results), *missing_lines(results)],
        named_at_most=NAMED_AT_MOST,
    )
    return escape(text.rstrip(), quote=False) + "\n"


def summary_text(results: Results, headline: Sequence[str], marks: Sequence[str]) -> str:
    """Text of summary.txt, as stage=table prints it: the verdict, the cells in columns with their
    intervals where these fit, the first comparisons, and what the marks mean.
    """
    heads, right = ["", *results.columns], range(1, len(results.columns) + 1)
    table = align_columns([heads, *cell_texts(results, interval=True)], right)
    has_interval = max(map(len, table)) <= WIDTH and any(
        cell.low is not None for cell in results.cells
    )
    if not has_interval:
        table = align_columns([heads, *cell_texts(results)], right)
    comparisons = comparison_lines(results.contrasts)
    notes = [INTERVAL] * has_interval + legend(results, PUBLISHED) + [HOLM] * bool(comparisons)
    notes += [*results.merged, *results.other_bases]
    parts = [[results.title, *headline], table, comparisons, notes]
    parts += [[*missing_lines(results), *marks]]
    return "\n\n".join("\n".join(map(str.rstrip, part)) for part in parts if part) + "\n"


def comparison_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first comparisons, each with its interval and its p before and after Holm's
    correction.
    """
    tested = [line for line in lines if line["p_holm"] is not None]
    first = sorted(tested, key=lambda line: not line["primary"])[:MOST_COMPARED]
    if not first:
        return []
    has_subsets = any(line.get("beats") is not None for line in first)
    rows = []
    for line in first:
        row = [
            f"{line['left']} - {line['right']}",
            line["place"],
            f"{line['difference']:+.1f}",
            f"{line['low']:+.1f} to {line['high']:+.1f}",
            p_text(line["p"]).removeprefix("= "),
            p_text(line["p_holm"]).removeprefix("= "),
        ]
        if has_subsets:
            row.append(subsets_text(line))
        rows.append(row)
    omitted = []
    if len(tested) > len(first):
        omitted = [f"and {len(tested) - len(first)} more, in contrasts.csv"]
    heads = ["difference", "in", "points", "95 % interval", "p", "p (Holm)"]
    if has_subsets:
        heads.append("subsets better")
    return [*align_columns([heads, *rows], range(2, len(heads))), *omitted]


def subsets_text(line: Mapping[str, Any]) -> str:
    """Return the percent of drawn subsets in which the left side is better, with its interval."""
    if line.get("beats") is None:
        return ""
    return f"{line['beats']:.0f} % ({line['beats_low']:.0f} to {line['beats_high']:.0f})"


def missing_lines(results: Results) -> list[str]:
    return [f"{MISSING} {reason}" for reason in group_reasons(results, "missing")]


def choice_lines(results: Results) -> list[str]:
    """Each choice with its winner."""
    winners = {key: choice["chosen"] for key, choice in results.choices.items()}
    texts = {}
    for key, winner in winners.items():
        if winner:
            texts[key] = " ".join(map(str, winner.values()))
    return [
        f"{key}: {texts.get(key, 'not computed yet')} (of {len(choice['candidates'])})"
        for key, choice in results.choices.items()
    ]
