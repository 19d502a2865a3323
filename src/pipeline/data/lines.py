"""Files of text, JSON and CSV as rows.

Every cell is the text that the file holds, and a line feed alone ends a line.

The readers of `datasets` guess types from the first rows (5 becomes 5.0, 007 becomes 7, NA becomes
nothing) and end a line at every carriage return: it finds, downloads and unpacks the files, and
shuffles them where they are streamed.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from itertools import chain, islice
from typing import Any, TextIO

from pipeline.errors import PipelineError

Row = dict[str, Any]


def read_files(
    shards: Iterable[Iterable[str]], kind: str, separator: str, opener: Callable[..., Any]
) -> Iterator[Row]:
    """Rows of files of UTF-8 text, with or without a byte order mark.

    kind: csv, json or text (a line a row); opener: as `open`, which may read URLs and archives.
    """
    for path in chain.from_iterable(shards):
        with opener(path, "rb") as file:
            text = TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
            try:
                if kind == "csv":
                    yield from read_cells(text, separator, path)
                elif kind == "json":
                    yield from read_objects(text, path)
                else:
                    yield from (
                        {"text": line.removesuffix("\n").removesuffix("\r")} for line in text
                    )
            except UnicodeDecodeError as error:
                raise PipelineError(
                    f"{path} is not readable as UTF-8 text ({error}): save it as UTF-8"
                ) from error


def read_objects(text: TextIO, path: str) -> Iterator[Row]:
    """Read the object of each line that is not blank, or those of a list.

    The list may be the `data` of an object. Decimal numbers keep their text.
    """
    lines = ((f"line {number}", line) for number, line in enumerate(text, 1) if line.strip())
    head = list(islice(lines, 2))
    if head and (
        len(head) == 1 or head[0][1].lstrip()[0] == "[" or head[0][1].rstrip()[-1] in "{[,"
    ):
        whole = read_json("".join(line for _, line in chain(head, lines)), path, head[0][0])
        if isinstance(whole, dict):
            listed = whole.get("data")
        else:
            listed = whole
        rows = (
            ("an entry of its list", row)
            for row in (listed if isinstance(listed, list) else [whole])
        )
    else:
        rows = ((where, read_json(line, path, where)) for where, line in chain(head, lines))
    for where, row in rows:
        if not isinstance(row, dict):
            raise PipelineError(
                f"{path}, {where} is a {type(row).__name__}: write one object a line"
            )
        yield row


def read_json(text: str, path: str, where: str) -> Any:
    try:
        return json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as error:
        problem = f"{where} is not JSON ({getattr(error, 'msg', error)})"
        raise PipelineError(f"{path}, {problem}: write one object a line") from error


def read_cells(text: TextIO, separator: str, path: str) -> Iterator[Row]:
    """Read the rows of CSV with the csv module, each cell as its text.

    A column without a name cannot be requested.

    Raises: PipelineError: no header, another separator, a repeated column, no row, a row of another
    length than the header, or unbalanced quotation marks; with the line, counted from 1.
    """
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(text, delimiter=separator, strict=True)
    names: list[str] = []
    any_row, line = False, 1
    try:
        for row in reader:
            if not names:
                names = row
                if len(row) == 1 and {*row[0]} & ({*",;\t"} - {separator}):
                    raise PipelineError(
                        f"{path} has one column, {row[0]!r}: separate its cells by commas, or by"
                        " tabs in a file named NAME.tsv"
                    )
                repeated = []
                for name, count in Counter(names).items():
                    if name and count > 1:
                        repeated.append(name)
                if repeated:
                    raise PipelineError(f"{path} has two columns {repeated[0]!r}: name each once")
            elif row and len(row) != len(names):
                raise PipelineError(
                    f"{path}, line {line} has {len(row)} cells, and the header has {len(names)}:"
                    " write as many, and quote cells that hold"
                    f" {'a tab' if separator == chr(9) else separator}"
                )
            elif row:  # a blank line is none
                any_row = True
                cells = dict(zip(names, row, strict=True))
                cells.pop("", None)
                yield cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise PipelineError(
            f"{path}, line {line}: {error}; quote a cell that holds a carriage return, and double"
            " quotation marks in it"
        ) from error
    if not any_row:
        raise PipelineError(
            f"{path} has {'a header and no rows' if names else 'no header'}: write a header and"
            " rows"
        )
