"""Tables as text: aligned columns for a terminal, lines and tables of Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

MARKUP = re.compile(r"[\\`*]|\](?=[(\[:])")  # a ] in brackets alone, as [47.8], makes no link
COLORS = re.compile(r"\x1b\[[0-9;]*m")
DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # which change the order of letters
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *DIRECTIONS), "\ufffd")


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: 1 run, 2,000 runs."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def first_few(items: Sequence[str], most: int, where: str = "") -> list[str]:
    """The first `most` items and, if these are not all, "and 3 more".

    where: where the others are.
    """
    omitted = []
    if len(items) > most:
        omitted = [f"and {len(items) - most} more{where}"]
    return [*items[:most], *omitted]


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of equally wide columns, two spaces between them; those in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_text(text: str) -> str:
    """The text on one line, without meaning in Markdown: no links, images, emphasis, code or
    HTML.
    """
    return MARKUP.sub(r"\\\g<0>", one_line(text))


def printable(text: str) -> str:
    """The text without colors, and with � for control characters, which could rewrite what a
    terminal shows.
    """
    return COLORS.sub("", text).translate(CONTROLS)


def markdown_line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(one_line(part).replace("|", "\\|") for part in parts) + " |"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [markdown_line(header), "|" + "---|" * len(header), *map(markdown_line, rows)]


def one_line(text: str) -> str:
    """The text on one line, so that a line break in a title cannot end a line of Markdown."""
    return " ".join(text.split())


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle of a longer text is left out."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def strings_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_in(part)
