"""CSV that is safe to open in spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def comma_separated(rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV text, with an apostrophe before values that a spreadsheet reads as formulas."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row in rows:
        writer.writerow([_harmless(value) for value in row])
    return buffer.getvalue()


def lines_csv(lines: Sequence[Mapping[str, Any]], digits: int | None = None) -> str:
    """Return CSV text of lines with the same keys, with numbers rounded to `digits` decimals."""
    rows: list[list[Any]] = [[]]
    if lines:
        rows = [list(lines[0])]
    for line in lines:
        row = []
        for value in line.values():
            if digits and isinstance(value, float):
                value = round(value, digits)
            row.append(value)
        rows.append(row)
    return comma_separated(rows)


def _harmless(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
