"""The format of a table: YAML is read into a Table, strictly.

    axes       name -> values. A value may have words, used as {way.sft}:
               way: {full: {sft: full}, lora: {sft: lora}}.
               subset: {of: [RUN, ...], size: [2, 3], draws: 10, seed: 0} draws subsets of runs
               (tables/subsets.py); merge.experts: "{subset}" is the list of its members
    every      words for each run and each evaluation whose stage reads them. A list of seeds is an
               axis of the trainings without a seed, and each cell is the mean over it
    runs       name -> words. One run for each value of the axes of the run and of its inputs
    score      words for every cell: eval, in, and all words that a row or a column may have
    columns,   name -> words. A cell has the words of both; the row's word has priority. Names may
    rows       have {axis}
    beside     axes with values that are shown next to the best one: all are scored
    compare    column -> columns (or row -> rows) that it is compared with
    primary    [LEFT, RIGHT, PLACE]: the comparison that is reported first and weighs as much as all
               others together. Not inherited
    family     [PLACE, ...]: the columns (or rows) whose comparisons are tested, with Holm's
               correction. Other comparisons are exploratory, with intervals and without a verdict.
               Without `family` all are tested
    baselines  {NAME: SIGN, ...}: a cell that is significantly better than this column (or row) has
               the sign, such as †
    controls   true, or the runs of language experts: each of their merges is compared with the same
               merge with the base in their place (tables/controls.py)
    defaults   tables that this one starts from. Their axes, every and runs are merged entry by
               entry (null removes an entry), other keys as a whole

A file with `experts` or `benchmarks` is a study (tables/study.py), which is written out as a table.

A run has `stage` (one that makes a run), or `merge` (scored live, never written), or `checkpoint`
(an external model), or nothing: the model of `every`, unmodified. A key that takes a RUN takes the
name of a run of the table, {run: NAME, AXIS: VALUE}, {all: NAME, over: [AXES]}, or a list of these.
A name may have placeholders: "{pair.math}", "math@{step}".

The words of a cell:

    run                   null: the cell is empty
    AXIS                  a value of the axis
    eval, task            task: of a bundle
    in                    a language, or several languages, whose scores are averaged
    eval.KEY
    data_root             the data_root of the items, if it differs from that of `every`
    where_possible        missing data is allowed
    metric, pair          pair: of FLORES
    fact                  a number that a training recorded; of an analysis,
                          rows_changed.COLUMNS.LAYERS
    published             TABLE, or TABLE ROW COLUMN
    mean, max, min        axes, in the order of the reduction, or rows
    best                  axes to choose from, by the largest mean over all pooled axes
    each                  axes: a choice for each of their values
    by                    scores to choose with; otherwise the table's score
    columns               of a row: the only columns with cells

If row and column give an axis different values, or the run is null, the place is empty.

This module composes no option and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.tables.subsets import draw_subsets, is_drawn
from pipeline.tables.table_yaml import (
    RUN_KEYS,
    SECTIONS,
    Find,
    dotted,
    merge_inherited,
)
from pipeline.tables.words import Axes, Words, as_list, as_mapping, table_error

REDUCE = ("mean", "max", "min")
MEMBERS = "members"  # the word of a drawn axis, with the runs of a subset
CELL = (
    "run",
    "eval",
    "task",
    "in",
    "where_possible",
    "metric",
    "pair",
    "fact",
    "published",
    "data_root",
    *REDUCE,
    "best",
    "each",
    "by",
    "columns",
)
NAME = r"[\w+=@][\w .+=@-]{0,250}"  # a table's name, which is used for folders and files
PLACEHOLDER = re.compile(r"\{(\w[^{}.]*)(?:\.([^{}]+))?\}")
CONSENT = ("eval.run_code", "merge.mergekit_python")
TRAININGS = ("sft", "cpt")  # stages that train a model
ELSEWHERE = re.compile(r"[./:]|-[0-9a-f]{4,}(@\d+)?$")  # a path, hub:, an exact name


@dataclass(frozen=True)
class Reference:
    """A run of the table, as a RUN key names it.

    Attributes:
        at: Fixed values of axes.
        over: Axes with all their values.
        step: A snapshot.
    """

    run: str
    at: tuple[tuple[str, Any], ...] = ()
    over: Axes = ()
    step: int | None = None


@dataclass(frozen=True)
class Names:
    """The value of a RUN key.

    Attributes:
        items: References, or text for an external model.
        is_list: True if it was written as a list.
    """

    items: tuple[Reference | str, ...]
    is_list: bool

    def __str__(self) -> str:
        names = []
        for item in self.items:
            names.append(item.run if isinstance(item, Reference) else item)
        return ", ".join(names)


def reference_to(name: str, runs: Collection[str]) -> Reference | None:
    """Return the run that a text names as NAME or NAME@STEP.

    None if it names no run of the table.
    """
    if name in runs:
        return Reference(name)
    stem, _, step = name.rpartition("@")
    if stem in runs and step.isdigit():
        return Reference(stem, step=int(step))
    return None


@dataclass
class TableRun:
    """One entry of `runs`.

    Attributes:
        kind: stage, merge, checkpoint or base (an empty entry).
        words: RUN keys have Names.
    """

    name: str
    kind: str
    words: Words

    @property
    def stage(self) -> str:
        """The stage whose keys of `every` it reads."""
        if self.kind == "stage":
            return str(self.words["stage"])
        return self.kind


@dataclass
class Side:
    """A row, a column, or the words that all cells share.

    Attributes:
        words: run, eval, task, in, metric, pair, fact, published, eval.KEY.
        at: axis -> its value.
        columns: Of a row: the only columns with cells; empty for all.
        control_of: Of a control: the row or column of the controlled merge.
        best_of: Of a control: the run that chooses the best value.
    """

    name: str
    words: Words = field(default_factory=dict)
    at: Words = field(default_factory=dict)
    reduce: list[tuple[str, Axes]] = field(default_factory=list)
    best: Axes = ()
    each: Axes = ()
    by: Side | None = None
    columns: tuple[str, ...] = ()
    control_of: str = ""
    best_of: str = ""


@dataclass
class Table:
    """A table, as its YAML defines it.

    Attributes:
        axes: axis -> value -> its words; a drawn axis has the word MEMBERS.
        controls: As written: true, or names of runs.
        baselines: name -> sign.
        pooled: Axes over which each cell is a mean, unless the cell reduces them.
    """

    file: str
    name: str
    title: str
    note: str
    published: str | None
    axes: dict[str, dict[Any, Words]]
    every: Words
    runs: dict[str, TableRun]
    score: Side
    columns: list[Side]
    rows: list[Side]
    beside: Axes
    compare: list[tuple[str, str]]
    free_snapshots: bool
    controls: Any = False
    primary: tuple[str, ...] = ()
    family: tuple[str, ...] = ()
    baselines: Words = field(default_factory=dict)
    pooled: Axes = ()

    def refuse(self, where: str, problem: str) -> PipelineError:
        return table_error(self.file, where, problem)


# --- text ---


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
