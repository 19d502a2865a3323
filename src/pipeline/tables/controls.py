"""Controls of a table's merges: each merge again, with the base in the language expert's place.

`merge.control` (config/merging.py) defines the control of one merge. A merge minus its control is what the language
expert contributes; without it, half of a math vector passes for cross-lingual transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.errors import suggest
from pipeline.tables.schema import PLACEHOLDER, Names, Reference, Side, Table, TableRun

SUFFIX = ", control"


def add_controls(table: Table) -> Table:
    """The table with a control after each row or column that shows a merge of a language expert.

    Raises:
        PipelineError: an unknown run, or no merge of them.
    """
    if not table.controls:
        return table
    experts = language_experts(table, table.controls)
    controlled = {name: roles for name, run in table.runs.items() if (roles := controlled_roles(run, experts))}
    if not controlled:
        raise table.refuse("controls", f"no merge is made of {', '.join(experts)}: leave controls out")
    runs = dict(table.runs)
    for name, roles in controlled.items():
        words = {**table.runs[name].words, "merge.control": roles}
        runs[name + SUFFIX] = TableRun(name + SUFFIX, table.runs[name].kind, words)
    rows, columns = ([*sides_with_controls(sides, controlled)] for sides in (table.rows, table.columns))
    return replace(table, runs=runs, rows=rows, columns=columns)


def language_experts(table: Table, requested: Any) -> list[str]:
    """The names of the runs whose place the base takes: of `true`, those that some merge.language names."""
    if requested is True:
        named = [reference.run for run in table.runs.values() for reference in references(run, "merge.language")]
        if not named:
            raise table.refuse("controls", "no merge.language says which runs are language experts: name them, [RUN]")
        return list(dict.fromkeys(named))
    names = requested if isinstance(requested, list) else [requested]
    for name in names:
        if name not in table.runs:
            raise table.refuse("controls", f"{name!r} is not a run: give true, or {suggest(str(name), table.runs)}")
    return names


def references(run: TableRun, key: str) -> list[Reference]:
    names = run.words.get(key)
    return [item for item in names.items if isinstance(item, Reference)] if isinstance(names, Names) else []


def controlled_roles(run: TableRun, experts: list[str]) -> list[str]:
    """The roles in a merge of the runs `experts`: language, or their places in merge.experts."""
    if run.kind != "merge":
        return []
    if any(reference.run in experts for reference in references(run, "merge.language")):
        return ["language"]
    names = run.words.get("merge.experts")
    items = names.items if isinstance(names, Names) else ()
    roles = [str(index) for index, item in enumerate(items) if isinstance(item, Reference) and item.run in experts]
    return roles if len(roles) < len(items) else []


def sides_with_controls(sides: list[Side], controlled: dict[str, list[str]]) -> Iterator[Side]:
    """Rows or columns, each that shows a controlled run with its control after it."""
    for side in sides:
        yield side
        run = str(side.words.get("run"))
        pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(run)) if PLACEHOLDER.search(run) else re.escape(run)
        if any(re.fullmatch(pattern, name) for name in controlled):
            words = {**side.words, "run": run + SUFFIX, "published": None}
            yield replace(side, name=side.name + SUFFIX, words=words, control_of=side.name, best_of=run)
