"""The printed results of the two papers: tables.yaml, and the numbers of the change maps.

A key is `<paper>.<table>`, such as unreasonable.table3. If a table has groups of rows, a row's name
is dotted ("sw.avg", "belebele_5shot_accuracy.te"). Scores are percent, and BLEU is 0-100.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import PipelineError, suggest

FOLDER = Path(__file__).parent
HEATMAPS = FOLDER / "layer_swapping_delta_heatmaps.csv"  # layer_swapping, figures 4 to 9
NOT_ROWS = ("metric", "columns", "suspect")


@lru_cache(maxsize=1)
def load_tables() -> dict[str, Any]:
    """Return the content of tables.yaml: paper -> table -> printed content.

    All callers share the object, so do not change it.
    """
    return yaml.safe_load((FOLDER / "tables.yaml").read_text(encoding="utf-8"))


def published_table(key: str) -> dict[str, Any]:
    """Return the table printed under a key.

    Raises:
        PipelineError: The key is unknown. The message suggests similar keys.
    """
    paper, _, table = key.partition(".")
    papers = load_tables()
    if table not in papers.get(paper, {}):
        keys = []
        for name_of_paper, tables in papers.items():
            for name in tables:
                keys.append(f"{name_of_paper}.{name}")
        raise PipelineError(f"published: there is no {key}: {suggest(key, keys)}")
    return papers[paper][table]


def published_rows(key: str) -> dict[str, list[float | None]]:
    """Return the numbers of each row, one a column. None is a cell that the paper leaves empty.

    The result is empty if the rows are missing from our copy of the paper.

    Raises:
        PipelineError: The key is not a table of numbers, such as unreasonable.partitions.
    """
    table = published_table(key)
    if "columns" not in table:
        raise PipelineError(f"published={key} is not a table of numbers: it has {', '.join(table)}")
    rows = dict(table)
    for name in NOT_ROWS:
        rows.pop(name, None)
    return dict(_flatten_rows("", rows))


def _flatten_rows(prefix: str, table: dict[str, Any]) -> Iterable[tuple[str, list[float | None]]]:
    for name, inner in table.items():
        if isinstance(inner, dict):
            yield from _flatten_rows(f"{prefix}{name}.", inner)
        elif inner is not None:
            yield prefix + name, inner


def published_value(key: str, row: str, column: str) -> float | None:
    """Return a printed number, or None if the paper leaves the cell empty.

    Raises:
        PipelineError: The row or column is unknown.
    """
    by_row, columns = published_rows(key), published_table(key)["columns"]
    if column not in columns:
        raise PipelineError(f"a column of {key}: there is no {column}: {suggest(column, columns)}")
    if not by_row:
        return None  # unreasonable.table_a3: its cells are missing from our copy
    if row not in by_row:
        raise PipelineError(f"a row of {key}: there is no {row}: {suggest(row, by_row)}")
    return by_row[row][columns.index(column)]


def is_printed(key: str, row: str, column: str) -> bool:
    """Return True if a table has this row and column.

    Raises:
        PipelineError: The table is unknown.
    """
    return row in published_rows(key) and column in published_table(key)["columns"]


def reason_for_doubt(key: str, row: str, column: str) -> str | None:
    """Return why a printed number is doubtful, or None.

    The reason is the mark of its cell, otherwise of its row or group of rows, otherwise of its
    column.
    """
    marks = published_table(key).get("suspect", {})
    names, group = [f"{row}.{column}"], row
    while group:
        names.append(group)
        group, _, _ = group.rpartition(".")
    for name in [*names, column]:
        if name in marks:
            return marks[name]
    return None
