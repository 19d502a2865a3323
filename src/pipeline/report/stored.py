"""The stored scores, answers and facts of a table's runs: the input of its cells and comparisons.

A cell that cannot be filled has a reason.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import find_benchmark, is_measure
from pipeline.data.rows import read_jsonl
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.hub.addresses import without_credentials
from pipeline.launch.work import BLOCKED
from pipeline.report.expression import evaluate, lines_of, scores_of
from pipeline.report.frame import (
    CorpusFrame,
    Frame,
    NoScore,
    Translations,
    answer_matrix,
    corpus_matrix,
)
from pipeline.report.load.answers import Answers, Place, Vector
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import Run
from pipeline.stats.statistics import is_mean_of
from pipeline.stats.translations import CORPUS_METRICS
from pipeline.tables.plan import ROWS_CHANGED, Cell, ScoreRef, TablePlan, difference_of, task_of
from pipeline.tables.planned_runs import Planning, reason_left_out, score_rows

if TYPE_CHECKING:
    import numpy as np

SPM_MODEL = (
    "every.eval.spm_model=FILE, the file that sacrebleu -tok flores200 fetches to"
    " ~/.sacrebleu/models/flores200sacrebleuspm"
)
VALIDATIONS = ("starting_validation_loss", "ending_validation_loss")


def page_text(text: str, runs_dir: str | Path) -> str:
    """Return a message as the page shows it.

    Credentials are removed, and runs are named relative to runs_dir.
    """
    beginning = rf"(?<![\w./-]){re.escape(str(runs_dir))}/"
    return re.sub(beginning, "", str(without_credentials(text)))


def first_failure(name: str, failed: Mapping[str, str]) -> str:
    """Return the run that caused a failure: the run, or the first of its parents that failed.

    `failed` has the reason of each failed run.
    """
    while (reason := failed.get(name, "")).startswith(BLOCKED):
        name = reason.removeprefix(BLOCKED).removesuffix(" failed")
    return name


@dataclass
class StoredAnswers:
    """The scores, answers and facts under a table.

    Attributes:
        table: The table's plan and runs.
        failed: The name of a run -> why it failed.
        damaged: The name of a run -> what was changed after it was written.
        answers: From `read_answers`.
    """

    table: Planning
    failed: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    answers: dict[Place, Answers] = field(default_factory=dict)

    # --- numbers ---

    def value(self, cell: Cell, keep: Sequence[str] = ()) -> np.ndarray:
        """Return the number of a cell, or (levels ...) numbers at each value of the axes `keep`.

        Numbers are percent, but BLEU, chrF++, bits and facts have their usual scale.

        Raises:
            NoScore: If a score is missing.
        """
        import numpy as np

        plan = self.table.plan
        shown = {line.score for line in lines_of([cell])}

        def number(score: Any) -> np.ndarray:
            if isinstance(score, str) or (cell.fact and score in shown):
                return np.array([self.fact(cell, score)])
            if score in shown:
                return np.array([self.number(score, cell.metric, cell.pair)])
            return np.array([self.number(score)])  # the choice's own metric

        return evaluate(plan, cell, number, number, keep)[..., 0]

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        """Return one score.

        Raises:
            NoScore: If it is missing.
        """
        difference = difference_of(score, metric)
        if difference:
            measure, subtracted = difference
            return self.number(score, measure, pair) - self.number(subtracted, measure, pair)
        run = self.finished(score)
        rows = score_rows(run, metric, pair)
        values = []
        for row in rows:
            if row.value is not None:
                values.append(row.value)
        if rows and len(values) == len(rows):
            return statistics.fmean(values) * percent_factor(rows[0].metric)
        reason = reason_left_out(run)
        if reason:
            raise NoScore(reason)
        missing = metric or "score"
        if rows:
            missing = f"finite {missing}"
        if pair:
            missing += f" of {pair}"
        if metric == "spbleu":
            missing += f": give {SPM_MODEL}"
        raise NoScore(f"{run.name} has no {missing}")

    def rows_of(self, score: ScoreRef, cell: Cell) -> list[ScoreRow]:
        """Return the stored scores that a cell shows; empty if the run is not finished."""
        run = self.table.evaluation_of(score)
        if run and run.name not in self.damaged:
            return score_rows(run, cell.metric, cell.pair)
        return []

    def fact(self, cell: Cell, key: ScoreRef | str) -> float:
        """Return a number that a training, or the evaluation of a merge in memory, recorded.

        Raises:
            NoScore: If it is missing.
        """
        fact, run = cell.fact or "", self.finished(key)
        value = None
        if fact in VALIDATIONS:
            value = validation_loss(run, fact)
        elif ROWS_CHANGED.fullmatch(fact):
            value = percent_rows_changed(run, fact)
        else:
            manifest = read_manifest(run.folder)
            if manifest:
                value = manifest.facts.get(fact)
        if not isinstance(value, int | float):
            raise NoScore(f"{run.name} records no {fact}")
        return float(value)

    def finished(self, key: ScoreRef | str) -> Run:
        """Return the run of a score, or of a spec with a fact.

        Raises:
            NoScore: If there is no run, or if it is unfinished.
        """
        run = self.table.run_of(key)
        if run is None:
            waits = "its run cannot be planned, is still to be chosen, or is no run of the table"
            if isinstance(key, ScoreRef) and key.model in self.table.plan.chosen:
                choice = self.table.plan.chosen[key.model].choice
                waits = f"{choice} waits for its candidates' scores"
            raise NoScore(self.table.problems.get(key, waits))
        if not (run.folder / MANIFEST).is_file():
            name = first_failure(run.name, self.failed)
            if name in self.failed:
                raise NoScore(f"{name} failed: {self.failed[name]}")
            raise NoScore(f"{name} is not made yet")
        if run.name in self.damaged:
            raise NoScore(self.damaged[run.name])
        return run

    # --- answers ---

    def frame(self, plan: TablePlan, cells: Sequence[Cell], metric: str) -> Frame:
        """Return the frame of the answers under some cells.

        Raises:
            NoScore: If a score has no answers.
        """
        keys = scores_of(plan, cells)
        rows = {key: row for row, key in enumerate(keys)}
        if metric in CORPUS_METRICS:
            translations = {key: self.read_translations(*key) for key in keys}
            matrix, sentences = corpus_matrix(metric, translations)
            return CorpusFrame(plan, cells, rows, matrix, sentences=sentences)
        answers = {key: self.scores_by_question(key[0], metric, key[1]) for key in keys}
        benchmark = find_benchmark(task_of(keys[0][0]))
        bounded = not is_measure(metric)
        groups: dict[Any, Any] = {}
        if benchmark is not None and benchmark.of_harness:
            # the range of a metric of the harness is only known from its answers
            numbers = chain.from_iterable(of_score.values() for of_score in answers.values())
            is_share = all(0 <= value <= 1 for value in numbers)
            bounded = is_share and percent_factor(metric) == 100
        if benchmark is not None and benchmark.passage is not None:
            for key in keys:
                groups |= self.groups_of(*key)
        return Frame(plan, cells, rows, answer_matrix(answers, groups), bounded)

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """Return question -> score, which is the number that tables show divided by 100.

        Raises:
            NoScore: For an unfinished run, or without such answers.
        """
        difference = difference_of(score, metric)
        if difference:
            measure, subtracted = difference
            values = self.scores_by_question(score, measure, pair)
            subtrahends = self.scores_by_question(subtracted, measure, pair)
            differences = {}
            for question, value in values.items():
                if question in subtrahends:
                    differences[question] = value - subtrahends[question]
            return differences
        answers = self.answers_in(score, pair or score.language)
        run = self.finished(score)
        benchmark = find_benchmark(run.config.eval.tasks[0].task)
        scale = percent_factor(metric) / 100
        stored = {key: scale * value for key, value in answers.by_question(metric).items()}
        values_of_all = list(stored.values())
        if benchmark and benchmark.of_harness:
            shown = self.number(score, metric, pair)
            if not is_mean_of(shown / 100, values_of_all):
                # the task computes another function of them, such as a perplexity
                raise NoScore(f"{metric} is of all answers together, not of each")
        if not all(map(math.isfinite, values_of_all)):
            raise NoScore(f"{run.name} has an answer whose {metric} is not a finite number")
        return stored

    def answers_in(self, score: ScoreRef, where: str) -> Answers:
        """Return the answers of a score in a language or pair.

        Raises:
            NoScore: If they were not stored.
        """
        run = self.finished(score)
        task = run.config.eval.tasks[0].task
        place = (run.name, task, where)
        if place not in self.answers:
            raise NoScore(f"{run.name} kept no answers of {task}.{where}")
        return self.answers[place]

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[Any, Any]:
        """Return doc_id -> the passage that the question is about."""
        return self.answers_in(score, pair or score.language).groups

    def read_translations(self, score: ScoreRef, pair: str | None) -> dict[str, Translations]:
        """Return pair -> doc_id -> (reference, response).

        Without a pair, these are the pairs of the score's number.
        """
        pairs = {pair} if pair else {row.where for row in score_rows(self.finished(score))}
        return {where: self.answers_in(score, where).texts for where in sorted(pairs)}


def validation_loss(run: Run, fact: str) -> float | None:
    """Return the validation loss of a training, before its first step or the last one.

    For a joint set it is the mean of the losses of both sides.
    """
    log = run.folder / "log.jsonl"
    if not log.is_file():
        return None
    loss = None
    for row in read_jsonl(log):
        if "validation_loss" not in row:
            continue
        if fact != "starting_validation_loss" or row["step"] == 0:
            loss = row["validation_loss"]
    return loss


def percent_rows_changed(run: Run, fact: str) -> float | None:
    """Return the percent of rows with a change above the threshold of an analysis.

    This is the mean over the two-dimensional parameters of some columns and layers, like in the
    published maps. None unless the analysis has all of these layers.

    `fact` is a text such as rows_changed.attention.0-1,30-31.
    """
    _, columns, spans = fact.split(".")
    layers: set[str] = set()
    for span in spans.split(","):
        first, last = map(int, span.split("-"))
        layers |= {str(layer) for layer in range(first, last + 1)}
    kinds: tuple[str, ...] = (columns,)
    if columns == "all":
        kinds = ("attention", "feed_forward")
    shares = []
    found = set()
    with open(run.folder / "delta.csv", encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["column"].startswith(kinds) and row["layer"] in layers:
                found.add(row["layer"])
                shares.append(float(row["share"]))
    if found != layers:
        return None
    return 100 * statistics.fmean(shares)
