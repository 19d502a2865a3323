"""Tables as text: aligned columns for a terminal, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

MARKUP = re.compile(r"[\\`*]|\](?=[(\[:])")  # a single ] in brackets, as in [47.8], makes no link
COLORS = re.compile(r"\x1b\[[0-9;]*m")
# these characters change the order of letters
DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *DIRECTIONS), "\ufffd")


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: 1 run, 2,000 runs."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return lines of aligned columns, two spaces apart; columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if place in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown_text(text: str) -> str:
    """Return the text on one line, with Markdown and HTML escaped."""
    return MARKUP.sub(r"\\\g<0>", one_line(text))


def printable(text: str) -> str:
    """Return the text without colors and with � for control characters.

    Control characters could change what a terminal shows.
    """
    return COLORS.sub("", text).translate(CONTROLS)


def markdown_line(parts: Sequence[str]) -> str:
    cells = [one_line(part).replace("|", "\\|") for part in parts]
    return f"| {' | '.join(cells)} |"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [markdown_line(header), "|" + "---|" * len(header), *map(markdown_line, rows)]


def one_line(text: str) -> str:
    """Return the text on one line, so that a title cannot end a line of Markdown."""
    return " ".join(text.split())


def shorten(text: str, width: int) -> str:
    """Return at most `width` characters, without the middle of a longer text."""
    if len(text) <= width:
        return text
    start, end = text[: width // 2], text[len(text) - (width - 1) // 2 :]
    return f"{start}…{end}"


def strings_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_in(part)
