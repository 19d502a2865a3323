"""The outcome of a table: the number of each cell, read from finished runs, and the choices that were made.

Nothing is scored here, and no cell is skipped: one that cannot be filled has a reason. Numbers are percent; BLEU,
chrF++ and facts of trainings keep their own scale.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.papers import published as papers
from pipeline.report.expression import evaluate, leaf_cells, scores_under
from pipeline.report.load.contents import CellResult
from pipeline.report.private import without_private
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import ROWS_CHANGED, Cell, ScoreRef, TablePlan, difference_of
from pipeline.tables.planned_runs import reason_left_out, score_rows

SPM_MODEL = (
    "every.eval.spm_model=FILE, what sacrebleu -tok flores200 fetches to ~/.sacrebleu/models/flores200sacrebleuspm"
)
VALIDATIONS = ("starting_validation_loss", "ending_validation_loss")


class NoScore(PipelineError):
    """A missing number, with the reason."""


@dataclass
class Outcome:
    """The cells of a table. failed: name of a run -> why it failed."""

    table: BoundTable
    failed: Mapping[str, str] = field(default_factory=dict)
    cells: dict[tuple[str, str], CellResult] = field(default_factory=dict)

    @classmethod
    def of(cls, table: BoundTable, failed: Mapping[str, str]) -> Outcome:
        """The outcome of a table, as far as its runs are finished."""
        outcome = cls(table, failed)
        for place, cell in table.plan.cells.items():
            outcome.cells[place] = outcome.number_in(cell)
        return outcome

    # ------------------------------------------------------------------------------------------ cells

    def number_in(self, cell: Cell) -> CellResult:
        """A cell with its number, or with the reason why it has none."""
        result = CellResult(cell.row, cell.column)
        if cell.published:
            published, suspect = papers.published_value(*cell.published), papers.reason_for_doubt(*cell.published)
            result = replace(result, published=published, suspect=suspect)
        runs: dict[Path, None] = {}
        if any(item.model is not None for item in cell.items) and cell.fact is None:  # a figure
            models = [self.table.training_of(item.model) for item in cell.items if item.model is not None]
            folders = [run.folder.name for run in models if run]
            return replace(result, n=len(folders), missing="a figure, in its run's folder", runs=folders)
        try:
            value = float(self.evaluate(cell, runs))
            result = replace(result, value=value, n=count_numbers(self.table.plan, cell))
        except NoScore as error:
            result = replace(result, missing=without_private(str(error)))
        return replace(result, runs=[folder.name for folder in runs])

    def evaluate(self, cell: Cell, runs: dict[Path, None], axes: Sequence[str] = ()) -> Any:
        """The number of a cell, or (levels ...) numbers at each value of `axes`; adds the folders that were read."""
        own = {(leaf.row, leaf.column, score) for leaf, score in scores_under(self.table.plan, cell)}

        def number(at: Cell, key: ScoreRef | str) -> float:
            return self.number_of(at, key, runs, (at.row, at.column, key) in own)

        return evaluate(self.table.plan, cell, number, number, axes)[1]

    def number_of(self, cell: Cell, key: ScoreRef | str, runs: dict[Path, None], is_own: bool = True) -> float:
        """The number of a score (or a spec with a fact) under a cell; adds the folder read to `runs`. is_own: the cell
        shows it; else a choice uses it."""
        if isinstance(key, str):
            return self.read_fact(key, self.table.training_of(key), cell.fact or "", runs)
        if cell.fact is not None and is_own:  # a merge in memory
            return self.read_fact(key, self.table.evaluations.get(key), cell.fact, runs)
        metric, pair = (cell.metric, cell.pair) if is_own else (None, None)
        return self.read_score(key, metric, pair, runs if is_own else {})

    def read_score(self, score: ScoreRef, metric: str | None, pair: str | None, runs: dict[Path, None]) -> float:
        """One score: of a choice's candidate or of a cell. Raises NoScore if it is missing."""
        if parts := difference_of(score, metric):
            measure, subtracted = parts
            return self.read_score(score, measure, pair, runs) - self.read_score(subtracted, measure, pair, runs)
        run, _ = self.finished(score, self.table.evaluations.get(score), runs)
        rows = score_rows(run, metric, pair)
        if not rows:
            if reason := reason_left_out(run):
                raise NoScore(reason)
            remedy = f": give {SPM_MODEL}" if metric == "spbleu" else ""
            raise NoScore(f"{run.name} has no {metric or 'score'}{f' of {pair}' if pair else ''}{remedy}")
        return statistics.fmean(row["value"] for row in rows) * percent_factor(rows[0]["metric"])

    def finished(self, key: str | ScoreRef, run: Run | None, runs: dict[Path, None]) -> tuple[Run, Manifest]:
        """The run of a score, or of a spec with a fact; adds its folder to `runs`. Raises NoScore unless it is there
        and finished."""
        if run is None:
            waits = "its run cannot be planned, or is still to be chosen"
            if isinstance(key, ScoreRef) and key.model in self.table.plan.chosen:
                waits = f"{self.table.plan.chosen[key.model].choice} waits for its candidates' scores"
            raise NoScore(self.table.problems.get(key, waits))
        runs[run.folder] = None
        manifest = read_manifest(run.folder)
        if manifest is None:
            raise NoScore(f"{run.name} {self.failed.get(run.name, 'is not made yet')}")
        return run, manifest

    def read_fact(self, key: str | ScoreRef, run: Run | None, fact: str, runs: dict[Path, None]) -> float:
        """A number that a training, or the evaluation of a merge in memory, recorded. Raises NoScore if missing."""
        run, manifest = self.finished(key, run, runs)
        reader = (
            validation_loss if fact in VALIDATIONS else percent_rows_changed if ROWS_CHANGED.fullmatch(fact) else None
        )
        value = reader(run, fact) if reader else manifest.facts.get(fact)
        if not isinstance(value, int | float):
            raise NoScore(f"{run.name} records no {fact}")
        return float(value)


def count_numbers(plan: TablePlan, cell: Cell) -> int:
    """How many numbers a cell is reduced from."""
    return sum(max(1, len(item.readings)) for leaf in leaf_cells(plan, cell) for item in leaf.items)


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
