"""A table as a plan: the runs that its cells need, their scores, choices and reductions.

This module only turns words into words. Other modules build the runs, score them and render cells.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.papers import published as papers
from pipeline.tables.controls import add_controls
from pipeline.tables.place import Entry, Place, Reduction, scoring_words
from pipeline.tables.plan import (
    Candidate,
    Cell,
    Choice,
    Chosen,
    Item,
    Published,
    ScoreRef,
    ScoreWords,
    TablePlan,
    another_number,
    difference_of,
)
from pipeline.tables.run_specs import MOST_COMBINATIONS, At, Reads, Specs
from pipeline.tables.schema import Side, Table
from pipeline.tables.words import Axes, Words, as_list

# scores that differ in these settings would compare numerics, not models
ONE_FOR_ALL = ("eval.dtype", "eval.backend")


def expand_table(table: Table, reads: Reads) -> TablePlan:
    """Expand a table into its plan.

    `reads` returns the groups and keys that a stage reads.

    Raises:
        PipelineError: For an unknown word, or a word without effect. Names file and row.
    """
    return Expansion(add_controls(table), reads).build_plan()


class Expansion:
    """Builds the plan of one table."""

    def __init__(self, table: Table, reads: Reads) -> None:
        self.table = table
        self.specs = Specs(table, reads)
        self.table_plan = TablePlan(table, self.specs.made)
        self.every: Words = {}
        for key, value in table.every.items():
            if self.specs.read_by_eval(key):
                self.every[key] = value
        self.scores: dict[ScoreRef, None] = {}  # a set that keeps its order

    def build_plan(self) -> TablePlan:
        table, plan = self.table, self.table_plan
        rows = self.expand_sides("row", table.rows)
        columns = self.expand_sides("column", table.columns)
        if len(rows) * len(columns) > MOST_COMBINATIONS:
            sizes = f"{len(rows):,} rows and {len(columns):,} columns"
            raise table.refuse(
                "rows, columns", f"{sizes} have too many cells. Give axes fewer values."
            )
        plan.rows = self.check_unique("row", rows)
        plan.columns = self.check_unique("column", columns)
        for row, column in itertools.product(rows, columns):
            slot = Place(table, row, column)
            if slot.meet and self.has_cell(row.side, column):
                self.add_cell(slot)
        plan.scores = list(self.scores)
        self.refuse_unknown("compare", itertools.chain.from_iterable(table.compare))
        for pair in table.compare:
            two = set(pair)
            if len(two) < 2 or not (two <= {*plan.rows} or two <= {*plan.columns}):
                raise table.refuse("compare", f"{list(pair)} are not two rows or two columns")
        plan.compare = table.compare
        for entry in (*rows, *columns):
            if entry.side.control_of:
                merge = str(self.specs.fill_placeholders(entry.side.control_of, entry.at))
                plan.controls.append((merge, entry.name))
        self.refuse_primary()
        self.refuse_unknown("family, baselines", (*table.family, *table.baselines))
        return plan

    def refuse_primary(self) -> None:
        """Raise PipelineError if the primary comparison is none of the table's comparisons."""
        plan, primary = self.table_plan, self.table.primary
        if not primary:
            return
        *sides, slot = primary
        keys = set()
        for name in sides:
            keys.update([(name, slot), (slot, name)])
        is_compared = tuple(sides) in [*plan.compare, *plan.controls]
        if not is_compared or len(keys & plan.cells.keys()) != 2:
            raise self.table.refuse(
                "primary",
                f"{list(primary)} is not [LEFT, RIGHT, PLACE] of a comparison in compare or"
                " controls",
            )

    def refuse_unknown(self, where: str, names: Iterable[str]) -> None:
        """Raise PipelineError for names that are no rows or columns."""
        known = [*self.table_plan.columns, *self.table_plan.rows]
        for name in names:
            if name not in known:
                raise self.table.refuse(
                    where, f"{name!r} is no column or row: {suggest(name, known)}"
                )

    def expand_sides(self, kind: str, sides: list[Side]) -> list[Entry]:
        """Return rows or columns, one for each combination of the axes in their names."""
        entries = []
        for side in sides:
            named = dict.fromkeys(self.specs.axes_named_by(f"{kind} {side.name!r}", side.name))
            open_axes = [axis for axis in named if axis not in side.at]
            for values in self.specs.axis_combinations(open_axes):
                at = {**side.at, **values}
                entries.append(Entry(side, str(self.specs.fill_placeholders(side.name, at)), at))
        return entries

    def check_unique(self, kind: str, entries: list[Entry]) -> list[str]:
        """Return the names of rows or columns.

        Raises:
            PipelineError: For a repeated name.
        """
        names = [entry.name for entry in entries]
        for name, count in Counter(names).items():
            if count > 1:
                raise self.table.refuse(f"{kind} {name!r}", f"there are two {kind}s of that name")
        return names

    def has_cell(self, row: Side, column: Entry) -> bool:
        """Return True if a row has a cell in a column.

        If the row has `columns`, they must list the column, as written or expanded.
        """
        known = self.table_plan.columns
        written = [side.name for side in self.table.columns]
        for entry in row.columns:
            if entry not in written and entry not in known:
                problem = f"columns: {entry!r} is no column: {suggest(entry, known)}"
                raise self.table.refuse(f"row {row.name!r}", problem)
        if not row.columns:
            return True
        return column.name in row.columns or column.side.name in row.columns

    def add_cell(self, slot: Place) -> None:
        """Add the cell of a place, unless the place is empty."""
        specs, cells = self.specs, self.table_plan.cells
        run = self.run_of_place(slot)
        if run is None:
            return
        # the evaluation of a live merge records its facts
        needs_score = "fact" not in slot.words or specs.runs[run].kind == "merge"
        scored = needs_score and specs.runs[run].words.get("stage") != "analyze"
        reduction = self.reduction_of(slot, run, scored)
        metric, pair, fact = (
            specs.fill_placeholders(slot.words.get(key), slot.at)
            for key in ("metric", "pair", "fact")
        )
        specs.refuse_many([*reduction.free, *reduction.best])
        items = []
        for point in specs.axis_combinations(reduction.free):
            at = {**slot.at, **point}
            items.append(self.build_item(slot, run, at, reduction.best, scored, metric, pair))
        for item in items:
            for reading in item.readings:
                for score in reading.values():
                    difference = difference_of(score, metric)
                    if difference:
                        self.scores[difference[1]] = None
        published = self.published_number(slot)
        cells[slot.key] = Cell(*slot.key, items, reduction.steps, metric, pair, fact, published)

    def reduction_of(self, slot: Place, run: str, scored: bool) -> Reduction:
        """Return how a cell is reduced.

        Raises:
            PipelineError: If an axis of several values is not reduced.
        """
        specs = self.specs
        measured = [slot.words.get(key) for key in ("metric", "pair", "fact")]
        if scored:
            measured += [*self.every.values(), *scoring_words(slot.words).values()]
        of_run = set(specs.axes_of(run))
        own_axes = of_run | set(self.axes_named_by(slot, *measured))
        own_axes |= set(slot.each) & set(self.axes_named_by(slot, slot.choosing))
        best: list[str] = []
        free: list[str] = []
        for axis in specs.axes:
            if axis in slot.at:
                continue
            if axis in slot.best and axis in of_run:
                best.append(axis)
            elif axis in own_axes:
                free.append(axis)
        steps: list[tuple[str, Axes]] = []
        reduced: set[str] = set()
        for how, axes in slot.reduce:
            for axis in axes:
                if axis not in specs.axes:
                    raise slot.refuse(f"{how}: {axis!r} is no axis: {suggest(axis, specs.axes)}")
            of_step = tuple(axis for axis in axes if axis in free)
            reduced.update(of_step)
            if of_step:
                steps.append((how, of_step))
        open_axes = [axis for axis in free if axis not in reduced]
        pooled = tuple(axis for axis in self.table.pooled if axis in open_axes)
        if pooled:
            steps.insert(0, ("mean", pooled))
        unreduced = []
        for axis in open_axes:
            if axis not in pooled and len(specs.axes[axis]) > 1:
                unreduced.append(axis)
        if unreduced:
            raise slot.refuse(
                f"{' and '.join(unreduced)} left open. Name in mean, max, min or best, or give one"
                " value."
            )
        return Reduction(free, tuple(best), tuple(steps))

    def run_of_place(self, slot: Place) -> str | None:
        """Return the run of a place, or None if the place is empty.

        A place is empty if its run is null. The place of a control is also empty if its run does
        not exist.
        """
        word, runs = slot.words.get("run", ""), self.specs.runs
        for axis in self.axes_named_by(slot, word):
            if axis not in slot.at:
                raise slot.refuse(f"{word} names {axis}, which neither of them fixes")
        filled = self.specs.fill_placeholders(word, slot.at)
        if filled is None:
            return None
        run = str(filled)
        if run in runs:
            return run
        if slot.control:
            return None  # this value of the axis is not a merge
        named = f"{run!r} is" if run else "it names"
        raise slot.refuse(f"{named} no run: {suggest(run, runs)}")

    def axes_named_by(self, slot: Place, *values: Any) -> list[str]:
        axes: list[str] = []
        for value in values:
            axes += self.specs.axes_named_by(slot.where, value)
        return axes

    def published_number(self, slot: Place) -> Published | None:
        """Return (table, row, column) of the published number.

        It is written as TABLE, or as TABLE ROW COLUMN if the names differ. None if the paper has no
        such row or column.
        """
        word = slot.words.get("published", self.table.published)
        text = self.specs.fill_placeholders(word, slot.at)
        if text is None:
            return None
        parts = str(text).split()
        if len(parts) not in (0, 1, 3):
            raise slot.refuse(f"published: {text} is neither TABLE nor TABLE ROW COLUMN")
        if not parts:
            return None
        row, column = parts[1:] or slot.key
        number = (parts[0], row, column)
        try:
            printed = papers.is_printed(*number)
        except PipelineError as error:
            raise slot.refuse(str(error)) from None
        return number if printed else None

    # --- what is scored ---

    def build_item(
        self,
        slot: Place,
        run: str,
        at: At,
        best: Axes,
        scored: bool,
        metric: str | None,
        pair: str | None,
    ) -> Item:
        specs = self.specs
        if not scored:
            return Item(at, model=specs.add_spec(run, at))
        words, languages = self.fill_settings(slot, slot.words, at)
        if not best:
            model = specs.add_spec(run, at)
            scores = [self.add_score(slot, model, words, language) for language in languages]
            return Item(at, tuple({(): score} for score in scores))
        chooser = run
        if slot.control:
            chooser = str(specs.fill_placeholders(slot.control.best_of, at))
        choice = self.add_choice(slot, chooser, at, best)
        models = {}
        for point in specs.axis_combinations(best):
            models[tuple(point.values())] = specs.add_spec(run, {**at, **point})
        candidate_scores = set(itertools.chain.from_iterable(choice.candidates.values()))
        same_questions = {score.words for score in candidate_scores} == {words}
        beside = set(best) <= set(self.table.beside)
        readings: list[dict[Candidate, ScoreRef]] = []
        for language in languages:
            shown = [ScoreRef(model, words, language) for model in models.values()]
            repeated = candidate_scores.issuperset(shown) or (beside and same_questions)
            if repeated:  # in each draw
                other = another_number(ScoreRef(run, words, language), metric, pair)
                if other:
                    raise slot.refuse(
                        f"{other} is not what best compares. Leave it out, or choose by other"
                        " scores, by: ..."
                    )
            reading: dict[Candidate, ScoreRef] = {}
            if not repeated:
                chosen = self.add_chosen(choice, run, at, models)
                reading[()] = self.add_score(slot, chosen, words, language)
            if repeated or beside:
                for candidate, model in models.items():
                    reading[candidate] = self.add_score(slot, model, words, language)
            readings.append(reading)
        return Item(at, tuple(readings), choice.key)

    def fill_settings(self, slot: Place, words: Words, at: At) -> tuple[ScoreWords, list[str]]:
        """Return the settings of a cell's or a choice's evaluations, and their languages.

        The settings are eval, task and eval.KEY, with the evaluation keys of `every`.
        """
        settings = scoring_words(words)
        for key, example in (("eval", "eval: mgsm_2shot"), ("in", 'in: "{language}"')):
            if settings.get(key) is None:
                raise slot.refuse(f"it has no {key}. Give score: {{{example}}}.")
        languages = as_list(self.specs.fill_placeholders(settings.pop("in"), at))
        filled = {}
        for key, value in {**self.every, **settings}.items():
            filled[key] = self.specs.fill_placeholders(value, at)
        return ScoreWords(sorted(filled.items())), [str(language) for language in languages]

    def add_score(self, slot: Place, model: str, words: ScoreWords, language: str) -> ScoreRef:
        score = ScoreRef(model, words, language)
        first = next(iter(self.scores), score)
        for key in ONE_FOR_ALL:
            value, of_first = words.get(key), first.words.get(key)
            if value != of_first:
                raise slot.refuse(
                    f"{key}={value} for {model} and {of_first} for {first.model}: one for all rows,"
                    " in every"
                )
        self.scores[score] = None
        return score

    def add_choice(self, slot: Place, run: str, at: At, best: Axes) -> Choice:
        """Add the choice of a place, unless it was added before.

        There is a choice for each value of the fixed axes and of `each`. It compares means over the
        other axes.
        """
        specs, words = self.specs, slot.choosing
        named = {*specs.axes_of(run), *self.axes_named_by(slot, *self.every.values(), words)}
        own_axes = [axis for axis in specs.axes if axis in named]
        fixed = self.fixed_values(slot, at, own_axes)
        parts = [f"{axis}={value}" for axis, value in fixed.items()]
        for word, value in words.items():
            parts.append(f"{word}={self.fill_pooled(slot, value, fixed)}")
        key = " ".join(["best", "+".join(best), "of", run, *parts])
        if key in self.table_plan.choices:
            return self.table_plan.choices[key]
        pooled = [axis for axis in own_axes if axis not in fixed and axis not in best]
        specs.refuse_many([*best, *pooled])
        candidates: dict[Candidate, tuple[ScoreRef, ...]] = {}
        for candidate in specs.axis_combinations(best):
            scores: list[ScoreRef] = []
            for pool_point in specs.axis_combinations(pooled):
                full = {**fixed, **pool_point, **candidate}
                settings, languages = self.fill_settings(slot, words, full)
                model = specs.add_spec(run, full)
                for language in languages:
                    scores.append(self.add_score(slot, model, settings, language))
            candidates[tuple(candidate.values())] = tuple(scores)
        choice = Choice(key, run, best, fixed, candidates)
        self.table_plan.choices[key] = choice
        return choice

    def fixed_values(self, slot: Place, at: At, axes: Iterable[str]) -> At:
        """Return the values of the axes that are fixed for a choice."""
        fixed: At = {}
        for axis in axes:
            values = self.specs.axes[axis]
            if axis in slot.by.at:
                fixed[axis] = slot.by.at[axis]
            elif axis in at and (axis in slot.each or axis in slot.at):
                fixed[axis] = at[axis]
            elif len(values) == 1:
                fixed[axis] = next(iter(values))
        return fixed

    def fill_pooled(self, slot: Place, value: Any, fixed: At) -> str:
        """Fill a word of a choice.

        If the word names axes that the choice pools, its values are joined by commas.
        """
        pooled = [axis for axis in self.axes_named_by(slot, value) if axis not in fixed]
        filled: dict[str, None] = {}
        for point in self.specs.axis_combinations(pooled):
            filled[str(self.specs.fill_placeholders(value, {**fixed, **point}))] = None
        return ",".join(filled)

    def add_chosen(self, choice: Choice, run: str, at: At, models: dict[Candidate, str]) -> str:
        words = [choice.key, "for"]
        if run != choice.run:
            words.append(run)
        for axis in self.specs.axes_of(run):
            if axis not in choice.axes:
                words.append(f"{axis}={at[axis]}")
        key = " ".join(words)
        self.table_plan.chosen.setdefault(key, Chosen(key, choice.key, models))
        return key
