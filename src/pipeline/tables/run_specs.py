"""The runs of a table: `every` given to them, their axes, their words filled at one value of
each.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.explain import keys_of
from pipeline.config.stages import RunStage, Stage
from pipeline.errors import Mistakes, PipelineError, close_matches, suggest
from pipeline.tables.schema import (
    ELSEWHERE,
    MEMBERS,
    PLACEHOLDER,
    Names,
    Reference,
    Table,
    TableRun,
    reference_to,
)
from pipeline.tables.study import OF_ROWS, OWN_FILE
from pipeline.tables.words import Axes, Words, as_list

Reads = Callable[
    [str], Collection[str]
]  # stage -> the groups and the keys outside groups that it reads
At = dict[str, Any]  # axis -> value
OF_COMMAND = tuple(item.name for item in fields(Stage))  # tracking, launcher, runs_dir
MOST_COMBINATIONS = 200_000  # of the values of the axes of one cell
OF_COLUMNS = re.compile(
    r"expert\.sources\..*\.(prompt|completion)"
)  # whose {names} are columns of rows, not axes


@dataclass(frozen=True)
class Ref:
    """A spec that another one, or a score, names as a RUN."""

    spec: str
    step: int | None = None  # a snapshot of it

    def __str__(self) -> str:
        if self.step is None:
            return self.spec
        return f"{self.spec}@{self.step}"


@dataclass
class Spec:
    """One run: a row of `runs` at one value of each of its axes.

    kind: stage, merge (live), checkpoint or base.
    """

    key: str
    run: str
    kind: str
    at: At
    # what to compose; under RUN keys a Ref, text for a model made elsewhere, or a list of these
    words: Words

    def parent_refs(self) -> Iterator[Ref]:
        for value in self.words.values():
            yield from refs_in(value)


def refs_in(value: Any) -> Iterator[Ref]:
    yield from (item for item in as_list(value) if isinstance(item, Ref))


class Specs:
    """The runs of one table.

    A spec is added when it is first requested: the others are not planned.
    """

    def __init__(self, table: Table, reads: Reads) -> None:
        self.table, self.reads = table, reads
        self.axes = table.axes
        self.made: dict[str, Spec] = {}  # parents first
        self._axes_of: dict[str, Axes] = {}
        self.notes: list[str] = []  # what is to be known of `every`
        mistakes = Mistakes()
        for row in table.runs.values():
            self.refuse_unread(row, mistakes)
        self.runs = self._with_every(table.runs, mistakes)
        mistakes.report()
        for name in self.runs:
            self.axes_of(name)
        self.refuse_two_uses()

    # --- every ---

    def _with_every(self, runs: Mapping[str, TableRun], mistakes: Mistakes) -> dict[str, TableRun]:
        """Give the words of `every` to the runs whose stage reads them, unless these say otherwise.

        A RUN in `every` is not given to the run that it names, nor to what that one is made of. A
        key that no stage knows is a mistake, and one that no run of this table reads is noted,
        unless it is inherited.
        """
        defaults, specs = self.table.every, dict(runs)
        ancestors = {}
        for key, value in defaults.items():
            if isinstance(value, Names):
                ancestors[key] = with_ancestors(
                    runs, [item.run for item in value.items if isinstance(item, Reference)]
                )
        unread = {key for key in defaults if not self.read_by_eval(key)} - self.table.inherited
        for name, row in runs.items():
            settings = {}
            for key, value in defaults.items():
                if self.reads_key(row, key):
                    settings[key] = value
            unread -= settings.keys()
            settings = {
                key: value for key, value in settings.items() if name not in ancestors.get(key, ())
            }
            specs[name] = TableRun(name, row.kind, {**settings, **row.words})
            if row.kind == "base" and "model" not in settings:
                raise self.table.refuse(
                    f"run {name!r}", "it is empty, the model of every, and every names no model"
                )
        for key in sorted(unread):
            with mistakes.collected():
                self.note_unread(key)
        return specs

    def note_unread(self, key: str) -> None:
        """Note a key of `every` that no run of this table reads.

        Raise PipelineError if it is of the command, or of no stage.
        """
        known = {}
        for name, kind in conf.OWN_STAGES.items():
            if issubclass(kind, RunStage):
                known[name] = keys_of(name)
        knob_name = ".".join(
            key.split(".")[:2]
        )  # without what is inside a mapping: expert.sources.own.url
        stages = []
        for stage, keys in known.items():
            if knob_name in keys:
                stages.append(stage)
        if key.partition(".")[0] in OF_COMMAND:
            problem = (
                f"{key} is not of the runs but of the command: leave it out here, and write"
                f" {key}=VALUE there"
            )
            raise self.table.refuse("every", problem)
        if not stages:
            near = close_matches(key, sorted(set().union(*known.values())))
            remedy = "leave it out"
            if near:
                remedy = f"did you mean {' or '.join(near)}?"
            raise self.table.refuse("every", f"no stage has a key {key}: {remedy}")
        readers = " and ".join(f"stage={stage}" for stage in stages)
        self.notes.append(f"every: no run of this table reads {key}, which {readers} would read")

    def reads_key(self, row: TableRun, key: str) -> bool:
        group = key.partition(".")[0]
        if row.kind in ("base", "checkpoint"):
            return row.kind == "base" and group == "model"
        keys = self.read_by(row)
        return key in keys or group in keys

    def read_by(self, row: TableRun) -> Collection[str]:
        try:
            return self.reads(row.stage)
        except PipelineError as error:
            raise self.table.refuse(f"run {row.name!r}", str(error)) from error

    def refuse_unread(self, row: TableRun, mistakes: Mistakes) -> None:
        """Collect the run's words that its stage does not read, whether a cell needs the run or
        not.
        """
        for key in row.words if row.kind in ("stage", "merge") else ():
            if key != "stage" and not self.reads_key(row, key.lstrip("+")):
                of_rows = []
                if OWN_FILE in row.words:
                    of_rows = sorted(OF_ROWS)
                near = suggest(
                    key.lstrip("+").partition(".")[0], [*sorted(self.read_by(row)), *of_rows]
                )
                problem = f"stage={row.stage} does not read {key}: {near}"
                mistakes.found.append(str(self.table.refuse(f"run {row.name!r}", problem)))

    def read_by_eval(self, key: str) -> bool:
        """Whether evaluations read a key of `every`."""
        group = key.partition(".")[0]
        keys = self.reads("eval")
        set_elsewhere = (
            "checkpoint",
            "merge",
            "partition",
            "languages",
        )  # by the runs, and by `in`
        return group not in set_elsewhere and (key in keys or group in keys)

    # --- axes ---

    def axes_named_by(self, where: str, value: Any, above: tuple[str, ...] = ()) -> list[str]:
        """Return the axes that a value names, by placeholders, in the words of their values, and by
        runs.
        """
        axes: list[str] = []
        for reference in value.items if isinstance(value, Names) else ():
            if isinstance(reference, Reference):
                axes_of_run, fixed = self.axes_of(reference.run, above), dict(reference.at)
                for axis in (*reference.over, *fixed):
                    if axis not in axes_of_run:
                        raise self.table.refuse(
                            where,
                            f"run {reference.run!r} has no axis {axis}:"
                            f" {suggest(axis, axes_of_run)}",
                        )
                for axis in axes_of_run:
                    if axis not in reference.over and axis not in fixed:
                        axes.append(axis)
            else:
                axes += self.axes_named_by(where, reference)
                for possible in self.possible_references(where, reference):
                    axes += self.axes_of(possible.run, above)
        for axis, axis_key in find_placeholders(value):
            if axis not in self.axes:
                raise self.table.refuse(
                    where, f"{{{axis}}} is no axis: {suggest(axis, self.table.axes)}"
                )
            axes.append(axis)
            for reference, settings in self.axes[axis].items() if axis_key is not None else ():
                if axis_key not in settings:
                    problem = (
                        f"{{{axis}.{axis_key}}}: {axis}={reference} has no such word:"
                        f" {suggest(axis_key, settings)}"
                    )
                    raise self.table.refuse(where, problem)
                axes += self.axes_named_by(where, settings[axis_key])
        return axes

    def possible_references(self, where: str, text: str) -> list[Reference]:
        """Return the runs of this table that a RUN with placeholders names, over all values of its
        axes.

        Raises:
            PipelineError: at some value it names neither a run of this table nor a model from
                elsewhere.
        """
        axes = dict.fromkeys(self.axes_named_by(where, text))
        found: dict[Reference, None] = {}
        for axis_values in self.axis_combinations(axes):
            for name in self.names_in(text, axis_values):
                reference = reference_to(name, self.table.runs)
                if reference:
                    found[reference] = None
                elif axes and not ELSEWHERE.search(name) and not Path(name).is_dir():
                    at = " ".join(f"{axis}={value}" for axis, value in axis_values.items())
                    problem = f"{text} is {name!r} at {at}, which is no run of this table: "
                    raise self.table.refuse(where, problem + suggest(name, self.table.runs))
        return [*found]

    def names_in(self, text: str, axis_values: At) -> list[str]:
        """Return the names that a RUN stands for at these values: of a drawn axis the members of
        the subset.
        """
        axis = self.drawn_axis(text)
        if axis is None:
            return [str(self.fill_placeholders(text, axis_values))]
        members: list[str] = self.axes[axis][axis_values[axis]][MEMBERS]
        return members

    def drawn_axis(self, text: str) -> str | None:
        """Return the drawn axis that a text is the placeholder of; None for other texts."""
        match = PLACEHOLDER.fullmatch(text)
        if match is None or match.group(2) is not None:
            return None
        axis = match.group(1)
        drawn = any(MEMBERS in words for words in self.axes.get(axis, {}).values())
        if drawn:
            return axis
        return None

    def refuse_two_uses(self) -> None:
        """Raise PipelineError for an axis that names runs in one place and is text in another."""
        naming: dict[tuple[str, str | None], str] = {}
        texts: dict[tuple[str, str | None], str] = {}
        for name, row in self.runs.items():
            for key, value in row.words.items():
                where = f"run {name!r}"
                if not isinstance(value, Names):
                    texts |= dict.fromkeys(find_placeholders(value), f"{key} of {where}")
                    continue
                for item in value.items:
                    if isinstance(item, str) and self.possible_references(where, item):
                        naming |= dict.fromkeys(find_placeholders(item), f"{key} of {where}")
        for axis, axis_key in naming.keys() & texts.keys() if naming else ():
            word = f"{axis}.{axis_key}" if axis_key else axis
            is_step = re.search(rf"@\{{{re.escape(word)}\}}", naming[axis, axis_key])
            if not is_step:
                problem = (
                    f"{{{word}}} names runs in {naming[axis, axis_key]} and is text in"
                    f" {texts[axis, axis_key]}"
                )
                raise self.table.refuse(f"axis {axis!r}", f"{problem}: use two axes")

    def axes_of(self, name: str, above: tuple[str, ...] = ()) -> Axes:
        """Return the axes that a run names, itself or through the runs it is made of, in the
        table's order.
        """
        where = f"run {name!r}"
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise self.table.refuse(where, f"it is made of itself: {circle}")
        if name not in self._axes_of:
            settings = []
            for key, value in self.runs[name].words.items():
                if not OF_COLUMNS.fullmatch(key):
                    settings.append(value)
            own_axes = set()
            for value in settings:
                for axis in self.axes_named_by(where, value, (*above, name)):
                    own_axes.add(axis)
            self._axes_of[name] = tuple(axis for axis in self.axes if axis in own_axes)
        return self._axes_of[name]

    def refuse_many(self, axes: Collection[str]) -> None:
        """Raise PipelineError if axes have more than MOST_COMBINATIONS combinations of values."""
        count = math.prod(len(self.axes[axis]) for axis in axes)
        if count > MOST_COMBINATIONS:
            problem = (
                f"they have {count:,} combinations of values, more than {MOST_COMBINATIONS:,}: give"
                " fewer values"
            )
            raise self.table.refuse(f"axes {', '.join(axes)}", problem)

    def axis_combinations(self, axes: Iterable[str]) -> Iterator[At]:
        names = list(axes)
        self.refuse_many(names)
        for values in itertools.product(*(self.axes[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    # --- filling ---

    def fill_placeholders(self, value: Any, axis_values: At) -> Any:
        """Fill the placeholders of a value.

        One that is only a placeholder keeps the type of its replacement.
        """
        if isinstance(value, dict):
            return {
                self.fill_placeholders(key, axis_values): self.fill_placeholders(part, axis_values)
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [self.fill_placeholders(part, axis_values) for part in value]
        if isinstance(value, Names):
            return self._fill_refs(value, axis_values)
        if not isinstance(value, str):
            return value
        match = PLACEHOLDER.fullmatch(value)
        if match:
            return self._fill_axis(match.group(1), match.group(2), axis_values)
        return PLACEHOLDER.sub(
            lambda match: str(self._fill_axis(match.group(1), match.group(2), axis_values)), value
        )

    def _fill_axis(self, axis: str, axis_key: str | None, axis_values: At) -> Any:
        if axis_key is None:
            return axis_values[axis]
        return self.fill_placeholders(self.axes[axis][axis_values[axis]][axis_key], axis_values)

    def _fill_refs(self, names: Names, axis_values: At) -> Any:
        refs: list[Ref | str] = []
        is_list = names.is_list
        for item in names.items:
            if isinstance(item, str):
                for name in self.names_in(item, axis_values):
                    reference = reference_to(name, self.table.runs)
                    refs.append(
                        Ref(self.add_spec(reference.run, axis_values), reference.step)
                        if reference
                        else name
                    )
                is_list |= self.drawn_axis(item) is not None
                continue
            for values in self.axis_combinations(item.over):
                refs.append(
                    Ref(
                        self.add_spec(item.run, {**axis_values, **dict(item.at), **values}),
                        item.step,
                    )
                )
        if is_list:
            return refs
        return refs[0]

    def add_spec(self, run: str, axis_values: At) -> str:
        """Plan a run and its parents at `axis_values`, a value of each of its axes, and return its
        key.
        """
        own_values = {axis: axis_values[axis] for axis in self.axes_of(run)}
        key = " ".join([run, *(f"{axis}={value}" for axis, value in own_values.items())])
        if key not in self.made:
            filled = {
                name: (
                    value
                    if OF_COLUMNS.fullmatch(name)
                    else self.fill_placeholders(value, own_values)
                )
                for name, value in self.runs[run].words.items()
            }
            self.made[key] = Spec(key, run, self.runs[run].kind, own_values, filled)
        return key


def find_placeholders(value: Any) -> Iterator[tuple[str, str | None]]:
    """(axis, word or None) of each {axis} and {axis.word} in a value."""
    if isinstance(value, str):
        for match in PLACEHOLDER.finditer(value):
            yield match.group(1), match.group(2)
    elif isinstance(value, dict):
        yield from find_placeholders([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from find_placeholders(part)


def references_in(settings: Words) -> Iterator[Reference]:
    for value in settings.values():
        if isinstance(value, Names):
            yield from (item for item in value.items if isinstance(item, Reference))


def with_ancestors(runs: Mapping[str, TableRun], names: Iterable[str]) -> set[str]:
    """Return the names of these runs and of all their ancestors."""
    ancestors: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name not in ancestors:
            ancestors.add(name)
            queue += [ref.run for ref in references_in(runs[name].words)]
    return ancestors
