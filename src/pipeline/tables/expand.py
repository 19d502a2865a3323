"""A table as a plan: the runs that its cells reach, what is scored on which, what is chosen, and how cells are reduced.

Pure: words in, words out. Making runs of words, scoring them and drawing cells is for others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.papers import published as papers
from pipeline.tables.plan import (
    ROWS_CHANGED,
    Candidate,
    Cell,
    Choice,
    Chosen,
    Item,
    Pairs,
    Published,
    ScoreRef,
    TablePlan,
)
from pipeline.tables.run_specs import At, Reads, Specs
from pipeline.tables.schema import Side, Table, Words

SCORES = "scores"  # as every's words name the cells' evaluations
ONE_FOR_ALL = ("eval.dtype", "eval.backend")  # where scores differ in these, numerics are compared and not models


def expand(table: Table, reads: Reads) -> TablePlan:
    """The plan of a table. `reads`: what each stage reads, groups and keys.

    Raises:
        PipelineError: a word that means nothing, or does nothing, naming file and row.
    """
    return Expansion(table, reads).plan()


# ---------------------------------------------------------------------------------------------------- rows x columns


class Place:
    """Where a row and a column meet: the words of both, the row's before the column's before those of `score`."""

    def __init__(self, table: Table, row: Side, row_name: str, row_at: At, column: Side, name: str, at: At) -> None:
        self.key, self.row, self.sides = (row_name, name), row, (row, column, table.score)
        self.where = f"row {row_name!r}, column {name!r}"
        self.meet = all(row_at[axis] == at[axis] for axis in row_at.keys() & at.keys())
        self.at = {**table.score.at, **at, **row_at}
        self.words: Words = {**table.score.words, **column.words, **row.words}
        self.reduce = next((side.reduce for side in self.sides if side.reduce), [])
        chooser = next((side for side in self.sides if side.best), Side(""))
        self.best, self.each, self.by = chooser.best, chooser.each, chooser.by or Side("")
        self.choosing: Words = scoring({**table.score.words, **self.by.words})


def scoring(words: Mapping[str, Any]) -> Words:
    """Of the words of a cell those that say what is scored, and in which language."""
    names = ("eval", "task", "in", "data_root", "where_possible")
    return {key: value for key, value in words.items() if key in names or key.startswith("eval.")}


class Expansion:
    def __init__(self, table: Table, reads: Reads) -> None:
        self.table, self.specs = table, Specs(table, reads)
        self.found = TablePlan(table, self.specs.made)
        self.every = {key: value for key, value in table.every.items() if self.specs.read_by_eval(key)}
        self.scores: dict[ScoreRef, None] = {}  # a set that keeps its order
        self.done: set[tuple[int, str, str]] = set()  # (a side, its word, an axis) that had a part in a cell

    def plan(self) -> TablePlan:
        table, found = self.table, self.found
        rows = [(side, *one) for side in table.rows for one in self.named("row", side)]
        columns = [(side, *one) for side in table.columns for one in self.named("column", side)]
        found.rows, found.columns = self.unique("row", rows), self.unique("column", columns)
        for row, column in itertools.product(rows, columns):
            place = Place(table, *row, *column)
            if place.meet and self.filled(row[0], column[0], column[1]):
                self.cell(place)
        self.refuse_idle()
        found.scores = list(self.scores)
        found.own = self.own()
        for cell in [cell for cell in found.cells.values() if cell.of]:
            if any((row, cell.column) not in found.cells for row in cell.of):
                del found.cells[cell.row, cell.column]
        for one in (name for pair in table.compare for name in pair):
            if one not in found.columns and one not in found.rows:
                raise table.refuse(
                    "compare", f"{one!r} is no column or row: {suggest(one, found.columns + found.rows)}"
                )
        found.compare = table.compare
        self.refuse_unprinted()
        return found

    def named(self, kind: str, side: Side) -> list[tuple[str, At]]:
        """The names of a row or column, one for each value of the axes that are in it, with these values."""
        axes = dict.fromkeys(self.specs.names(f"{kind} {side.name!r}", side.name))
        ats = [{**side.at, **at} for at in self.specs.product(axis for axis in axes if axis not in side.at)]
        return [(str(self.specs.fill(side.name, at)), at) for at in ats]

    def unique(self, kind: str, named: list[tuple[Side, str, At]]) -> list[str]:
        names = [name for _, name, _ in named]
        for name in names:
            if names.count(name) > 1:
                raise self.table.refuse(f"{kind} {name!r}", f"there are two {kind}s of that name")
        return names

    def filled(self, row: Side, column: Side, name: str) -> bool:
        """Whether a row has a cell in a column: its `columns` say so by name, as written or as it stands."""
        written = [side.name for side in self.table.columns]
        for one in row.columns:
            if one not in written and one not in self.found.columns:
                problem = f"columns: {one!r} is no column: {suggest(one, self.found.columns)}"
                raise self.table.refuse(f"row {row.name!r}", problem)
        return not row.columns or name in row.columns or column.name in row.columns

    def cell(self, place: Place) -> None:
        """Add what stands in a place, if anything does."""
        specs, at = self.specs, place.at
        if of := self.rows_of(place):
            how = place.reduce[0][0]
            self.found.cells[place.key] = Cell(*place.key, reduce=((how, ()),), of=of, published=self.published(place))
            return
        run = self.run(place)
        if run is None:
            return
        live = specs.runs[run].kind == "merge"  # its facts are recorded where it is scored
        scored = specs.runs[run].words.get("stage") != "analyze" and ("fact" not in place.words or live)
        measured = [place.words.get(key) for key in ("metric", "pair", "fact")]
        if scored:
            measured += [*self.every.values(), *scoring(place.words).values()]
        of_run = set(specs.axes_of(run))
        own_axes = (
            of_run | set(self.names(place, *measured)) | (set(place.each) & set(self.names(place, place.choosing)))
        )
        best = tuple(axis for axis in specs.axes if axis in place.best and axis in of_run and axis not in at)
        free = [axis for axis in specs.axes if axis in own_axes and axis not in at and axis not in best]
        reduce = tuple((how, tuple(axis for axis in axes if axis in free)) for how, axes in place.reduce)
        self.mark(place, own_axes | set(self.names(place, place.words.get("run"))), best)
        reduced = {axis for _, axes in reduce for axis in axes}
        if unreduced := [axis for axis in free if axis not in reduced and len(specs.axes[axis]) > 1]:
            problem = f"{' and '.join(unreduced)} left open: name in mean, max, min or best, or give one value"
            raise self.table.refuse(place.where, problem)
        items = [self.item(place, run, {**at, **point}, best, scored) for point in specs.product(free)]
        metric, pair, fact = (specs.fill(place.words.get(key), at) for key in ("metric", "pair", "fact"))
        if str(fact).startswith("rows_changed") and not ROWS_CHANGED.fullmatch(str(fact)):
            problem = f"fact {fact}: rows changed are those of attention, feed_forward or all in layers, as "
            raise self.table.refuse(place.where, f"{problem}rows_changed.attention.0-1,30-31")
        self.found.cells[place.key] = Cell(
            *place.key,
            items,
            tuple(point for point in reduce if point[1]),
            (),
            metric,
            pair,
            fact,
            self.published(place),
        )

    def rows_of(self, place: Place) -> tuple[str, ...]:
        """The rows that a row is reduced over; () where it is over axes."""
        rows, axes = self.found.rows, self.specs.axes
        named = [name for side in place.sides for _, names in side.reduce for name in names]
        for name in named:
            if name not in axes and (name not in rows or len(place.row.reduce) != 1):
                problem = f"{name!r} is neither an axis nor a row to reduce over: {suggest(name, [*axes, *rows])}"
                raise self.table.refuse(place.where, problem)
        over = place.row.reduce[0][1] if place.row.reduce else ()
        return over if over and all(name in rows and name not in axes for name in over) else ()

    def run(self, place: Place) -> str | None:
        """The run of a place; None where it is null."""
        word, runs = place.words.get("run", ""), self.specs.runs
        if open_axes := [axis for axis in self.names(place, word) if axis not in place.at]:
            raise self.table.refuse(place.where, f"{word} names {open_axes[0]}, which neither of them fixes")
        run = self.specs.fill(word, place.at)
        if run is not None and run not in runs:
            problem = f"{run!r} is no run: {suggest(run, runs)}" if run else f"it names no run: {suggest(run, runs)}"
            raise self.table.refuse(place.where, problem)
        return None if run is None else str(run)

    def names(self, place: Place, *values: Any) -> list[str]:
        return [axis for value in values for axis in self.specs.names(place.where, value)]

    def published(self, place: Place) -> Published | None:
        """TABLE, or TABLE ROW COLUMN where the table says other names than the cell has; None where the paper has no
        such row or column."""
        told = self.specs.fill(place.words.get("published", self.table.published), place.at)
        words = [] if told is None else str(told).split()
        if len(words) not in (0, 1, 3):
            raise self.table.refuse(place.where, f"published: {told} is neither TABLE nor TABLE ROW COLUMN")
        if not words:
            return None
        row, column = words[1:] or place.key
        try:
            printed = papers.is_printed(words[0], row, column)
        except PipelineError as error:
            raise self.table.refuse(place.where, str(error)) from None
        if not printed:
            self.found.unprinted.append((words[0], row, column))
        return (words[0], row, column) if printed else None

    def refuse_unprinted(self) -> None:
        """Refuse a published table of which no row and column is meant: a name is wrong, not a number unprinted. One
        that is inherited may be of rows that this table does not have."""
        if "published" in self.table.inherited:
            return
        tables_used = {cell.published[0] for cell in self.found.cells.values() if cell.published}
        for key, row, column in self.found.unprinted:
            if key not in tables_used and papers.published_rows(key):
                columns = papers.published_table(key)["columns"]
                problem = (
                    f"{key} has no row {row!r}: {suggest(row, papers.published_rows(key))}"
                    if row not in papers.published_rows(key)
                    else f"{key} has no column {column!r}: {suggest(column, columns)}"
                )
                raise self.table.refuse("published", problem)

    # ------------------------------------------------------------------------------------------ what is scored

    def item(self, place: Place, run: str, at: At, best: tuple[str, ...], scored: bool) -> Item:
        specs = self.specs
        if not scored:
            return Item(at, model=specs.spec(run, at))
        words, languages = self.how(place, place.words, at)
        if not best:
            model = specs.spec(run, at)
            return Item(at, tuple({(): self.score(place, model, words, language)} for language in languages))
        choice = self.choice(place, run, at, best)
        models = {tuple(point.values()): specs.spec(run, {**at, **point}) for point in specs.product(best)}
        candidate_scores = {score for scores in choice.candidates.values() for score in scores}
        readings: list[dict[Candidate, ScoreRef]] = []
        for language in languages:
            each = {point: ScoreRef(model, words, language) for point, model in models.items()}
            if set(best) <= set(self.table.beside) or candidate_scores.issuperset(each.values()):
                readings.append({point: self.score(place, model, words, language) for point, model in models.items()})
            else:
                readings.append({(): self.score(place, self.chosen(choice, run, at, models), words, language)})
        return Item(at, tuple(readings), choice.key)

    def how(self, place: Place, words: Words, at: At) -> tuple[tuple[tuple[str, Any], ...], list[str]]:
        """(eval, task and eval.KEY with what `every` says of evaluations, languages) of a cell or a choice."""
        settings = scoring(words)
        for key, example in (("eval", "eval: mgsm_2shot"), ("in", 'in: "{language}"')):
            if settings.get(key) is None:
                raise self.table.refuse(place.where, f"nothing says {key} of it: give score: {{{example}}}")
        languages = self.specs.fill(settings.pop("in"), at)
        for key in self.every:
            (self.specs.own[key].append if key in settings else self.specs.given[key].add)(SCORES)
        filled = {key: self.specs.fill(value, at) for key, value in {**self.every, **settings}.items()}
        return tuple(sorted((key, frozen(value)) for key, value in filled.items())), [
            str(code) for code in (languages if isinstance(languages, list) else [languages])
        ]

    def score(self, place: Place, model: str, words: tuple[tuple[str, Any], ...], language: str) -> ScoreRef:
        score = ScoreRef(model, words, language)
        first = next(iter(self.scores), score)
        for key in ONE_FOR_ALL:
            first_value, second_value = dict(first.words).get(key), dict(words).get(key)
            if first_value != second_value:
                problem = (
                    f"{key}={second_value} for {model} and {first_value} for {first.model}: one for all rows, in every"
                )
                raise self.table.refuse(place.where, problem)
        self.scores[score] = None
        return score

    def choice(self, place: Place, run: str, at: At, best: tuple[str, ...]) -> Choice:
        """One choice for each value of what the place fixes and of `each`; the mean is over all else."""
        specs, words = self.specs, place.choosing
        own_axes = {*specs.axes_of(run), *self.names(place, *self.every.values(), words)}
        alone = {axis: next(iter(values)) for axis, values in specs.axes.items() if len(values) == 1}
        fixed = {**alone, **place.at, **{axis: at[axis] for axis in place.each if axis in at}, **place.by.at}
        fixed = {axis: fixed[axis] for axis in specs.axes if axis in fixed and axis in own_axes}
        parts = [f"{axis}={value}" for axis, value in fixed.items()]
        parts += [f"{key}={self.said(place, value, fixed)}" for key, value in words.items()]
        key = " ".join(["best", "+".join(best), "of", run, *parts])
        if key not in self.found.choices:
            pooled = [axis for axis in specs.axes if axis in own_axes and axis not in fixed and axis not in best]
            candidates: dict[Candidate, tuple[ScoreRef, ...]] = {}
            for one in specs.product(best):
                scores: list[ScoreRef] = []
                for pool_point in specs.product(pooled):
                    full = {**fixed, **pool_point, **one}
                    how, languages = self.how(place, words, full)
                    scores += [self.score(place, specs.spec(run, full), how, language) for language in languages]
                candidates[tuple(one.values())] = tuple(scores)
            self.found.choices[key] = Choice(key, run, best, fixed, candidates)
        return self.found.choices[key]

    def said(self, place: Place, value: Any, fixed: At) -> str:
        """A word of a choice, filled; all that it comes to where it names axes that the choice is pooled over."""
        free = [axis for axis in self.names(place, value) if axis not in fixed]
        return ",".join(
            dict.fromkeys(str(self.specs.fill(value, {**fixed, **point})) for point in self.specs.product(free))
        )

    def chosen(self, choice: Choice, run: str, at: At, models: dict[Candidate, str]) -> str:
        own_axes = [axis for axis in self.specs.axes_of(run) if axis not in choice.axes]
        key = " ".join([choice.key, "for", *(f"{axis}={at[axis]}" for axis in own_axes)])
        self.found.chosen.setdefault(key, Chosen(key, choice.key, models))
        return key

    # ------------------------------------------------------------------------------------------ words that do nothing

    def own(self) -> dict[str, list[str]]:
        """Of the command line's words for every run, who says his own; one that reaches none is refused."""
        planned = {SCORES, *(spec.run for spec in self.specs.made.values())}
        overriders = {}
        for key in self.table.asked:
            names = [name for name in dict.fromkeys(self.specs.own[key]) if name in planned]
            if not self.specs.given[key] & planned:
                hint = f"of {', '.join(names)}, which say their own" if names else "that is planned"
                raise self.table.refuse("every", f"{key} reaches no run {hint}: leave it out, or change the table")
            if names:
                overriders[key] = names
        return overriders

    def mark(self, place: Place, own_axes: set[str], best: tuple[str, ...]) -> None:
        """Remember which words about axes had a part in this cell."""
        for side in place.sides:
            for word, axes in about_axes(side):
                has = set(best) if word == "best" else own_axes | set(best)
                self.done.update((id(side), word, axis) for axis in axes if axis in has)

    def refuse_idle(self) -> None:
        table = self.table
        sides = [("row", side) for side in table.rows] + [("column", side) for side in table.columns]
        for kind, side in [*sides, ("score", table.score)]:
            for word, axes in about_axes(side):
                for axis in axes:
                    if (id(side), word, axis) not in self.done:
                        setting = f"{axis}={side.at[axis]}" if word == "at" else f"{word} names {axis}"
                        raise table.refuse(f"{kind} {side.name!r}", f"{setting}, and no run in it has that axis")
        for axis in table.axes:
            if axis not in self.specs.used and axis not in table.inherited:
                raise table.refuse(f"axis {axis!r}", "no run, row or column names it: leave it out")


def frozen(value: Any) -> Any:
    return Pairs(value.items()) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def about_axes(side: Side) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(word, axes) of what a row or column says of axes that its runs must have; a mean of one number is harmless."""
    yield "at", tuple(side.at)
    yield "best", side.best
    yield "each", side.each
