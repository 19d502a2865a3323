"""Files of text, JSON and CSV as rows.

Every cell has the text of the file, and only a line feed ends a line.

The readers of `datasets` are not used, because they guess types from the first rows (5 becomes 5.0,
007 becomes 7, NA becomes null) and end a line at every carriage return. `datasets` only finds,
downloads, unpacks and (in streams) shuffles the files.
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
    files: Iterable[str], kind: str, separator: str, opener: Callable[..., Any]
) -> Iterator[Row]:
    """Read rows of UTF-8 files, with or without a byte order mark.

    Args:
        files: Their paths or addresses.
        kind: csv, json or text (one line per row).
        separator: The separator of CSV.
        opener: A function like `open`, which may read URLs and archives.
    """
    for path in files:
        with opener(path, "rb") as file:
            text = TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
            try:
                if kind == "csv":
                    yield from read_cells(text, separator, path)
                elif kind == "json":
                    yield from read_objects(text, path)
                else:
                    for line in text:
                        yield {"text": line.removesuffix("\n").removesuffix("\r")}
            except UnicodeDecodeError as error:
                raise PipelineError(
                    f"{path} is not readable as UTF-8 text ({error}). Save it as UTF-8."
                ) from error


def read_objects(text: TextIO, path: str) -> Iterator[Row]:
    """Read the object of each line that is not blank, or the objects of one list.

    Decimal numbers keep their text.
    """
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    head = list(islice(lines, 1))
    if head and head[0][1].lstrip().startswith("["):
        whole = "".join(line for _, line in chain(head, lines))
        for row in read_json(whole, path, f"line {head[0][0]}"):
            yield _checked_object(row, path, "an entry of its list")
        return
    for number, line in chain(head, lines):
        row = read_json(line, path, f"line {number}")
        yield _checked_object(row, path, f"line {number}")


def _checked_object(row: Any, path: str, where: str) -> Row:
    if not isinstance(row, dict):
        raise PipelineError(f"{path}, {where} is a {type(row).__name__}. Write one object a line.")
    return row


def read_json(text: str, path: str, where: str) -> Any:
    try:
        return json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as error:
        problem = f"{where} is not JSON ({getattr(error, 'msg', error)})"
        raise PipelineError(f"{path}, {problem}. Write one object a line.") from error


def read_cells(text: TextIO, separator: str, path: str) -> Iterator[Row]:
    """Read the rows of CSV with the csv module, each cell as its text.

    Columns without a name are dropped.

    Raises:
        PipelineError: A column is repeated, a row has another length than the header, or quotation
            marks are unbalanced. The message has the line, counted from 1.
    """
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(text, delimiter=separator, strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in reader:
            if not names:
                names = row
                for name, count in Counter(names).items():
                    if name and count > 1:
                        raise PipelineError(
                            f"{path} has two columns {name!r}. Give each column another name."
                        )
            elif row:  # not a blank line
                if len(row) != len(names):
                    raise PipelineError(
                        f"{path}, line {line} has {len(row)} cells, and the header has"
                        f" {len(names)}. Write as many cells, and quote cells that contain the"
                        " separator."
                    )
                cells = dict(zip(names, row, strict=True))
                cells.pop("", None)
                yield cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise PipelineError(
            f"{path}, line {line}: {error}. Quote cells that contain a carriage return, and double"
            " the quotation marks in them."
        ) from error
