<<<<<<< HEAD
"""The printed numbers of the two papers, from tables.yaml and the change maps.

A key is `<paper>.<table>`, such as unreasonable.table3. A row's name is dotted if the table has
groups of rows ("sw.avg", "belebele_5shot_accuracy.te"). Scores are percent; BLEU is on its scale of
100.
=======
"""The printed results of the two papers: tables.yaml, and the numbers of the change maps.

A key is `<paper>.<table>`, such as unreasonable.table3. If a table has groups of rows, a row's name
is dotted ("sw.avg", "belebele_5shot_accuracy.te"). Scores are percent, and BLEU is 0-100.
>>>>>>> h3
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
<<<<<<< HEAD
    """Return all of tables.yaml: paper -> table -> printed content.

    Callers share the object and must not change it.
=======
    """Return the content of tables.yaml: paper -> table -> printed content.

    All callers share the object, so do not change it.
>>>>>>> h3
    """
    return yaml.safe_load((FOLDER / "tables.yaml").read_text(encoding="utf-8"))


def published_table(key: str) -> dict[str, Any]:
    """Return the table printed under a key.

    Raises:
<<<<<<< HEAD
        PipelineError: the key is unknown. It names the closest key.
=======
        PipelineError: The key is unknown. The message suggests similar keys.
>>>>>>> h3
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
<<<<<<< HEAD
    """Return row -> numbers by column, with None for cells that the paper leaves empty.

    Empty if our copy of the paper lacks the rows.

    Raises:
        PipelineError: the key names no table of numbers, such as unreasonable.partitions.
    """
    table = published_table(key)
    if "columns" not in table:
        raise PipelineError(
            f"published={key} is not a table of numbers. It has {', '.join(table)}."
        )
    return dict(
        _flatten_rows("", {name: row for name, row in table.items() if name not in NOT_ROWS})
    )
=======
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
>>>>>>> h3


def _flatten_rows(prefix: str, table: dict[str, Any]) -> Iterable[tuple[str, list[float | None]]]:
    for name, inner in table.items():
        if isinstance(inner, dict):
            yield from _flatten_rows(f"{prefix}{name}.", inner)
        elif inner is not None:
            yield prefix + name, inner


def published_value(key: str, row: str, column: str) -> float | None:
<<<<<<< HEAD
    """Return one printed number, or None if the paper leaves it empty.

    Raises:
        PipelineError: the row or column is unknown.
=======
    """Return a printed number, or None if the paper leaves the cell empty.

    Raises:
        PipelineError: The row or column is unknown.
>>>>>>> h3
    """
    by_row, columns = published_rows(key), published_table(key)["columns"]
    if column not in columns:
        raise PipelineError(f"a column of {key}: there is no {column}: {suggest(column, columns)}")
    if not by_row:
        return None  # unreasonable.table_a3: our copy lacks its cells
    if row not in by_row:
        raise PipelineError(f"a row of {key}: there is no {row}: {suggest(row, by_row)}")
    return by_row[row][columns.index(column)]


def is_printed(key: str, row: str, column: str) -> bool:
    """Return True if a table has this row and column.

    Raises:
<<<<<<< HEAD
        PipelineError: the table is unknown.
=======
        PipelineError: The table is unknown.
>>>>>>> h3
    """
    return row in published_rows(key) and column in published_table(key)["columns"]


def reason_for_doubt(key: str, row: str, column: str) -> str | None:
    """Return why a printed number is doubtful, or None.

<<<<<<< HEAD
    The mark of its cell has priority over the mark of its row, and this over its column's.
=======
    The reason is the mark of its cell, otherwise of its row or group of rows, otherwise of its
    column.
>>>>>>> h3
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
