"""What the two papers print: tables.yaml and the numbers of the change maps, read from this package.

A key is `<paper>.<table>`, such as unreasonable.table3; a row's name is dotted where a table has groups of rows
("sw.avg", "belebele_5shot_accuracy.te"). Scores are percent, BLEU is on its scale of 100.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import PipelineError

FOLDER = Path(__file__).parent
HEATMAPS = FOLDER / "layer_swapping_delta_heatmaps.csv"  # layer_swapping, figures 4 to 9
NOT_ROWS = ("metric", "columns", "suspect")


@lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    """All of tables.yaml: paper -> table -> what it prints. One object for all callers: do not change it."""
    return yaml.safe_load((FOLDER / "tables.yaml").read_text(encoding="utf-8"))


def published(key: str) -> dict[str, Any]:
    """What is printed under a key. Raises PipelineError for one that is not there, with the nearest that is."""
    paper, _, table = key.partition(".")
    there = load()
    if table not in there.get(paper, {}):
        raise _unknown("published", key, [f"{one}.{name}" for one, tables in there.items() for name in tables])
    return there[paper][table]


def rows(key: str) -> dict[str, list[float | None]]:
    """Row -> its numbers, one a column; None is a cell that the paper leaves empty. No rows: they are lost.

    Raises PipelineError for what is no table of numbers, such as unreasonable.partitions.
    """
    table = published(key)
    if "columns" not in table:
        raise PipelineError(f"published={key} is no table of numbers: it has {', '.join(table)}")
    return dict(_rows("", {name: row for name, row in table.items() if name not in NOT_ROWS}))


def _rows(prefix: str, found: dict[str, Any]) -> Iterable[tuple[str, list[float | None]]]:
    for name, inner in found.items():
        if isinstance(inner, dict):
            yield from _rows(f"{prefix}{name}.", inner)
        elif inner is not None:
            yield prefix + name, inner


def value(key: str, row: str, column: str) -> float | None:
    """One printed number; None where the paper prints none. Raises PipelineError for an unknown row or column."""
    there, columns = rows(key), published(key)["columns"]
    if column not in columns:
        raise _unknown(f"a column of {key}", column, columns)
    if not there:
        return None  # unreasonable.table_a3: its cells are lost
    if row not in there:
        raise _unknown(f"a row of {key}", row, there)
    return there[row][columns.index(column)]


def prints(key: str, row: str, column: str) -> bool:
    """Whether a table has this row and column. Raises PipelineError for a table that there is none of."""
    return row in rows(key) and column in published(key)["columns"]


def suspect(key: str, row: str, column: str) -> str | None:
    """Why a printed number is not to be trusted: what is said of its cell, else its row or rows, else its column."""
    marks = published(key).get("suspect", {})
    names, group = [f"{row}.{column}"], row
    while group:
        names.append(group)
        group = group.rpartition(".")[0]
    return next((marks[name] for name in [*names, column] if name in marks), None)


def _unknown(what: str, name: str, there: Iterable[str]) -> PipelineError:
    known = list(there)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}" if near else f"there are {', '.join(known)}"
    return PipelineError(f"{what}: there is no {name}, {hint}")
