"""Controls of a table's merges: each merge again, with the base in the language expert's place.

`merge.control` (config/merging.py) defines the control of one merge. A merge minus its control is
what the language expert contributes; without it, half of a math vector passes for cross-lingual
transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.errors import suggest
from pipeline.tables.schema import Names, Reference, Side, Table, TableRun
from pipeline.tables.words import as_list

SUFFIX = ", control"


def add_controls(table: Table) -> Table:
    """Return the table with a control after each row or column that shows a merge of a language
    expert.

    Raises: PipelineError: an unknown run, or no merge of them.
    """
    if not table.controls:
        return table
    experts = language_experts(table, table.controls)
    controlled = {}
    for name, run in table.runs.items():
        roles = controlled_roles(table, run, experts)
        if roles:
            controlled[name] = roles
    if not controlled:
        raise table.refuse(
            "controls", f"no merge is made of {', '.join(experts)}: leave controls out"
        )
    runs = dict(table.runs)
    for name, roles in controlled.items():
        settings = {**table.runs[name].words, "merge.control": roles}
        runs[name + SUFFIX] = TableRun(name + SUFFIX, table.runs[name].kind, settings)
    rows, columns = (
        [*sides_with_controls(sides, controlled)] for sides in (table.rows, table.columns)
    )
    with_control = []
    for side in columns:
        if side.control_of:
            with_control.append(side.control_of)
    rows = [
        replace(row, columns=tuple(columns_with_controls(row.columns, with_control)))
        for row in rows
    ]
    return replace(table, runs=runs, rows=rows, columns=columns)


def language_experts(table: Table, requested: Any) -> list[str]:
    """Return the names of the runs whose place the base takes: for `true`, those that some
    merge.language names.
    """
    if requested is True:
        naming = []
        for run in table.runs.values():
            for item in items_of(run, "merge.language"):
                for name in runs_named(table, item):
                    naming.append(name)
        if not naming:
            raise table.refuse(
                "controls",
                "no merge.language says which runs are language experts: name them, [RUN]",
            )
        return list(dict.fromkeys(naming))
    names = list(map(str, as_list(requested)))
    for name in names:
        if name not in table.runs:
            raise table.refuse(
                "controls", f"{name!r} is not a run: give true, or {suggest(name, table.runs)}"
            )
    return names


def items_of(run: TableRun, key: str) -> tuple[Reference | str, ...]:
    names = run.words.get(key)
    if isinstance(names, Names):
        return names.items
    return ()


def runs_named(table: Table, item: Reference | str) -> list[str]:
    """Return the runs of the table that a word may name, whatever the values of the axes in its
    braces.
    """
    pattern = name_pattern(item.run if isinstance(item, Reference) else item)
    found = []
    for name in table.runs:
        if re.fullmatch(pattern, name):
            found.append(name)
    return found


def name_pattern(text: str) -> str:
    return ".*".join(re.escape(part) for part in re.split(r"\{.*?\}", text))


def controlled_roles(table: Table, run: TableRun, experts: list[str]) -> list[str]:
    """Return the roles in a merge of the runs `experts`: language, or their places in
    merge.experts.
    """
    if run.stage != "merge":
        return []

    def is_controlled(item: Reference | str) -> bool:
        return not set(experts).isdisjoint(runs_named(table, item))

    if any(map(is_controlled, items_of(run, "merge.language"))):
        return ["language"]
    items = items_of(run, "merge.experts")
    roles = [str(index) for index, item in enumerate(items) if is_controlled(item)]
    if len(roles) < len(items):
        return roles
    return []


def sides_with_controls(sides: list[Side], controlled: dict[str, list[str]]) -> Iterator[Side]:
    """Rows or columns, each that shows a controlled run with its control after it."""
    for side in sides:
        yield side
        run = str(side.words.get("run"))
        if any(re.fullmatch(name_pattern(run), name) for name in controlled):
            settings = {**side.words, "run": run + SUFFIX, "published": None}
            yield replace(
                side, name=side.name + SUFFIX, words=settings, control_of=side.name, best_of=run
            )


def columns_with_controls(listed: Iterable[str], with_control: Iterable[str]) -> Iterator[str]:
    """Return the columns that a row lists, and the control of each that has one."""
    for name in listed:
        yield name
        if any(
            name == column or re.fullmatch(name_pattern(column), name) for column in with_control
        ):
            yield name + SUFFIX
