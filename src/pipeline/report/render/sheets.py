"""CSV as spreadsheets open it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def comma_separated(rows: Iterable[Sequence[Any]]) -> str:
    """CSV that a spreadsheet takes for what it is: text that begins as a formula would has an apostrophe before it."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([[_harmless(value) for value in row] for row in rows])
    return buffer.getvalue()


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
