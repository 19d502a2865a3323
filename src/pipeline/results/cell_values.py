"""The outcome of a table: the number of each cell, read from finished runs, and the choices that were made.

Nothing is scored here, and no cell is skipped: one that cannot be filled has a reason. Numbers are percent; BLEU,
chrF++ and facts of trainings keep their own scale.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.papers import published as papers
from pipeline.report.load.scores import percent_factor
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import (
    REDUCERS,
    ROWS_CHANGED,
    Candidate,
    Cell,
    ScoreRef,
    Values,
    cell_value,
    difference_of,
    item_value,
    reduce_items,
)
from pipeline.tables.planned_runs import primary_value, reason_left_out, score_rows

SPM_MODEL = (
    "every.eval.spm_model=FILE, what sacrebleu -tok flores200 fetches to ~/.sacrebleu/models/flores200sacrebleuspm"
)
VALIDATIONS = ("starting_validation_loss", "ending_validation_loss")


class NoScore(PipelineError):
    """A missing number, with the reason."""


@dataclass(frozen=True)
class Number:
    """The content of a cell. n: how many numbers it was reduced from; runs: the folders that these were read from."""

    value: float | None = None
    n: int = 0
    published: float | None = None
    suspect: str | None = None  # why the published number is doubtful
    missing: str = ""
    runs: tuple[Path, ...] = ()


@dataclass(frozen=True)
class MadeChoice:
    """A choice: the mean of each candidate, and the winner; None while scores are missing."""

    means: dict[Candidate, float | None]
    winner: Candidate | None


@dataclass
class Outcome:
    """The cells and choices of a table. failed: name of a run -> why it failed."""

    table: BoundTable
    failed: Mapping[str, str] = field(default_factory=dict)
    cells: dict[tuple[str, str], Number] = field(default_factory=dict)
    choices: dict[str, MadeChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, table: BoundTable, failed: Mapping[str, str]) -> Outcome:
        """The outcome of a table, as far as its runs are finished."""
        outcome = cls(table, failed)
        for place, cell in table.plan.cells.items():
            outcome.cells[place] = outcome.number_in(cell)
        for key, choice in table.plan.choices.items():
            means: dict[Candidate, float | None] = {}
            for candidate, scores in choice.candidates.items():
                runs = [table.evaluations.get(score) for score in scores]
                numbers = [primary_value(run) if run else None for run in runs]
                finished = [number for number in numbers if number is not None]
                means[candidate] = statistics.fmean(finished) if len(finished) == len(numbers) else None
            outcome.choices[key] = MadeChoice(means, table.winners[key])
        return outcome

    # ------------------------------------------------------------------------------------------ cells

    def number_in(self, cell: Cell) -> Number:
        printed, suspect = None, None
        if cell.published:
            printed, suspect = papers.published_value(*cell.published), papers.reason_for_doubt(*cell.published)
        runs: dict[Path, None] = {}
        if any(item.model is not None for item in cell.items) and cell.fact is None:  # a figure
            models = [self.table.training_of(item.model) for item in cell.items if item.model is not None]
            folders = tuple(run.folder for run in models if run)
            return Number(None, len(folders), printed, suspect, "a figure, in its run's folder", folders)
        try:
            number, n = self.reduce_cell(cell, runs)
            return Number(number, n, printed, suspect, "", tuple(runs))
        except NoScore as error:
            return Number(None, 0, printed, suspect, str(error), tuple(runs))

    def reduce_cell(self, cell: Cell, runs: dict[Path, None]) -> tuple[float, int]:
        """(number of a cell, how many it was reduced from); their folders are added to `runs`."""
        plan = self.table.plan
        if cell.of:
            parts = [self.reduce_cell(plan.cells[row, cell.column], runs) for row in cell.of]
            return REDUCERS[cell.reduce[0][0]]([number for number, _ in parts]), sum(n for _, n in parts)
        values = self.score_numbers(cell, runs)
        for item in cell.items:  # the first missing one raises its reason
            item_value(plan, item, values)
        return cell_value(plan, cell, values), sum(max(1, len(item.readings)) for item in cell.items)

    def values_along(self, cell: Cell, axis: str) -> list[float]:
        """The number of a cell at each value of an axis that it is reduced over, all else reduced as it is."""
        plan = self.table.plan
        if cell.of:
            rows = [self.values_along(plan.cells[row, cell.column], axis) for row in cell.of]
            return [REDUCERS[cell.reduce[0][0]](parts) for parts in zip(*rows, strict=True)]
        values = self.score_numbers(cell, {})
        numbers = reduce_items(
            cell, lambda _, item: item_value(plan, item, values), lambda how, parts: REDUCERS[how](parts), [axis]
        )
        return [number for at, number in numbers if axis in at]

    def score_numbers(self, cell: Cell, runs: dict[Path, None]) -> Values:
        """Function from a score (or a spec with a fact) under a cell to its number; adds the folders read to `runs`."""
        own_scores = {score for item in cell.items for reading in item.readings for score in reading.values()}

        def read_number(key: ScoreRef | str) -> float:
            if isinstance(key, str):
                return self.read_fact(key, self.table.training_of(key), cell.fact or "", runs)
            if cell.fact is not None and key in own_scores:  # a merge in memory
                return self.read_fact(key, self.table.evaluations.get(key), cell.fact, runs)
            metric, pair = (cell.metric, cell.pair) if key in own_scores else (None, None)
            return self.read_score(key, metric, pair, runs if key in own_scores else {})

        return read_number

    def read_score(self, score: ScoreRef, metric: str | None, pair: str | None, runs: dict[Path, None]) -> float:
        """One score: of a choice's candidate or of a cell. Raises NoScore if it is missing."""
        if parts := difference_of(score, metric):
            measure, subtracted = parts
            return self.read_score(score, measure, pair, runs) - self.read_score(subtracted, measure, pair, runs)
        table = self.table
        run = table.evaluations.get(score)
        if run is None:
            if score in table.problems:
                raise NoScore(table.problems[score])
            raise NoScore(f"{table.plan.chosen[score.model].choice} waits for its candidates' scores")
        runs[run.folder] = None
        if read_manifest(run.folder) is None:
            raise NoScore(f"{run.name} {self.failed.get(run.name, 'is not made yet')}")
        main_value = primary_value(run) if metric is None and pair is None else None
        rows = score_rows(run, metric, pair)
        if main_value is None and not rows:
            if reason := reason_left_out(run):
                raise NoScore(reason)
            remedy = f": give {SPM_MODEL}" if metric == "spbleu" else ""
            raise NoScore(f"{run.name} has no {metric or 'score'}{f' of {pair}' if pair else ''}{remedy}")
        number = statistics.fmean(row["value"] for row in rows) if main_value is None else main_value
        return number * (percent_factor(rows[0]["metric"]) if rows else 100)

    def read_fact(self, key: str | ScoreRef, run: Run | None, fact: str, runs: dict[Path, None]) -> float:
        """A number that a training, or the evaluation of a merge in memory, recorded. Raises NoScore if missing."""
        if run is None:
            raise NoScore(self.table.problems.get(key, "its run cannot be planned, or is still to be chosen"))
        runs[run.folder] = None
        manifest = read_manifest(run.folder)
        if manifest is None:
            raise NoScore(f"{run.name} {self.failed.get(run.name, 'is not made yet')}")
        reader = (
            validation_loss if fact in VALIDATIONS else percent_rows_changed if ROWS_CHANGED.fullmatch(fact) else None
        )
        value = reader(run, fact) if reader else manifest.facts.get(fact)
        if not isinstance(value, int | float):
            raise NoScore(f"{run.name} records no {fact}")
        return float(value)


def validation_loss(run: Run, fact: str) -> float | None:
    """The validation loss of a training before its first step, or the last one; on a joint set, that of both sides."""
    log = run.folder / "log.jsonl"
    rows = read_jsonl(log) if log.is_file() else []
    losses = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if fact == "starting_validation_loss":
        losses = [point for point in losses if point[0] == 0]
    return losses[-1][1] if losses else None


def percent_rows_changed(run: Run, fact: str) -> float | None:
    """Percent of rows whose change is above the threshold, in an analysis, as the published maps show it: the mean over
    the two-dimensional parameters of some columns and layers (rows_changed.attention.0-1,30-31)."""
    _, columns, layers = fact.split(".")
    ends = [map(int, span.split("-")) for span in layers.split(",")]
    numbers = {str(layer) for first, last in ends for layer in range(first, last + 1)}
    kinds = ("attention", "feed_forward") if columns == "all" else (columns,)
    with open(run.folder / "delta.csv", encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["column"].startswith(kinds) and row["layer"] in numbers]
    shares = [float(row["share"]) for row in rows]
    return 100 * statistics.fmean(shares) if {row["layer"] for row in rows} == numbers else None
