"""The format of a table: YAML read into a Table, strictly, in the table's own words.

    axes     name -> values; a value may hold words: way: {full: {sft: full}, lora: {sft: lora}},
    used as {way.sft}.
             subset: {of: [RUN, ...], size: [2, 3], draws: 10, seed: 0} draws subsets of runs
             (tables/subsets.py); merge.experts: "{subset}" is the list of its members
    every    words for each run, and each evaluation, whose stage reads them; a list of seeds is an
    axis of the
             trainings that set none, and each cell is the mean over it
    runs     name -> words; one run for each value of the axes it names, itself or through the runs
    it is made of score    what is said of every cell: eval, in, and anything that a row or a column
    may say columns, rows  name -> words; a cell is both together, the row's word before the
    column's. Names may hold {axis} beside   axes whose values stand beside the best of them: all
    are scored wherever the best one is compare  column -> columns (or row -> rows) that it is held
    against primary  [LEFT, RIGHT, PLACE]: the comparison that is reported first and weighs as much
    as all others together; each
             table names its own
    family   [PLACE, ...]: the columns (or rows) whose comparisons are tested, with Holm's
    correction; all others are
             exploratory, with intervals and without a verdict. Without it all are tested
    baselines {NAME: SIGN, ...}: a cell that is significantly better than this column (or row) has
    the sign, such as † controls true, or the runs of language experts: each merge of them again
    with the base in their place, compared
             with the merge (tables/controls.py)
    defaults tables that this one starts from: their axes, every and runs entry by entry (null takes
    one away), the rest
             whole

A file with `experts` or `benchmarks` is a study (tables/study.py), which is written out as a table.

A run has `stage` (one that makes a run), or `merge` (scored live, never written), or `checkpoint`
(a model made elsewhere), or nothing: the model of `every`, unmodified. A key that takes a RUN takes
the name of a run of the table, {run: NAME, AXIS: VALUE}, {all: NAME, over: [AXES]}, or a list of
these. A name may hold placeholders: "{pair.math}", "math@{step}".

A cell says: run (null: there is none); the value of an axis; eval, task (of a bundle), in (a
language, or several that are averaged), eval.KEY, data_root (the items, where they are not in that
of `every`), where_possible (missing where its data is, not refused); metric, pair (of FLORES), fact
(a number that a training recorded, or of an analysis rows_changed.COLUMNS.LAYERS); published
(TABLE, or TABLE ROW COLUMN); mean, max, min (axes, in the order they are reduced, or rows); best
(axes to choose from, by the largest mean over all that is pooled), each (axes: a choice for each of
their values), by (scores to choose with, else the table's score). A row may also name the only
columns that it fills. If row and column give an axis different values, or the run is null, the
place is empty.

Nothing here composes an option or opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.stages import HARDWARE
from pipeline.errors import PipelineError, suggest
from pipeline.tables.subsets import draw_subsets, is_drawn
from pipeline.tables.table_yaml import (
    RUN_KEYS,
    SECTIONS,
    Find,
    dotted,
    merge_inherited,
    parsed_yaml,
)
from pipeline.tables.words import Axes, Words, as_list, as_mapping, table_error

REDUCE = ("mean", "max", "min")
MEMBERS = "members"  # the word of a drawn axis: the runs of a subset
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
NAME = r"[\w+=@][\w .+=@-]{0,250}"  # of a table, which names folders and files
PLACEHOLDER = re.compile(r"\{(\w[^{}.]*)(?:\.([^{}]+))?\}")
CONSENT = ("eval.run_code", "merge.mergekit_python")
TRAININGS = ("sft", "cpt")  # stages that train a model
ELSEWHERE = re.compile(r"[./:]|-[0-9a-f]{4,}(@\d+)?$")  # a path, hub:, an exact name


@dataclass(frozen=True)
class Reference:
    """A run of the table as a RUN key names it: `at` fixes axes, `over` lists all values of some,
    `step` a snapshot.
    """

    run: str
    at: tuple[tuple[str, Any], ...] = ()
    over: Axes = ()
    step: int | None = None


@dataclass(frozen=True)
class Names:
    """The value of a RUN key: references, or text for an external model; `is_list`: it was written
    as a list.
    """

    items: tuple[Reference | str, ...]
    is_list: bool

    def __str__(self) -> str:
        return ", ".join(item if isinstance(item, str) else item.run for item in self.items)


def reference_to(name: str, runs: Collection[str]) -> Reference | None:
    """Return the run that a text names, as NAME or NAME@STEP; None if it names no run of the
    table.
    """
    if name in runs:
        return Reference(name)
    stem, _, step = name.rpartition("@")
    if stem in runs and step.isdigit():
        return Reference(stem, step=int(step))
    return None


@dataclass
class TableRun:
    """One entry of `runs`. kind: stage, merge, checkpoint or base (an empty one)."""

    name: str
    kind: str
    words: Words  # RUN keys hold Names

    @property
    def stage(self) -> str:
        """Whose keys of `every` it reads."""
        if self.kind == "stage":
            return str(self.words["stage"])
        return self.kind


@dataclass
class Side:
    """A row, a column, or what all cells share."""

    name: str
    words: Words = field(
        default_factory=dict
    )  # run, eval, task, in, metric, pair, fact, published, eval.KEY
    at: Words = field(default_factory=dict)  # axis -> its value
    reduce: list[tuple[str, Axes]] = field(default_factory=list)
    best: Axes = ()
    each: Axes = ()
    by: Side | None = None
    columns: tuple[str, ...] = ()  # of a row: the only columns it fills; none: all
    control_of: str = ""  # of a control: the row or column whose merge it controls,
    best_of: str = ""  # and the run whose best value is taken


@dataclass
class Table:
    file: str
    name: str
    title: str
    note: str
    published: str | None
    axes: dict[
        str, dict[Any, Words]
    ]  # axis -> value -> its words; of a drawn axis the words are MEMBERS
    every: Words
    runs: dict[str, TableRun]
    score: Side
    columns: list[Side]
    rows: list[Side]
    beside: Axes
    compare: list[tuple[str, str]]
    free_snapshots: bool
    controls: Any = False  # as written: true, or names of runs
    primary: tuple[str, ...] = ()
    family: tuple[str, ...] = ()
    baselines: Words = field(default_factory=dict)  # name -> sign
    pooled: Axes = ()  # axes that each cell is the mean of where it says nothing else
    inherited: frozenset[str] = (
        frozenset()
    )  # axes, keys of `every`, `published`: of `defaults` alone

    def refuse(self, where: str, problem: str) -> PipelineError:
        return table_error(self.file, where, problem)


# --- text ---


def read_table(text: str, file: str, find: Find, every: Words) -> Table:
    """Read a table from its text.

    Args: file: how errors call it. find: gives the tables that `defaults` name. every: added to the
    table's own (every.KEY=VALUE of the command line).

    Raises: PipelineError: anything that is not in the format, naming file and row.
    """
    raw, every = merge_inherited(text, file, find, ()), dotted(every, file, "every")
    for key in ("name", "runs", "columns"):
        if not raw.get(key):
            raise table_error(
                file, "", f"{key} is missing: a table has at least name, runs and columns"
            )
    if not re.fullmatch(NAME, str(raw["name"])):
        raise table_error(
            file,
            "",
            f"name={raw['name']} is not the name of a folder: use letters, digits, spaces and"
            " _.+=@-",
        )
    raw |= {key: as_mapping(file, key, raw.get(key)) for key in SECTIONS}
    refuse_consent(raw, file)
    settings = {**raw["every"], **every}
    pooled = (
        add_seeds(raw, settings.pop("seed"), file) if isinstance(settings.get("seed"), list) else ()
    )
    table = replace(Reader(file, raw).build_table(settings), pooled=pooled)
    written = parsed_yaml(text, file)
    own_keys = set()
    for key in ("axes", "every"):
        for name in as_mapping(file, key, written.get(key)):
            own_keys.add(name)
    shared = {*table.axes, *table.every} - own_keys - {*every} | {"published"} - written.keys()
    # a machine is also of the plan and the jobs of a table without trainings
    return replace(table, inherited=frozenset({*shared, HARDWARE}))


def refuse_consent(raw: Words, file: str) -> None:
    """Raise PipelineError for a key that lets code run: only the command line may give it, as a
    table may be another person's.
    """
    entries = []
    for section in ("runs", "columns", "rows"):
        for entry in raw[section].values():
            entries.append(entry)
    axes = []
    for values in raw["axes"].values():
        if isinstance(values, dict):
            for words in values.values():
                axes.append(words)
    for words in [raw["every"], raw["score"], *entries, *axes]:
        for key in words if isinstance(words, dict) else ():
            if str(key).lstrip("+") in CONSENT:
                raise table_error(
                    file,
                    "",
                    f"{key} lets code run, which no table may: give every.{key}=VALUE in the"
                    " command",
                )


def add_seeds(raw: Words, seeds: list[Any], file: str) -> Axes:
    """Make `every`'s list of seeds the axis `seed` of all trainings that set no seed, in place;
    gives its name.
    """
    trainings = []
    for run in raw["runs"].values():
        if isinstance(run, dict) and run.get("stage") in TRAININGS:
            trainings.append(run)
    for run in trainings:
        run.setdefault("seed", "{seed}")
    if not any(run["seed"] == "{seed}" for run in trainings):
        raise table_error(
            file,
            "every",
            f"seed={seeds}: no training is left without a seed of its own: leave it out",
        )
    raw["axes"]["seed"] = seeds
    return ("seed",)


# --- words ---


class Reader:
    """Reads the words of one table, checked against its axes and the names of its runs."""

    def __init__(self, file: str, raw: Words) -> None:
        self.file, self.raw, self.refuse = file, raw, partial(table_error, file)
        self.names = list(raw["runs"])
        self.axes = {name: self.read_axis(name, values) for name, values in raw["axes"].items()}

    def build_table(self, every: Words) -> Table:
        raw = self.raw
        free_snapshots = raw.get("free_snapshots", False)
        if free_snapshots not in (True, False):
            raise self.refuse("", f"free_snapshots={free_snapshots}: give true or false")
        name = str(raw["name"])
        every = self.read_words("every", every)
        runs = {run: self.read_run(run, value) for run, value in raw["runs"].items()}
        score = self.read_side("score", "", raw["score"])
        columns = [
            self.read_side(f"column {column!r}", column, words)
            for column, words in raw["columns"].items()
        ]
        listed = raw["rows"] or {"all": {}}
        rows = [self.read_side(f"row {row!r}", row, words) for row, words in listed.items()]
        compare = []
        for left, rights in raw["compare"].items():
            compare += [(str(left), str(right)) for right in as_list(rights)]
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

    def names_in(self, key: str) -> tuple[str, ...]:
        """Return the names under a key, as text."""
        return tuple(str(name) for name in as_list(self.raw.get(key) or []))

    def read_values(self, where: str, example: str, values: Any) -> list[Any]:
        """Read a list of names or numbers.

        Raises: PipelineError: an empty list, other values, or a repeated one.
        """
        listed = []
        if isinstance(values, list | dict):
            listed = list(values)
        if not listed:
            raise self.refuse(where, f"it has no values: give {example}")
        for value in listed:
            if isinstance(value, list | dict) or value is None:
                raise self.refuse(where, f"{value!r} is no value: give names or numbers")
        if len(set(map(str, listed))) < len(listed):
            raise self.refuse(where, "a value is there twice")
        return listed

    def read_axis(self, name: str, values: Any) -> dict[Any, Words]:
        """Value -> its words; a list has values without words."""
        where = f"axis {name!r}"
        if name in CELL or name in ("all", "over") or "." in name:
            raise self.refuse(where, f"{name} has a meaning of its own: call the axis otherwise")
        if is_drawn(values):
            drawn = draw_subsets(values, partial(self.refuse, where))
            return {label: {MEMBERS: members} for label, members in drawn.items()}
        listed = self.read_values(where, f"{name}: [...]", values)
        for value in listed if isinstance(values, dict) else ():
            if not isinstance(values[value], dict):
                raise self.refuse(
                    where, f"{value} holds {values[value]!r}: give {value}: {{word: value}}"
                )
        if isinstance(values, dict):
            return dict(values)
        return {value: {} for value in listed}

    def axes_in(self, where: str, key: str, value: Any) -> Axes:
        for name in as_list(value):
            if not isinstance(name, str) or name not in self.axes:
                raise self.refuse(
                    where, f"{key} names {name!r}, which is no axis: {suggest(name, self.axes)}"
                )
        return tuple(as_list(value))

    def value_of(self, where: str, name: str, value: Any) -> Any:
        """Return a value of an axis.

        Raises: PipelineError: an unknown axis or value.
        """
        if name not in self.axes:
            raise self.refuse(where, f"unknown word {name}: {suggest(name, [*self.axes, *CELL])}")
        if isinstance(value, list | dict) or value not in self.axes[name]:
            raise self.refuse(
                where, f"{name}={value} is no value of that axis: {suggest(value, self.axes[name])}"
            )
        return value

    # --- runs ---

    def read_run(self, name: str, value: Any) -> TableRun:
        where = f"run {name!r}"
        spec = self.read_words(where, as_mapping(self.file, where, value))
        if "stage" in spec:
            return TableRun(name, "stage", spec)
        if "merge" in spec and "checkpoint" not in spec:
            return TableRun(name, "merge", spec)
        if (
            spec.get("checkpoint")
            and set(spec) <= {"checkpoint", "eval.base"}
            and not spec["checkpoint"].is_list
        ):
            return TableRun(name, "checkpoint", spec)
        if not spec:
            return TableRun(name, "base", spec)
        problem = f"{where} is neither a stage, a merge, a checkpoint nor empty"
        raise self.refuse(
            "", f"{problem}: give stage=, merge= or checkpoint=, or nothing for the model of every"
        )

    def read_words(self, where: str, spec: Words) -> Words:
        for key, value in spec.items():
            if isinstance(value, dict) and list(value.values()) == [None]:
                (name,) = value
                raise self.refuse(where, f'{key}: {{{name}}} needs quotes, "{{{name}}}"')
        return {
            key: (
                self.run_names(where, key, value)
                if key in RUN_KEYS and value is not None
                else value
            )
            for key, value in spec.items()
        }

    def run_names(self, where: str, key: str, value: Any) -> Names:
        several_runs = isinstance(value, list) or (isinstance(value, dict) and "all" in value)
        return Names(
            tuple(self.read_reference(where, key, item) for item in as_list(value)), several_runs
        )

    def read_reference(self, where: str, key: str, value: Any) -> Reference | str:
        if isinstance(value, dict):
            spec = value
        else:
            spec = {"run": value}
        name = spec.get("run", spec.get("all"))
        if (
            not isinstance(name, str)
            or ("run" in spec) == ("all" in spec)
            or ("over" in spec) != ("all" in spec)
        ):
            forms = "a name, {run: NAME, AXIS: VALUE} or {all: NAME, over: [AXES]}"
            raise self.refuse(where, f"{key}: {value!r} names no run: give {forms}")
        fixed = {}
        for axis, part in spec.items():
            if axis not in ("run", "all", "over"):
                fixed[axis] = part
        at = tuple((axis, self.value_of(where, axis, part)) for axis, part in fixed.items())
        if name in self.names:
            return Reference(name, at, self.axes_in(where, f"{key}.over", spec.get("over") or []))
        snapshot = reference_to(name, self.names)
        if snapshot and "all" not in spec:
            return replace(snapshot, at=at)
        if "{" in name and not at and "all" not in spec:
            return name  # tables/run_specs.py looks it up at each value of its axes
        is_folder = key == "data_root" and Path(name).is_dir()
        is_elsewhere = (
            ELSEWHERE.search(name) or is_folder or (key, name) == ("data.benchmarks", "none")
        )
        if "all" in spec or at or not is_elsewhere:
            problem = (
                f"{key} names {name!r}, which is no run of this table: {suggest(name, self.names)}"
            )
            if key in ("data_root", "checkpoint", "model.path"):
                problem += f" (a folder is written ./{name})"
            raise self.refuse(where, problem)
        return name

    # --- rows and columns ---

    def read_side(self, where: str, name: str, value: Any) -> Side:
        """Read the words of a row, a column, or of all cells; a plain name is a run."""
        spec = self.read_words(
            where, as_mapping(self.file, where, {"run": value} if isinstance(value, str) else value)
        )
        side = Side(str(name))
        for key, part in spec.items():
            if key in REDUCE:
                side.reduce.append(
                    (
                        key,
                        tuple(map(str, self.read_values(f"{where}, {key}", "axes", as_list(part)))),
                    )
                )
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
                raise self.refuse(where, 'in: no is false in YAML: write Norwegian as in: "no"')
        for key, axes in (("each", side.each), ("by", side.by)):
            if axes and not side.best:
                raise self.refuse(
                    where, f"{key} is about what best chooses: give best=[...] beside it"
                )
        if side.by and (side.by.reduce or side.by.best or "run" in side.by.words):
            raise self.refuse(
                f"{where}, by", "it says what is scored: leave run, mean, max, min and best out"
            )
        return side
