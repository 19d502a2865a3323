"""Benchmarks as local files: found below data_root, read, and every row checked, before anything
heavy is imported.

mgsm/sw/test.jsonl, and so the other benchmarks; FLORES also as plain text (flores.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import refuse_special
from pipeline.languages import Language

Row = dict[str, Any]


def path_of_split(data_root: Path, benchmark: str, spoken: Language, split: str) -> Path:
    return data_root / benchmark / spoken.code / f"{split}.jsonl"


class Missing(PipelineError):
    """Data that is not there. A bundle may leave such a task out, and says so."""


def lines_of(file: Path, data_root: Path | None = None) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers.

    Args: data_root: by default two folders above the file's.
    """
    try:
        text = refuse_special(file).read_text(encoding="utf-8")
    except OSError as error:
        root, remedy = (
            data_root or file.parents[2],
            "put it there, point data_root elsewhere, or leave the task or language out",
        )
        if isinstance(error, FileNotFoundError):
            why = ""
        else:
            why = f" that can be read ({error.strerror})"
        raise Missing(f"data_root={root} has no {file.relative_to(root)}{why}: {remedy}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8: write it again in UTF-8") from error
    # splitlines also splits at U+2028, which JSON allows
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            found.append((number, line))
    return found


def write_rows(file: Path, rows: Iterable[Row]) -> Path:
    """Write the file as JSON lines."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return file


def rows_of(
    file: Path,
    columns: dict[str, type],
    options: dict[str, tuple[str | int, ...]] | None = None,
    optional: dict[str, type] | None = None,
    data_root: Path | None = None,
) -> list[Row]:
    """All rows of a JSON-lines file, each with `columns` of these types, as are those of `optional`
    where they are there, and `options` of these values.
    """
    rows, optional = [], optional or {}
    for number, line in lines_of(file, data_root):
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PipelineError(
                f"{where} is not JSON ({error.msg}): write one JSON object a line, in UTF-8 without"
                " a byte order mark"
            ) from error
        if not isinstance(row, dict):
            raise PipelineError(
                f"{where} is a {type(row).__name__}, not a row: the Hub's columns are needed"
            )
        for column, kind in (columns | optional).items():
            if column not in row and column not in optional:
                raise PipelineError(
                    f"{where} has no column {column!r}: it has {', '.join(map(str, row))}; the"
                    " Hub's columns are needed"
                )
            if column in row and (
                not isinstance(row[column], kind) or isinstance(row[column], bool)
            ):
                if kind is type(None):
                    want = "null"
                else:
                    want = f"of type {kind.__name__}"
                raise PipelineError(f"{where}: {column} must be {want}, got {row[column]!r}")
        for column, values in (options or {}).items():
            if row.get(column) not in values:
                got = "no such column"
                if column in row:
                    got = repr(row[column])
                raise PipelineError(
                    f"{where}: {column} must be one of {', '.join(map(str, values))}, got {got}"
                )
        rows.append(row)
    if not rows:
        raise PipelineError(f"{file} is empty: put the data there, or point data_root elsewhere")
    return rows
