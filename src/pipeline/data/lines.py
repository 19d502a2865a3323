"""Files of text, JSON and CSV as rows. Every cell is the text that the file holds, and a line feed alone ends a line.

The readers of `datasets` guess types from the first rows (5 becomes 5.0, 007 becomes 7, NA becomes nothing) and end a
line at every carriage return: it finds, downloads and unpacks the files, and shuffles them where they are streamed.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from itertools import chain
from typing import Any, TextIO

from pipeline.errors import PipelineError

Row = dict[str, Any]


def read_files(shards: Iterable[Iterable[str]], kind: str, separator: str, opener: Callable[..., Any]) -> Iterator[Row]:
    """The rows of files of UTF-8 text, with or without a byte order mark, of JSON as `parse_object` takes them. kind:
    text (a column, text: a line a row), csv or json; opener: as `open`, which may read URLs and archives."""
    for path in chain.from_iterable(shards):
        with opener(path, "rb") as file:
            text = TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
            try:
                if kind == "csv":
                    yield from read_cells(text, separator, path)
                elif kind == "json":
                    lines = read_objects(text, path)
                    yield from ({"number": number, "json": line, "path": path} for number, line in lines)
                else:
                    yield from ({"text": line.removesuffix("\n").removesuffix("\r")} for line in text)
            except UnicodeDecodeError as error:
                raise PipelineError(f"{path} is not readable as UTF-8 text: {error}") from error


def read_objects(text: TextIO, path: str) -> Iterator[tuple[int, str]]:
    """The number, from 1, and the text of each line that is not blank; of a list, of each of its objects."""
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first = next(lines, None)
    if first and first[1].lstrip().startswith("["):
        text_of_list = first[1] + "".join(line for _, line in lines)
        try:
            for number, row in enumerate(json.loads(text_of_list, parse_float=str), 1):
                yield number, json.dumps(row, ensure_ascii=False)
        except ValueError as error:
            raise PipelineError(f"{path} is no JSON list ({error}): write one object a line") from error
        return
    yield from [first] if first else []
    yield from lines


def parse_object(line: Row) -> Row:
    """The object of a line of JSON, its decimal numbers as the text that stands there."""
    path, number = line["path"], line["number"]
    try:
        row = json.loads(line["json"], parse_float=str)
    except ValueError as error:
        problem = f"line {number} is not JSON ({getattr(error, 'msg', error)})"
        raise PipelineError(f"{path}, {problem}: write one object a line") from error
    if not isinstance(row, dict):
        raise PipelineError(f"{path}, line {number} is a {type(row).__name__}: write one object a line")
    return row


def read_cells(text: TextIO, separator: str, path: str) -> Iterator[Row]:
    """The rows of CSV by the csv module, each cell as its text. A column without a name cannot be requested.

    Raises:
        PipelineError: no header, two columns of one name, no row, a row that is longer or shorter than the header, or
            quotation marks that do not fit; with the line, counted from 1.
    """
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(text, delimiter=separator, strict=True)
    names: list[str] = []
    any_row, line = False, 1
    try:
        for row in reader:
            if not names:
                names = row
                if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
                    raise PipelineError(f"{path} has two columns {repeated[0]!r}: name each once")
            elif row and len(row) != len(names):
                raise PipelineError(
                    f"{path}, line {line} has {len(row)} cells, and the header has {len(names)}: write as many, and "
                    f"quote cells that hold {'a tab' if separator == chr(9) else separator}"
                )
            elif row:  # a blank line is none
                any_row = True
                cells = dict(zip(names, row, strict=True))
                cells.pop("", None)
                yield cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise PipelineError(
            f"{path}, line {line}: {error}; quote a cell that holds a carriage return, and double quotation marks in it"
        ) from error
    if not any_row:
        raise PipelineError(f"{path} has {'a header and no rows' if names else 'no header'}: write a header and rows")
