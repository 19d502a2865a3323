"""CSV that is safe to open in spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def comma_separated(rows: Iterable[Sequence[Any]]) -> str:
    """CSV text; a value that a spreadsheet would take for a formula is prefixed with an
    apostrophe.
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        [[_harmless(value) for value in row] for row in rows]
    )
    return buffer.getvalue()


def lines_csv(lines: Sequence[Mapping[str, Any]], digits: int | None = None) -> str:
    """CSV text of lines with the same keys, numbers with at most these decimals."""
    rows = [
        [
            round(value, digits) if isinstance(value, float) and digits else value
            for value in line.values()
        ]
        for line in lines
    ]
    return comma_separated([list(lines[0]) if lines else [], *rows])


def _harmless(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
