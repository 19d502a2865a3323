"""Files of text, JSON and CSV through builders of `datasets`, which download, unpack, stream and cache them.

Its own builders guess types from the first rows (5 becomes 5.0, 007 becomes 7, NA becomes nothing) and end a line at
every carriage return. Here every cell is the text that the file holds, and a line feed alone ends a line. Imports
`datasets`.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from itertools import chain, islice
from typing import Any, TextIO

import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.text.text import Text

from pipeline.data.rows import JSON_COLUMNS
from pipeline.errors import PipelineError

AT_A_TIME = 10 << 20  # characters
ROWS = 1000  # of CSV at a time
STRAY = "\udc0d"  # stands for a carriage return inside a line; decoded UTF-8 holds no surrogate


Columns = dict[str, pa.Array]


def tables_of(
    files_iterables: Any, read_columns: Callable[[TextIO, str], Iterator[Columns]]
) -> Iterator[tuple[Key, pa.Table]]:
    """The tables that `read` makes of each file's text, UTF-8 with or without a byte order mark.

    `open` of this module is made to read URLs and archives by datasets.
    """
    for shard, files in enumerate(files_iterables):
        for path in files:
            with open(path, "rb") as file:
                text = TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
                for batch, columns in enumerate(read_columns(text, path)):
                    yield Key(shard, batch), pa.table(columns)


def in_batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(rows, ROWS)):
        yield batch


class Lines(Text):  # type: ignore[misc]
    """One column, text: a line a row."""

    def _generate_tables(self, base_files: Any, files_iterables: Any) -> Iterator[tuple[Key, pa.Table]]:
        def read_columns(text: TextIO, path: str) -> Iterator[Columns]:
            while lines := text.readlines(AT_A_TIME):
                texts = [line.removesuffix("\n").removesuffix("\r") for line in lines]
                yield {"text": pa.array(texts, pa.string())}

        return tables_of(files_iterables, read_columns)


class Objects(Text):  # type: ignore[misc]
    """The columns JSON_COLUMNS: line and text of one object a row. The file holds one a line, or a list of them."""

    def _generate_tables(self, base_files: Any, files_iterables: Any) -> Iterator[tuple[Key, pa.Table]]:
        def read_columns(text: TextIO, path: str) -> Iterator[Columns]:
            for rows in in_batches(read_objects(text, path)):
                numbers, texts = zip(*rows, strict=True)
                arrays = pa.array(numbers, pa.int64()), pa.array(texts, pa.large_string())
                yield dict(zip(JSON_COLUMNS, arrays, strict=True))

        return tables_of(files_iterables, read_columns)


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


class Cells(Csv):  # type: ignore[misc]
    """The columns of the header, each cell as its text."""

    def _generate_tables(self, base_files: Any, files_iterables: Any) -> Iterator[tuple[Key, pa.Table]]:
        def read_columns(text: TextIO, path: str) -> Iterator[Columns]:
            for rows in in_batches(read_cells(text, self.config.sep, path)):
                names = [name for name in rows[0] if name]  # a column without a name cannot be requested
                yield {name: pa.array([row[name] for row in rows], pa.large_string()) for name in names}

        return tables_of(files_iterables, read_columns)


def read_cells(text: TextIO, separator: str, path: str) -> Iterator[dict[str, str]]:
    """The rows of CSV by the csv module, as text.

    Raises:
        PipelineError: no header, two columns of one name, no row, a row that is longer or shorter than the header, or
            quotation marks that do not fit; with the line, counted from 1.
    """
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(terminate_lines(text), delimiter=separator, strict=True)
    names: list[str] = []
    any_row, line = False, 1
    try:
        for row in reader:
            row = [cell.replace(STRAY, "\r") for cell in row]
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
                yield dict(zip(names, row, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise PipelineError(f"{path}, line {line}: {error}; in a quoted cell double each quotation mark") from error
    if not any_row:
        raise PipelineError(f"{path} has {'a header and no rows' if names else 'no header'}: write a header and rows")


def terminate_lines(text: TextIO) -> Iterator[str]:
    """Lines for csv.reader, which ends a row at any carriage return outside quotation marks.

    Where the first line ends in a line feed, a carriage return elsewhere is a character of its cell. Otherwise
    carriage returns end lines too.
    """
    first = text.readline()
    returns_end = "\r" in first.removesuffix("\n").removesuffix("\r") or first.endswith("\r")
    for line in chain([first], text):
        if returns_end:
            yield from re.split(r"(?<=\r)(?!\n)|(?<=\n)", line)
        else:
            yield re.sub(r"\r(?!\n)", STRAY, line)
