"""Controls of a table's merges: each merge again, with the base in the language expert's place.

`merge.control` (config/merging.py) defines the control of one merge. The difference between a merge
and its control is the language expert's contribution. Without a control, the effect of halving the
math vector could be mistaken for cross-lingual transfer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.errors import suggest
from pipeline.tables.schema import Names, Reference, Side, Table, TableRun
from pipeline.tables.words import as_list

SUFFIX = ", control"


def add_controls(table: Table) -> Table:
    """Return the table with a control after each row or column that shows a controlled merge.

    Raises:
        PipelineError: For an unknown run, or if no merge has a language expert.
    """
    if not table.controls:
        return table
    experts = language_experts(table, table.controls)
    runs = dict(table.runs)
    controlled = []
    for name, run in table.runs.items():
        roles = controlled_roles(table, run, experts)
        if roles:
            controlled.append(name)
            control = name + SUFFIX
            runs[control] = TableRun(control, run.kind, {**run.words, "merge.control": roles})
    if not controlled:
        raise table.refuse(
            "controls",
            f"no merge has {', '.join(experts)} as its language expert. Leave controls out.",
        )
    columns = list(sides_with_controls(table.columns, controlled))
    with_control = []
    for side in columns:
        if side.control_of:
            with_control.append(side.control_of)
    rows = []
    for row in sides_with_controls(table.rows, controlled):
        listed = columns_with_controls(row.columns, with_control)
        rows.append(replace(row, columns=tuple(listed)))
    return replace(table, runs=runs, rows=rows, columns=columns)


def language_experts(table: Table, requested: Any) -> list[str]:
    """Return the names of the runs that the base replaces.

    For `true`, these are the runs that some merge.language names.
    """
    if requested is True:
        named: list[str] = []
        for run in table.runs.values():
            for item in items_of(run, "merge.language"):
                named += runs_named(table, item)
        if not named:
            raise table.refuse(
                "controls",
                "no merge.language says which runs are language experts. Name them, [RUN].",
            )
        return list(dict.fromkeys(named))
    names = list(map(str, as_list(requested)))
    for name in names:
        if name not in table.runs:
            raise table.refuse(
                "controls", f"{name!r} is not a run. Give true, or {suggest(name, table.runs)}"
            )
    return names


def items_of(run: TableRun, key: str) -> tuple[Reference | str, ...]:
    names = run.words.get(key)
    if isinstance(names, Names):
        return names.items
    return ()


def runs_named(table: Table, item: Reference | str) -> list[str]:
    """Return the runs of the table that a word may name, at any value of the axes in its braces."""
    text = item.run if isinstance(item, Reference) else item
    pattern = name_pattern(text)
    return [name for name in table.runs if re.fullmatch(pattern, name)]


def name_pattern(text: str) -> str:
    return ".*".join(re.escape(part) for part in re.split(r"\{.*?\}", text))


def controlled_roles(table: Table, run: TableRun, experts: list[str]) -> list[str]:
    """Return the roles of `experts` in a merge: language, or their places in merge.experts."""
    if run.stage != "merge":
        return []
    for item in items_of(run, "merge.language"):
        if not set(experts).isdisjoint(runs_named(table, item)):
            return ["language"]
    items = items_of(run, "merge.experts")
    roles = []
    for index, item in enumerate(items):
        if not set(experts).isdisjoint(runs_named(table, item)):
            roles.append(str(index))
    if len(roles) < len(items):
        return roles
    return []


def sides_with_controls(sides: list[Side], controlled: Collection[str]) -> Iterator[Side]:
    """Yield rows or columns, with a control after each that shows a controlled run."""
    for side in sides:
        yield side
        run = str(side.words.get("run"))
        if any(re.fullmatch(name_pattern(run), name) for name in controlled):
            name = side.name + SUFFIX
            words = {**side.words, "run": run + SUFFIX, "published": None}
            yield replace(side, name=name, words=words, control_of=side.name, best_of=run)


def columns_with_controls(listed: Iterable[str], with_control: Iterable[str]) -> Iterator[str]:
    """Yield the columns that a row lists, with their controls."""
    for name in listed:
        yield name
        for column in with_control:
            if re.fullmatch(name_pattern(column), name):
                yield name + SUFFIX
                break
