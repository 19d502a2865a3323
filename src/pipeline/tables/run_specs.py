"""The runs of a table, with the settings of `every` and their words at each value of their axes."""

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

Reads = Callable[[str], Collection[str]]  # stage -> its groups, and its keys outside groups
At = dict[str, Any]  # axis -> value
Placeholder = tuple[str, str | None]  # an axis, and a word of its values or None
OF_COMMAND = tuple(item.name for item in fields(Stage))  # tracking, launcher, runs_dir
MOST_COMBINATIONS = 200_000  # for the axes of one cell
# texts in which {names} are columns of rows, not axes
OF_COLUMNS = re.compile(r"expert\.sources\..*\.(prompt|completion)")
SET_ELSEWHERE = ("checkpoint", "merge", "partition", "languages")  # by the runs, and by `in`


@dataclass(frozen=True)
class Ref:
    """A spec that another spec, or a score, names as a RUN."""

    spec: str
    step: int | None = None  # a snapshot of it

    def __str__(self) -> str:
        if self.step is None:
            return self.spec
        return f"{self.spec}@{self.step}"


@dataclass
class Spec:
    """One run: an entry of `runs` at one value of each of its axes.

    Attributes:
        kind: stage, merge (live), checkpoint or base.
        words: The settings to compose. A RUN key has a Ref, text for an external model, or a list.
    """

    key: str
    run: str
    kind: str
    at: At
    words: Words

    def parent_refs(self) -> Iterator[Ref]:
        for value in self.words.values():
            yield from refs_in(value)


def refs_in(value: Any) -> Iterator[Ref]:
    for item in as_list(value):
        if isinstance(item, Ref):
            yield item


class Specs:
    """The runs of one table.

    A spec is added when it is first requested; other specs are not planned.
    """

    def __init__(self, table: Table, reads: Reads) -> None:
        self.table = table
        self.reads = reads
        self.axes = table.axes
        self.made: dict[str, Spec] = {}  # parents first
        self._axes_of: dict[str, Axes] = {}
        mistakes = Mistakes()
        for row in table.runs.values():
            self.refuse_unread(row, mistakes)
        self.runs = self._with_every(table.runs, mistakes)
        mistakes.report()
        for name in self.runs:
            self.axes_of(name)

    # --- every ---

    def _with_every(self, runs: Mapping[str, TableRun], mistakes: Mistakes) -> dict[str, TableRun]:
        """Return the runs with the settings of `every` that their stages read.

        A run's setting has priority. A RUN in `every` is not added to the run that it names, nor to
        the ancestors of that run. A key that no stage knows is a mistake.
        """
        defaults, specs = self.table.every, {}
        ancestors = {}
        for key, value in defaults.items():
            ancestors[key] = with_ancestors(runs, [ref.run for ref in references_in({key: value})])
            if not any(self.reads_key(row, key) for row in runs.values()):
                with mistakes.collected():
                    self.refuse_unknown(key)
        for name, row in runs.items():
            settings: Words = {}
            for key, value in defaults.items():
                if self.reads_key(row, key) and name not in ancestors[key]:
                    settings[key] = value
            specs[name] = TableRun(name, row.kind, {**settings, **row.words})
            if row.kind == "base" and "model" not in settings:
                raise self.table.refuse(
                    f"run {name!r}", "it is empty, the model of every, and every names no model"
                )
        return specs

    def refuse_unknown(self, key: str) -> None:
        """Raise PipelineError for a key of `every` that only the command reads, or no stage."""
        if key.partition(".")[0] in OF_COMMAND:
            problem = (
                f"{key} is not of the runs but of the command. Leave it out here, and write"
                f" {key}=VALUE there."
            )
            raise self.table.refuse("every", problem)
        known: set[str] = set()
        for name, kind in conf.OWN_STAGES.items():
            if issubclass(kind, RunStage):
                known.update(keys_of(name))
        # without the keys inside a mapping: expert.sources.own.url
        if ".".join(key.split(".")[:2]) not in known:
            near = close_matches(key, sorted(known))
            remedy = "leave it out"
            if near:
                remedy = f"did you mean {' or '.join(near)}?"
            raise self.table.refuse("every", f"no stage has a key {key}: {remedy}")

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
        """Collect the run's words that its stage does not read, even if no cell needs the run."""
        if row.kind not in ("stage", "merge"):
            return
        for word in row.words:
            key = word.lstrip("+")
            if word == "stage" or self.reads_key(row, key):
                continue
            known = sorted(self.read_by(row))
            if OWN_FILE in row.words:
                known += sorted(OF_ROWS)
            near = suggest(key.partition(".")[0], known)
            problem = f"stage={row.stage} does not read {word}: {near}"
            mistakes.found.append(str(self.table.refuse(f"run {row.name!r}", problem)))

    def read_by_eval(self, key: str) -> bool:
        """Return True if evaluations read a key of `every`."""
        group = key.partition(".")[0]
        if group in SET_ELSEWHERE:
            return False
        keys = self.reads("eval")
        return key in keys or group in keys

    # --- axes ---

    def axes_named_by(self, where: str, value: Any, above: tuple[str, ...] = ()) -> list[str]:
        """Return the axes that a value depends on.

        It depends on the axes of its placeholders, on the axes that the words of their values name,
        and on the axes of the runs that it names.
        """
        axes: list[str] = []
        if isinstance(value, Names):
            for item in value.items:
                if isinstance(item, Reference):
                    axes += self.open_axes_of(where, item, above)
                    continue
                axes += self.axes_named_by(where, item)
                for possible in self.possible_references(where, item):
                    axes += self.axes_of(possible.run, above)
        for axis, axis_key in find_placeholders(value):
            if axis not in self.axes:
                known = suggest(axis, self.table.axes)
                raise self.table.refuse(where, f"{{{axis}}} is no axis: {known}")
            axes.append(axis)
            if axis_key is None:
                continue
            for axis_value, words in self.axes[axis].items():
                if axis_key not in words:
                    known = suggest(axis_key, words)
                    problem = f"{axis}={axis_value} has no such word: {known}"
                    raise self.table.refuse(where, f"{{{axis}.{axis_key}}}: {problem}")
                axes += self.axes_named_by(where, words[axis_key])
        return axes

    def open_axes_of(self, where: str, reference: Reference, above: tuple[str, ...]) -> list[str]:
        """Return the axes of a run that a reference neither fixes nor lists all values of."""
        axes_of_run = self.axes_of(reference.run, above)
        named = [*reference.over, *dict(reference.at)]
        for axis in named:
            if axis not in axes_of_run:
                known = suggest(axis, axes_of_run)
                raise self.table.refuse(where, f"run {reference.run!r} has no axis {axis}: {known}")
        return [axis for axis in axes_of_run if axis not in named]

    def possible_references(self, where: str, text: str) -> list[Reference]:
        """Return the runs of this table that a RUN names, at all values of its placeholders.

        Raises:
            PipelineError: If some value names neither a run of this table nor an external model.
        """
        axes = dict.fromkeys(self.axes_named_by(where, text))
        references: dict[Reference, None] = {}
        for axis_values in self.axis_combinations(axes):
            for name in self.names_in(text, axis_values):
                reference = reference_to(name, self.table.runs)
                if reference:
                    references[reference] = None
                elif axes and not ELSEWHERE.search(name) and not Path(name).is_dir():
                    at = " ".join(f"{axis}={value}" for axis, value in axis_values.items())
                    known = suggest(name, self.table.runs)
                    raise self.table.refuse(
                        where, f"{text} is {name!r} at {at}, which is no run of this table: {known}"
                    )
        return [*references]

    def names_in(self, text: str, axis_values: At) -> list[str]:
        """Return the names that a RUN stands for at these values.

        For a drawn axis, these are the members of the subset.
        """
        axis = self.drawn_axis(text)
        if axis is None:
            return [str(self.fill_placeholders(text, axis_values))]
        members: list[str] = self.axes[axis][axis_values[axis]][MEMBERS]
        return members

    def drawn_axis(self, text: str) -> str | None:
        """Return the drawn axis if a text is its placeholder; None for other texts."""
        match = PLACEHOLDER.fullmatch(text)
        if match is None or match.group(2) is not None:
            return None
        axis = match.group(1)
        for words in self.axes.get(axis, {}).values():
            if MEMBERS in words:
                return axis
        return None

    def axes_of(self, name: str, above: tuple[str, ...] = ()) -> Axes:
        """Return the axes of a run and of its inputs, in the table's order."""
        where = f"run {name!r}"
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise self.table.refuse(where, f"it is among its inputs: {circle}")
        if name not in self._axes_of:
            named: set[str] = set()
            for key, value in self.runs[name].words.items():
                if not OF_COLUMNS.fullmatch(key):
                    named.update(self.axes_named_by(where, value, (*above, name)))
            self._axes_of[name] = tuple(axis for axis in self.axes if axis in named)
        return self._axes_of[name]

    def refuse_many(self, axes: Collection[str]) -> None:
        """Raise PipelineError if axes have more than MOST_COMBINATIONS combinations of values."""
        count = math.prod(len(self.axes[axis]) for axis in axes)
        if count > MOST_COMBINATIONS:
            problem = (
                f"they have {count:,} combinations of values, more than {MOST_COMBINATIONS:,}. Give"
                " fewer values."
            )
            raise self.table.refuse(f"axes {', '.join(axes)}", problem)

    def axis_combinations(self, axes: Iterable[str]) -> Iterator[At]:
        names = list(axes)
        self.refuse_many(names)
        for values in itertools.product(*(self.axes[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    # --- filling ---

    def fill_placeholders(self, value: Any, axis_values: At) -> Any:
        """Return a value with its placeholders filled.

        A text that is a single placeholder gets the type of its replacement.
        """
        if isinstance(value, dict):
            filled = {}
            for key, part in value.items():
                name = self.fill_placeholders(key, axis_values)
                filled[name] = self.fill_placeholders(part, axis_values)
            return filled
        if isinstance(value, list):
            return [self.fill_placeholders(part, axis_values) for part in value]
        if isinstance(value, Names):
            return self._fill_refs(value, axis_values)
        if not isinstance(value, str):
            return value
        match = PLACEHOLDER.fullmatch(value)
        if match:
            return self._fill_match(match, axis_values)
        return PLACEHOLDER.sub(lambda match: str(self._fill_match(match, axis_values)), value)

    def _fill_match(self, match: re.Match[str], axis_values: At) -> Any:
        axis, axis_key = match.groups()
        if axis_key is None:
            return axis_values[axis]
        words = self.axes[axis][axis_values[axis]]
        return self.fill_placeholders(words[axis_key], axis_values)

    def _fill_refs(self, names: Names, axis_values: At) -> Any:
        refs: list[Ref | str] = []
        is_list = names.is_list
        for item in names.items:
            if isinstance(item, str):
                refs += self._fill_names(item, axis_values)
                is_list |= self.drawn_axis(item) is not None
                continue
            for values in self.axis_combinations(item.over):
                key = self.add_spec(item.run, {**axis_values, **dict(item.at), **values})
                refs.append(Ref(key, item.step))
        if is_list:
            return refs
        return refs[0]

    def _fill_names(self, text: str, axis_values: At) -> Iterator[Ref | str]:
        for name in self.names_in(text, axis_values):
            reference = reference_to(name, self.table.runs)
            if reference:
                yield Ref(self.add_spec(reference.run, axis_values), reference.step)
            else:
                yield name

    def add_spec(self, run: str, axis_values: At) -> str:
        """Plan a run and its parents at a value of each of its axes, and return its key."""
        own_values = {axis: axis_values[axis] for axis in self.axes_of(run)}
        key = run
        for axis, value in own_values.items():
            key += f" {axis}={value}"
        if key not in self.made:
            filled = {}
            for name, value in self.runs[run].words.items():
                if not OF_COLUMNS.fullmatch(name):
                    value = self.fill_placeholders(value, own_values)
                filled[name] = value
            self.made[key] = Spec(key, run, self.runs[run].kind, own_values, filled)
        return key


def find_placeholders(value: Any) -> Iterator[Placeholder]:
    """Yield the axis, and the word or None, of each {axis} and {axis.word} in a value."""
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
            for item in value.items:
                if isinstance(item, Reference):
                    yield item


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
