"""Read the YAML of a table strictly (tables/schema.py has the format).

This module composes no option and opens no file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import suggest
from pipeline.tables.schema import (
    CELL,
    CONSENT,
    ELSEWHERE,
    MEMBERS,
    NAME,
    REDUCE,
    TRAININGS,
    Names,
    Reference,
    Side,
    Table,
    TableRun,
    reference_to,
)
from pipeline.tables.subsets import draw_subsets, is_drawn
from pipeline.tables.table_yaml import (
    RUN_KEYS,
    SECTIONS,
    Find,
    dotted,
    merge_inherited,
)
from pipeline.tables.words import Axes, Words, as_list, as_mapping, table_error


def read_table(text: str, file: str, find: Find, every: Words) -> Table:
    """Read a table from its text.

    Args:
        text: The table's YAML.
        file: The name of its file, for errors.
        find: Finds the tables that `defaults` names.
        every: Overrides the table's `every` (every.KEY=VALUE of the command line).

    Raises:
        PipelineError: For an error in the format. Names file and row.
    """
    raw = merge_inherited(text, file, find, ())
    every = dotted(every, file, "every")
    for key in ("name", "runs", "columns"):
        if not raw.get(key):
            raise table_error(
                file, "", f"{key} is missing: a table has at least name, runs and columns"
            )
    if not re.fullmatch(NAME, str(raw["name"])):
        raise table_error(
            file,
            "",
            f"name={raw['name']} is not the name of a folder. Use letters, digits, spaces and"
            " _.+=@-.",
        )
    for key in SECTIONS:
        raw[key] = as_mapping(file, key, raw.get(key))
    refuse_consent(raw, file)
    settings = {**raw["every"], **every}
    pooled: Axes = ()
    if isinstance(settings.get("seed"), list):
        pooled = add_seeds(raw, settings.pop("seed"), file)
    table = Reader(file, raw).build_table(settings)
    return replace(table, pooled=pooled)


def refuse_consent(raw: Words, file: str) -> None:
    """Raise PipelineError for a key that lets code run.

    Only the command line may set it, because a table may come from another person.
    """
    entries = [raw["every"], raw["score"]]
    for section in ("runs", "columns", "rows"):
        entries += raw[section].values()
    for values in raw["axes"].values():
        if isinstance(values, dict):
            entries += values.values()
    for words in entries:
        if not isinstance(words, dict):
            continue
        for key in words:
            if str(key).lstrip("+") in CONSENT:
                raise table_error(
                    file,
                    "",
                    f"{key} lets code run, which no table may. Give every.{key}=VALUE in the"
                    " command.",
                )


def add_seeds(raw: Words, seeds: list[Any], file: str) -> Axes:
    """Make the list of seeds in `every` an axis of all trainings without a seed, in place.

    Returns the name of the axis.
    """
    is_used = False
    for run in raw["runs"].values():
        if isinstance(run, dict) and run.get("stage") in TRAININGS:
            run.setdefault("seed", "{seed}")
            is_used |= run["seed"] == "{seed}"
    if not is_used:
        raise table_error(file, "every", f"seed={seeds}: no training needs a seed. Leave it out.")
    raw["axes"]["seed"] = seeds
    return ("seed",)


# --- words ---


class Reader:
    """Reads the words of one table, checked against its axes and the names of its runs."""

    def __init__(self, file: str, raw: Words) -> None:
        self.file, self.raw = file, raw
        self.refuse = partial(table_error, file)
        self.names = list(raw["runs"])
        self.axes: dict[str, dict[Any, Words]] = {}
        for name, values in raw["axes"].items():
            self.axes[name] = self.read_axis(name, values)

    def build_table(self, every: Words) -> Table:
        raw = self.raw
        free_snapshots = raw.get("free_snapshots", False)
        if free_snapshots not in (True, False):
            raise self.refuse("", f"free_snapshots={free_snapshots}: give true or false.")
        name = str(raw["name"])
        every = self.read_words("every", every)
        runs = {run: self.read_run(run, words) for run, words in raw["runs"].items()}
        score = self.read_side("score", "", raw["score"])
        columns = self.read_sides("column", raw["columns"])
        rows = self.read_sides("row", raw["rows"] or {"all": {}})
        compare = []
        for left, rights in raw["compare"].items():
            for right in as_list(rights):
                compare.append((str(left), str(right)))
        return Table(
            file=self.file,
            name=name,
            title=str(raw.get("title") or name),
            note=str(raw.get("note") or ""),
            published=raw.get("published"),
            axes=self.axes,
            every=every,
            runs=runs,
            score=score,
            columns=columns,
            rows=rows,
            beside=self.axes_in("", "beside", raw.get("beside") or []),
            compare=compare,
            free_snapshots=free_snapshots,
            controls=raw.get("controls", False),
            primary=self.names_in("primary"),
            family=self.names_in("family"),
            baselines=as_mapping(self.file, "baselines", raw.get("baselines")),
        )

    def read_sides(self, kind: str, words_by_name: Words) -> list[Side]:
        sides = []
        for name, words in words_by_name.items():
            sides.append(self.read_side(f"{kind} {name!r}", name, words))
        return sides

    def names_in(self, key: str) -> tuple[str, ...]:
        """Return the names under a key, as text."""
        return tuple(map(str, as_list(self.raw.get(key) or [])))

    def read_values(self, where: str, example: str, values: Any) -> list[Any]:
        """Read a list of names or numbers.

        Raises:
            PipelineError: For an empty list, other values, or a repeated value.
        """
        listed = []
        if isinstance(values, list | dict):
            listed = list(values)
        if not listed:
            raise self.refuse(where, f"it has no values. Give {example}.")
        for value in listed:
            if isinstance(value, list | dict) or value is None:
                raise self.refuse(where, f"{value!r} is no value. Give names or numbers.")
        if len(set(map(str, listed))) < len(listed):
            raise self.refuse(where, "a value is there twice")
        return listed

    def read_axis(self, name: str, values: Any) -> dict[Any, Words]:
        """Return value -> its words; a list has values without words."""
        where = f"axis {name!r}"
        if name in CELL or name in ("all", "over") or "." in name:
            raise self.refuse(where, f"{name} is a reserved word. Call the axis otherwise.")
        if is_drawn(values):
            drawn = draw_subsets(values, partial(self.refuse, where))
            return {label: {MEMBERS: members} for label, members in drawn.items()}
        listed = self.read_values(where, f"{name}: [...]", values)
        if not isinstance(values, dict):
            return {value: {} for value in listed}
        for value, words in values.items():
            if not isinstance(words, dict):
                raise self.refuse(where, f"{value} holds {words!r}. Give {value}: {{word: value}}.")
        return dict(values)

    def axes_in(self, where: str, key: str, value: Any) -> Axes:
        names = as_list(value)
        for name in names:
            if not isinstance(name, str) or name not in self.axes:
                known = suggest(name, self.axes)
                raise self.refuse(where, f"{key} names {name!r}, which is no axis: {known}")
        return tuple(names)

    def value_of(self, where: str, name: str, value: Any) -> Any:
        """Return a value of an axis.

        Raises:
            PipelineError: For an unknown axis or value.
        """
        if name not in self.axes:
            known = suggest(name, [*self.axes, *CELL])
            raise self.refuse(where, f"unknown word {name}: {known}")
        if isinstance(value, list | dict) or value not in self.axes[name]:
            known = suggest(value, self.axes[name])
            raise self.refuse(where, f"{name}={value} is no value of that axis: {known}")
        return value

    # --- runs ---

    def read_run(self, name: str, value: Any) -> TableRun:
        where = f"run {name!r}"
        spec = self.read_words(where, as_mapping(self.file, where, value))
        checkpoint = spec.get("checkpoint")
        if "stage" in spec:
            return TableRun(name, "stage", spec)
        if "merge" in spec and "checkpoint" not in spec:
            return TableRun(name, "merge", spec)
        if checkpoint and not checkpoint.is_list and spec.keys() <= {"checkpoint", "eval.base"}:
            return TableRun(name, "checkpoint", spec)
        if not spec:
            return TableRun(name, "base", spec)
        raise self.refuse(
            "",
            f"{where} is neither a stage, a merge, a checkpoint nor empty. Give stage=, merge= or"
            " checkpoint=, or leave it empty for the model of every.",
        )

    def read_words(self, where: str, spec: Words) -> Words:
        for key, value in spec.items():
            if isinstance(value, dict) and list(value.values()) == [None]:
                (name,) = value
                raise self.refuse(where, f'{key}: {{{name}}} needs quotes, "{{{name}}}"')
        words = {}
        for key, value in spec.items():
            if key in RUN_KEYS and value is not None:
                value = self.run_names(where, key, value)
            words[key] = value
        return words

    def run_names(self, where: str, key: str, value: Any) -> Names:
        several = isinstance(value, list) or (isinstance(value, dict) and "all" in value)
        references = [self.read_reference(where, key, item) for item in as_list(value)]
        return Names(tuple(references), several)

    def read_reference(self, where: str, key: str, value: Any) -> Reference | str:
        spec = value if isinstance(value, dict) else {"run": value}
        name = spec.get("run", spec.get("all"))
        is_all = "all" in spec
        has_form = ("run" in spec) != is_all and ("over" in spec) == is_all
        if not isinstance(name, str) or not has_form:
            forms = "a name, {run: NAME, AXIS: VALUE} or {all: NAME, over: [AXES]}"
            raise self.refuse(where, f"{key}: {value!r} names no run. Give {forms}.")
        fixed = []
        for axis, part in spec.items():
            if axis not in ("run", "all", "over"):
                fixed.append((axis, self.value_of(where, axis, part)))
        at = tuple(fixed)
        if name in self.names:
            over = self.axes_in(where, f"{key}.over", spec.get("over") or [])
            return Reference(name, at, over)
        snapshot = reference_to(name, self.names)
        if snapshot and not is_all:
            return replace(snapshot, at=at)
        is_plain = not is_all and not at
        if is_plain and ("{" in name or is_elsewhere(key, name)):
            return name  # tables/run_specs.py fills placeholders at each value of their axes
        known = suggest(name, self.names)
        problem = f"{key} names {name!r}, which is no run of this table: {known}"
        if key in ("data_root", "checkpoint", "model.path"):
            problem += f" (a folder is written ./{name})"
        raise self.refuse(where, problem)

    # --- rows and columns ---

    def read_side(self, where: str, name: str, value: Any) -> Side:
        """Read the words of a row, a column, or of all cells; a plain name is a run."""
        if isinstance(value, str):
            value = {"run": value}
        spec = self.read_words(where, as_mapping(self.file, where, value))
        side = Side(str(name))
        for key, part in spec.items():
            if key in REDUCE:
                axes = self.read_values(f"{where}, {key}", "axes", as_list(part))
                side.reduce.append((key, tuple(map(str, axes))))
            elif key in ("best", "each"):
                setattr(side, key, self.axes_in(where, key, part))
            elif key == "by":
                side.by = self.read_side(f"{where}, by", "", part)
            elif key == "columns":
                side.columns = tuple(map(str, as_list(part)))
            elif key in CELL or str(key).startswith("eval."):
                side.words[key] = part
            else:
                side.at[key] = self.value_of(where, key, part)
            if key == "in" and any(isinstance(code, bool) for code in as_list(part)):
                raise self.refuse(where, 'in: no is false in YAML. Write Norwegian as in: "no".')
        for key in ("each", "by"):
            if getattr(side, key) and not side.best:
                raise self.refuse(
                    where, f"{key} is about what best chooses. Give best=[...] with it."
                )
        if side.by and (side.by.reduce or side.by.best or "run" in side.by.words):
            raise self.refuse(
                f"{where}, by", "it says what is scored. Leave run, mean, max, min and best out."
            )
        return side


def is_elsewhere(key: str, name: str) -> bool:
    """Return True if the text of a RUN key names an external model or folder."""
    if key == "data_root" and Path(name).is_dir():
        return True
    return (key, name) == ("data.benchmarks", "none") or bool(ELSEWHERE.search(name))
