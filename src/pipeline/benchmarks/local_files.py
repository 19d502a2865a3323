"""Local files of benchmarks, read from data_root and checked row by row.

Nothing heavy is imported. Files are JSON lines such as mgsm/sw/test.jsonl. FLORES may also be plain
text (flores.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import refuse_special
from pipeline.languages import Language

Row = dict[str, Any]
Holds = Mapping[str, type | Sequence[Any]]  # column -> its type, or its allowed values


def path_of_split(data_root: Path, benchmark: str, spoken: Language, split: str) -> Path:
    return data_root / benchmark / spoken.code / f"{split}.jsonl"


class Missing(PipelineError):
    """Missing data. A bundle may leave out the task and says so."""


def lines_of(file: Path, data_root: Path | None = None) -> list[tuple[int, str]]:
    """Return the numbers and texts of the lines that are not empty.

    Args:
        file: the file.
        data_root: for the message; by default two folders above the file's folder.
    """
    try:
        text = refuse_special(file).read_text(encoding="utf-8")
    except OSError as error:
        root = data_root or file.parents[2]
        problem = f"data_root={root} has no {file.relative_to(root)}"
        if not isinstance(error, FileNotFoundError):
            problem += f" that can be read ({error.strerror})"
        raise Missing(
            f"{problem}. Put it there, point data_root elsewhere, or leave the task or language"
            " out."
        ) from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8. Write it again in UTF-8.") from error
    # splitlines would also split at U+2028, which JSON allows
    lines = enumerate(text.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def write_rows(file: Path, rows: Iterable[Row]) -> Path:
    """Write rows as JSON lines, and return the file."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return file


def rows_of(file: Path, holds: Holds, data_root: Path | None = None) -> list[Row]:
    """Return all rows of a JSON-lines file, and check their columns.

    Args:
        file: the file.
        holds: required columns, and the type or the allowed values of each.
        data_root: for messages (`lines_of`).

    Raises:
        PipelineError: the file is missing, empty or broken, or a row has a wrong column.
    """
    rows: list[Row] = []
    for number, line in lines_of(file, data_root):
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PipelineError(
                f"{where} is not JSON ({error.msg}). Write one JSON object a line, in UTF-8 without"
                " a byte order mark."
            ) from error
        if not isinstance(row, dict):
            raise PipelineError(
                f"{where} is a {type(row).__name__}, not a row. Write the Hub's columns."
            )
        check_columns(row, holds, where)
        rows.append(row)
    if not rows:
        raise PipelineError(f"{file} is empty. Put the data there, or point data_root elsewhere.")
    return rows


def check_columns(row: Row, holds: Holds, where: str) -> None:
    """Raise PipelineError if a row lacks a column, or has another value than it must hold."""
    for column, wanted in holds.items():
        if column not in row:
            raise PipelineError(
                f"{where} has no column {column!r}, but {', '.join(map(str, row))}. Write the Hub's"
                " columns."
            )
        value = row[column]
        if isinstance(wanted, type):
            fits = isinstance(value, wanted) and not isinstance(value, bool)
            described = f"of type {wanted.__name__}"
        else:
            fits = value in wanted
            described = f"one of {', '.join(map(str, wanted))}"
        if not fits:
            raise PipelineError(
                f"{where}: {column} must be {described}, got {value!r}. Correct the row."
            )
