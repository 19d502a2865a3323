"""CSV that is safe to open in spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def comma_separated(rows: Iterable[Sequence[Any]]) -> str:
    """CSV text; a value that a spreadsheet would take for a formula is prefixed with an apostrophe."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([[_harmless(value) for value in row] for row in rows])
    return buffer.getvalue()


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
