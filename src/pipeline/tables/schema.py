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
    mean, max, min        axes, in the order of the reduction
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
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PipelineError
from pipeline.tables.words import Axes, Words, table_error

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
