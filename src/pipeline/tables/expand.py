"""A table as a plan: the runs that its cells reach, what is scored on which, what is chosen, and
how cells are reduced.

Pure: words in, words out. Other modules build runs from the words, score them and render cells.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.papers import published as papers
from pipeline.tables.controls import add_controls
from pipeline.tables.plan import (
    ROWS_CHANGED,
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

ONE_FOR_ALL = (
    "eval.dtype",
    "eval.backend",
)  # scores that differ in these would compare numerics, not models


def expand_table(table: Table, reads: Reads) -> TablePlan:
    """Expand a table into its plan.

    Args: reads: what each stage reads, groups and keys.

    Raises: PipelineError: an unknown word, or one without effect, naming file and row.
    """
    return Expansion(add_controls(table), reads).build_plan()


# --- rows x columns ---


class Place:
    """The settings of one cell: those of `score`, overridden by the column's, overridden by the
    row's.
    """

    def __init__(
        self, table: Table, row: Side, row_name: str, row_at: At, column: Side, name: str, at: At
    ) -> None:
        self.key, self.row, self.sides = (row_name, name), row, (row, column, table.score)
        self.where = f"row {row_name!r}, column {name!r}"
        self.refuse = partial(table.refuse, self.where)
        self.meet = all(row_at[axis] == at[axis] for axis in row_at.keys() & at.keys())
        self.at = {**table.score.at, **at, **row_at}
        self.words: Words = {**table.score.words, **column.words, **row.words}
        self.reduce = next((side.reduce for side in self.sides if side.reduce), [])
        chooser = next((side for side in self.sides if side.best), Side(""))
        self.best, self.each, self.by = chooser.best, chooser.each, chooser.by or Side("")
        self.choosing: Words = scoring_words({**table.score.words, **self.by.words})
        self.control = next((side for side in (row, column) if side.control_of), None)


def scoring_words(words: Words) -> Words:
    """Return the words of a cell that set what is scored, and in which language."""
    names = ("eval", "task", "in", "data_root", "where_possible")
    found = {}
    for key, value in words.items():
        if key in names or key.startswith("eval."):
            found[key] = value
    return found


class Expansion:
    """Builds the plan of one table."""

    def __init__(self, table: Table, reads: Reads) -> None:
        self.table, self.specs = table, Specs(table, reads)
        self.table_plan = TablePlan(table, self.specs.made)
        self.every = {
            key: value for key, value in table.every.items() if self.specs.read_by_eval(key)
        }
        self.scores: dict[ScoreRef, None] = {}  # a set that keeps its order

    def build_plan(self) -> TablePlan:
        table, plan = self.table, self.table_plan
        rows = []
        for side in table.rows:
            for name, at in self.expand_names("row", side):
                rows.append((side, name, at))
        columns = []
        for side in table.columns:
            for name, at in self.expand_names("column", side):
                columns.append((side, name, at))
        if len(rows) * len(columns) > MOST_COMBINATIONS:
            problem = (
                f"{len(rows):,} rows and {len(columns):,} columns have too many cells: give axes"
                " fewer values"
            )
            raise table.refuse("rows, columns", problem)
        plan.rows, plan.columns = (
            self.check_unique("row", rows),
            self.check_unique("column", columns),
        )
        for row, column in itertools.product(rows, columns):
            slot = Place(table, *row, *column)
            if slot.meet and self.has_cell(row[0], column[0], column[1]):
                self.add_cell(slot)
        plan.scores = list(self.scores)
        plan.notes = self.specs.notes
        for cell in [cell for cell in plan.cells.values() if cell.of]:
            if any((row, cell.column) not in plan.cells for row in cell.of):
                del plan.cells[cell.row, cell.column]
        for name in (name for pair in table.compare for name in pair):
            if name not in plan.columns and name not in plan.rows:
                raise table.refuse(
                    "compare",
                    f"{name!r} is no column or row: {suggest(name, plan.columns + plan.rows)}",
                )
        plan.compare = table.compare
        plan.controls = [
            (str(self.specs.fill_placeholders(side.control_of, at)), name)
            for side, name, at in (*rows, *columns)
            if side.control_of
        ]
        self.refuse_primary()
        self.refuse_unprinted()
        return plan

    def refuse_primary(self) -> None:
        """Refuse a primary comparison that is not one of the table's, and unknown names of the
        family and baselines.
        """
        plan, primary = self.table_plan, self.table.primary
        *sides, slot = primary or ("",)
        keys = set()
        for name in sides:
            for key in ((name, slot), (slot, name)):
                keys.add(key)
        if primary and (
            tuple(sides) not in [*plan.compare, *plan.controls]
            or len(keys & plan.cells.keys()) != 2
        ):
            raise self.table.refuse(
                "primary",
                f"{list(primary)} is not [LEFT, RIGHT, PLACE] of a comparison in compare or"
                " controls",
            )
        known = [*plan.rows, *plan.columns]
        for name in (*self.table.family, *self.table.baselines):
            if name not in known:
                raise self.table.refuse(
                    "family, baselines", f"{name!r} is no row or column: {suggest(name, known)}"
                )

    def expand_names(self, kind: str, side: Side) -> list[tuple[str, At]]:
        """(name, axis values) of a row or column, for each combination of the axes in its name."""
        axes = dict.fromkeys(self.specs.axes_named_by(f"{kind} {side.name!r}", side.name))
        ats = [
            {**side.at, **at}
            for at in self.specs.axis_combinations(axis for axis in axes if axis not in side.at)
        ]
        return [(str(self.specs.fill_placeholders(side.name, at)), at) for at in ats]

    def check_unique(self, kind: str, sides: list[tuple[Side, str, At]]) -> list[str]:
        """Return the names of rows or columns.

        Raises: PipelineError: a repeated name.
        """
        names = [name for _, name, _ in sides]
        for name, count in Counter(names).items():
            if count > 1:
                raise self.table.refuse(f"{kind} {name!r}", f"there are two {kind}s of that name")
        return names

    def has_cell(self, row: Side, column: Side, name: str) -> bool:
        """Whether a row has a cell in a column: its `columns` list it, as written or expanded, or
        are not set.
        """
        written = [side.name for side in self.table.columns]
        for entry in row.columns:
            if entry not in written and entry not in self.table_plan.columns:
                problem = (
                    f"columns: {entry!r} is no column: {suggest(entry, self.table_plan.columns)}"
                )
                raise self.table.refuse(f"row {row.name!r}", problem)
        return not row.columns or name in row.columns or column.name in row.columns

    def add_cell(self, slot: Place) -> None:
        """Add the cell of a place, unless the place is empty."""
        specs, at = self.specs, slot.at
        of = self.rows_of(slot)
        if of:
            how = slot.reduce[0][0]
            self.table_plan.cells[slot.key] = Cell(
                *slot.key, reduce=((how, ()),), of=of, published=self.published_number(slot)
            )
            return
        run = self.run_of_place(slot)
        if run is None:
            return
        is_live = specs.runs[run].kind == "merge"  # its facts are recorded where it is scored
        scored = specs.runs[run].words.get("stage") != "analyze" and (
            "fact" not in slot.words or is_live
        )
        measured = [slot.words.get(key) for key in ("metric", "pair", "fact")]
        if scored:
            measured += [*self.every.values(), *scoring_words(slot.words).values()]
        of_run = set(specs.axes_of(run))
        own_axes = (
            of_run
            | set(self.axes_named_by(slot, *measured))
            | (set(slot.each) & set(self.axes_named_by(slot, slot.choosing)))
        )
        best = tuple(
            axis for axis in specs.axes if axis in slot.best and axis in of_run and axis not in at
        )
        free = []
        for axis in specs.axes:
            if axis in own_axes and axis not in at and axis not in best:
                free.append(axis)
        reduce = tuple(
            (how, tuple(axis for axis in axes if axis in free)) for how, axes in slot.reduce
        )
        reduced = set()
        for _, axes in reduce:
            for axis in axes:
                reduced.add(axis)
        pooled = tuple(axis for axis in self.table.pooled if axis in free and axis not in reduced)
        if pooled:
            reduce, reduced = (("mean", pooled), *reduce), reduced.union(pooled)
        unreduced = []
        for axis in free:
            if axis not in reduced and len(specs.axes[axis]) > 1:
                unreduced.append(axis)
        if unreduced:
            problem = (
                f"{' and '.join(unreduced)} left open: name in mean, max, min or best, or give one"
                " value"
            )
            raise slot.refuse(problem)
        metric, pair, fact = (
            specs.fill_placeholders(slot.words.get(key), at) for key in ("metric", "pair", "fact")
        )
        specs.refuse_many([*free, *best])
        points = specs.axis_combinations(free)
        items = [
            self.build_item(slot, run, {**at, **point}, best, scored, metric, pair)
            for point in points
        ]
        for score in [
            score for item in items for reading in item.readings for score in reading.values()
        ]:
            parts = difference_of(score, metric)
            if parts:
                self.scores[parts[1]] = None
        if str(fact).startswith("rows_changed") and not ROWS_CHANGED.fullmatch(str(fact)):
            problem = (
                f"fact {fact}: rows changed are those of attention, feed_forward or all in"
                " layers, as "
            )
            raise slot.refuse(f"{problem}rows_changed.attention.0-1,30-31")
        steps, published = tuple(step for step in reduce if step[1]), self.published_number(slot)
        self.table_plan.cells[slot.key] = Cell(
            *slot.key, items, steps, (), metric, pair, fact, published
        )

    def rows_of(self, slot: Place) -> tuple[str, ...]:
        """Return the rows that a row is reduced over, or () if it is reduced over axes."""
        rows, axes = self.table_plan.rows, self.specs.axes
        for name in [name for side in slot.sides for _, names in side.reduce for name in names]:
            if name not in axes and (name not in rows or len(slot.row.reduce) != 1):
                problem = (
                    f"{name!r} is neither an axis nor a row to reduce over:"
                    f" {suggest(name, [*axes, *rows])}"
                )
                raise slot.refuse(problem)
        over = slot.row.reduce[0][1] if slot.row.reduce else ()
        if over and all(name in rows and name not in axes for name in over):
            return over
        return ()

    def run_of_place(self, slot: Place) -> str | None:
        """Return the run of a place, or None if it is null."""
        word, runs = slot.words.get("run", ""), self.specs.runs
        open_axes = []
        for axis in self.axes_named_by(slot, word):
            if axis not in slot.at:
                open_axes.append(axis)
        if open_axes:
            raise slot.refuse(f"{word} names {open_axes[0]}, which neither of them fixes")
        filled = self.specs.fill_placeholders(word, slot.at)
        run = None if filled is None else str(filled)
        if slot.control and run not in runs:
            return None  # this value of the axis is not a merge
        if run is not None and run not in runs:
            named = f"{run!r} is" if run else "it names"
            raise slot.refuse(f"{named} no run: {suggest(run, runs)}")
        return run

    def axes_named_by(self, slot: Place, *values: Any) -> list[str]:
        found = []
        for value in values:
            for axis in self.specs.axes_named_by(slot.where, value):
                found.append(axis)
        return found

    def published_number(self, slot: Place) -> Published | None:
        """(table, row, column) of the published number, from TABLE, or from TABLE ROW COLUMN if the
        names differ; None if the paper has no such row or column.
        """
        text = self.specs.fill_placeholders(
            slot.words.get("published", self.table.published), slot.at
        )
        parts = [] if text is None else str(text).split()
        if len(parts) not in (0, 1, 3):
            raise slot.refuse(f"published: {text} is neither TABLE nor TABLE ROW COLUMN")
        if not parts:
            return None
        row, column = parts[1:] or slot.key
        try:
            printed = papers.is_printed(parts[0], row, column)
        except PipelineError as error:
            raise slot.refuse(str(error)) from None
        if not printed:
            self.table_plan.unprinted.append((parts[0], row, column))
        if printed:
            return (parts[0], row, column)
        return None

    def refuse_unprinted(self) -> None:
        """Raise PipelineError for a published table that no cell uses: a name is wrong, not a
        number unprinted. An inherited one may be about rows that this table does not have.
        """
        if "published" in self.table.inherited:
            return
        tables_used = set()
        for cell in self.table_plan.cells.values():
            if cell.published:
                tables_used.add(cell.published[0])
        for key, row, column in self.table_plan.unprinted:
            if key not in tables_used and papers.published_rows(key):
                kind, name, known = "row", row, papers.published_rows(key)
                if row in known:
                    kind, name, known = "column", column, papers.published_table(key)["columns"]
                problem = f"{key} has no {kind} {name!r}: {suggest(name, known)}"
                raise self.table.refuse("published", problem)

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
            return Item(
                at,
                tuple({(): self.add_score(slot, model, words, language)} for language in languages),
            )
        if slot.control:
            chooser = str(specs.fill_placeholders(slot.control.best_of, at))
        else:
            chooser = run
        choice = self.add_choice(slot, chooser, at, best)
        models = {
            tuple(point.values()): specs.add_spec(run, {**at, **point})
            for point in specs.axis_combinations(best)
        }
        candidate_scores = set()
        for scores in choice.candidates.values():
            for score in scores:
                candidate_scores.add(score)
        readings: list[dict[Candidate, ScoreRef]] = []
        for language in languages:
            candidates = {
                point: ScoreRef(model, words, language) for point, model in models.items()
            }
            beside, same_questions = (
                set(best) <= set(self.table.beside),
                {one.words for one in candidate_scores} == {words},
            )
            repeated = candidate_scores.issuperset(candidates.values()) or (
                beside and same_questions
            )  # in each draw
            if repeated:
                other = another_number(ScoreRef(run, words, language), metric, pair)
                if other:
                    problem = (
                        f"{other} is not what best compares: leave it out, or choose by other"
                        " scores, by: ..."
                    )
                    raise slot.refuse(problem)
            reading: dict[Candidate, ScoreRef] = {}
            if not repeated:
                chosen = self.add_chosen(choice, run, at, models)
                reading[()] = self.add_score(slot, chosen, words, language)
            if repeated or beside:
                reading |= {
                    point: self.add_score(slot, model, words, language)
                    for point, model in models.items()
                }
            readings.append(reading)
        return Item(at, tuple(readings), choice.key)

    def fill_settings(self, slot: Place, words: Words, at: At) -> tuple[ScoreWords, list[str]]:
        """(eval, task and eval.KEY with the evaluation keys of `every`, languages) of a cell or a
        choice.
        """
        settings = scoring_words(words)
        for key, example in (("eval", "eval: mgsm_2shot"), ("in", 'in: "{language}"')):
            if settings.get(key) is None:
                raise slot.refuse(f"nothing says {key} of it: give score: {{{example}}}")
        languages = self.specs.fill_placeholders(settings.pop("in"), at)
        filled = {
            key: self.specs.fill_placeholders(value, at)
            for key, value in {**self.every, **settings}.items()
        }
        return ScoreWords(sorted(filled.items())), list(map(str, as_list(languages)))

    def add_score(self, slot: Place, model: str, words: ScoreWords, language: str) -> ScoreRef:
        score = ScoreRef(model, words, language)
        first = next(iter(self.scores), score)
        for key in ONE_FOR_ALL:
            first_value, second_value = first.words.get(key), words.get(key)
            if first_value != second_value:
                problem = (
                    f"{key}={second_value} for {model} and {first_value} for {first.model}: one for"
                    " all rows, in every"
                )
                raise slot.refuse(problem)
        self.scores[score] = None
        return score

    def add_choice(self, slot: Place, run: str, at: At, best: Axes) -> Choice:
        """Add the choice of a slot: one per value of the axes that it fixes and of `each`, a mean
        over the others.
        """
        specs, words = self.specs, slot.choosing
        own_axes = {*specs.axes_of(run), *self.axes_named_by(slot, *self.every.values(), words)}
        single_values = {}
        for axis, values in specs.axes.items():
            if len(values) == 1:
                single_values[axis] = next(iter(values))
        fixed = {
            **single_values,
            **slot.at,
            **{axis: at[axis] for axis in slot.each if axis in at},
            **slot.by.at,
        }
        fixed = {axis: fixed[axis] for axis in specs.axes if axis in fixed and axis in own_axes}
        parts = [f"{axis}={value}" for axis, value in fixed.items()]
        parts += [f"{key}={self.fill_pooled(slot, value, fixed)}" for key, value in words.items()]
        key = " ".join(["best", "+".join(best), "of", run, *parts])
        if key not in self.table_plan.choices:
            pooled = []
            for axis in specs.axes:
                if axis in own_axes and axis not in fixed and axis not in best:
                    pooled.append(axis)
            specs.refuse_many([*best, *pooled])
            candidates: dict[Candidate, tuple[ScoreRef, ...]] = {}
            for candidate in specs.axis_combinations(best):
                scores: list[ScoreRef] = []
                for pool_point in specs.axis_combinations(pooled):
                    full = {**fixed, **pool_point, **candidate}
                    settings, languages = self.fill_settings(slot, words, full)
                    model = specs.add_spec(run, full)
                    scores += [
                        self.add_score(slot, model, settings, language) for language in languages
                    ]
                candidates[tuple(candidate.values())] = tuple(scores)
            self.table_plan.choices[key] = Choice(key, run, best, fixed, candidates)
        return self.table_plan.choices[key]

    def fill_pooled(self, slot: Place, value: Any, fixed: At) -> str:
        """Fill a word of a choice.

        If it names axes that the choice pools, all its values are joined by commas.
        """
        free = []
        for axis in self.axes_named_by(slot, value):
            if axis not in fixed:
                free.append(axis)
        return ",".join(
            dict.fromkeys(
                str(self.specs.fill_placeholders(value, {**fixed, **point}))
                for point in self.specs.axis_combinations(free)
            )
        )

    def add_chosen(self, choice: Choice, run: str, at: At, models: dict[Candidate, str]) -> str:
        own_axes = []
        for axis in self.specs.axes_of(run):
            if axis not in choice.axes:
                own_axes.append(axis)
        controlled = [run] if run != choice.run else []
        key = " ".join(
            [choice.key, "for", *controlled, *(f"{axis}={at[axis]}" for axis in own_axes)]
        )
        self.table_plan.chosen.setdefault(key, Chosen(key, choice.key, models))
        return key
