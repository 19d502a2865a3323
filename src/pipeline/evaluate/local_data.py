"""Benchmarks as local files: found below data_root, read, and every row checked, before anything heavy is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.data.benchmark_files import flores_text, place
from pipeline.errors import PipelineError
from pipeline.languages import Language

Row = dict[str, Any]


class Missing(PipelineError):
    """Data that is not there. A bundle may leave such a task out, and says so."""


def lines_of(file: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        root, remedy = file.parents[2], "put it there, point data_root elsewhere, or leave the task or language out"
        why = "" if isinstance(error, FileNotFoundError) else f" that can be read ({error.strerror})"
        raise Missing(f"data_root={root} has no {file.relative_to(root)}{why}: {remedy}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8: write it again in UTF-8") from error
    # splitlines also splits at U+2028, which JSON allows
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def rows_of(
    file: Path,
    columns: dict[str, type],
    options: dict[str, tuple[str, ...]] | None = None,
    optional: dict[str, type] | None = None,
) -> list[Row]:
    """All rows of a JSON-lines file, each with `columns` of these types, as are those of `optional` where they are
    there, and `options` of these values."""
    rows = []
    for number, line in lines_of(file):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PipelineError(f"{file}, line {number} is not JSON ({error.msg}): write the file again") from error
        there = {column: kind for column, kind in (optional or {}).items() if isinstance(row, dict) and column in row}
        for column, kind in (columns | there).items():
            if not isinstance(row, dict) or column not in row:
                raise PipelineError(f"{file}, line {number} has no column {column!r}: the Hub's columns are needed")
            if not isinstance(row[column], kind) or isinstance(row[column], bool):
                want = "null" if kind is type(None) else f"of type {kind.__name__}"
                raise PipelineError(f"{file}, line {number}: {column} must be {want}, got {row[column]!r}")
        for column, values in (options or {}).items():
            if row.get(column) not in values:
                got = repr(row[column]) if column in row else "no such column"
                raise PipelineError(f"{file}, line {number}: {column} must be one of {', '.join(values)}, got {got}")
        rows.append(row)
    if not rows:
        raise PipelineError(f"{file} is empty: put the data there, or point data_root elsewhere")
    return rows


def check_worked(file: Path, exemplars: list[Row], stock: Row) -> None:
    """The stock task cuts a fixed count of characters off an exemplar's answer: its first words must stand there."""
    found = re.search(r'question\+"\\n(.+?)"', stock["doc_to_text"])
    if not found:
        return
    # Some of the harness' phrases differ from MGSM's own in spaces and in the width of the colon.
    plain = [re.sub(r"\s", "", text).replace("：", ":") for text in (found[1], *(row["answer"] for row in exemplars))]
    for number, answer in enumerate(plain[1:], start=1):
        if not answer.startswith(plain[0]):
            raise PipelineError(f"{file}: the answer of exemplar {number} must begin with {found[1]!r}, as MGSM's do")


def sentences(data_root: Path, spoken: Language, split: str) -> tuple[Path, dict[int, str]]:
    """FLORES sentences of one language by id, and their file: FLORES or FLORES+ as JSON lines, or plain text.

    `flores/sw/devtest.jsonl` with id and sentence (FLORES) or text (FLORES+), else `flores/sw/devtest.txt` or the
    release's `flores/devtest/swh_Latn.devtest`, a sentence a line.
    """
    file = place(data_root, "flores", spoken, split)
    for text in flores_text(data_root, spoken, split):
        if text.is_file() and not file.is_file():
            return text, dict(enumerate((line.strip() for _, line in lines_of(text)), start=1))
    rows = rows_of(file, {"id": int})
    column = "sentence" if "sentence" in rows[0] else "text"
    rows = rows_of(file, {"id": int, column: str})
    found = {row["id"]: row[column] for row in rows}
    if len(found) != len(rows):
        raise PipelineError(f"{file} has an id twice: the sentences of two languages are joined by id")
    return file, found


def joined(sides: list[dict[int, str]], names: list[str], what: str) -> list[Row]:
    """The rows of a translation task: two languages' sentences joined by id, in the order of the first."""
    if sides[0].keys() != sides[1].keys():
        odd = sorted(sides[0].keys() ^ sides[1].keys())
        raise PipelineError(f"{what} have different ids, {odd[0]} for one: take both files from the same release")
    spoken = {"source_name": names[0], "target_name": names[1]}
    return [{"id": key, **spoken, "source": text, "target": sides[1][key]} for key, text in sides[0].items()]
