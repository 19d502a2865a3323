"""Rows as JSON lines, their cells, and the reasons why a row cannot be used."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import PipelineError

Unusable = Literal[
    "empty",
    "not_text",
    "not_turns",
    "broken",
    "low_score",
    "tool_turns",
    "not_trained",
    "no_calculation",
    "too_long",
]
UNUSABLE: dict[Unusable, str] = {
    "empty": "null or blank, or a conversation without an answer",
    "not_text": "neither text nor a number: a list, an object, a date or NaN",
    "not_turns": (
        "text or an object where turns belong, or turns with more than text, such as images"
    ),
    "broken": "a line of bitext without a score and two texts",
    "low_score": "below min_score",
    "tool_turns": "a conversation with a tool in it",
    "not_trained": "a conversation of which each answer is marked by weight: 0 or train: false",
    "no_calculation": "a solution without an annotated calculation",
    "too_long": "calculations of more than 64 characters",
}


def read_jsonl(path: Path) -> list[Any]:
    """Read every line of a JSONL file.

    Raises:
        PipelineError: A line is not JSON. The message has the file and line.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                place = f"{path.parent.name}/{path.name}, line {number}"
                raise PipelineError(
                    f"{place} is not JSON. Repeat the run with redo=true."
                ) from None
    return rows


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_text(value: Any) -> bool:
    """Return True if a cell is text, null, or a finite number.

    Lists, objects, dates and NaN are not text.
    """
    is_number = isinstance(value, float | Decimal) and math.isfinite(value)
    return value is None or isinstance(value, str | int) or is_number
