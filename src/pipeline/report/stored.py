"""What the runs behind a table stored: scores, answers and facts, from which its cells and
comparisons are computed.

Nothing is scored here, and no cell is skipped: one that cannot be filled has a reason.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import find_benchmark, is_measure, lower_is_better, primary_metric
from pipeline.data.rows import read_jsonl
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.hub.addresses import without_credentials
from pipeline.launch.work import BLOCKED
from pipeline.report.expression import Key, Plan, evaluate, lines_of, scores_of
from pipeline.report.frame import (
    CorpusFrame,
    Frame,
    NoScore,
    Sentences,
    answers_frame,
    shared_questions,
)
from pipeline.report.load.answers import Answers, Place, Vector
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import Run
from pipeline.stats.statistics import is_mean_of
from pipeline.stats.translations import CORPUS_METRICS
from pipeline.tables.plan import ROWS_CHANGED, Cell, ScoreRef, difference_of, task_of
from pipeline.tables.planned_runs import Planning, reason_left_out, score_rows

if TYPE_CHECKING:
    import numpy as np

SPM_MODEL = (
    "every.eval.spm_model=FILE, what sacrebleu -tok flores200 fetches to"
    " ~/.sacrebleu/models/flores200sacrebleuspm"
)
VALIDATIONS = ("starting_validation_loss", "ending_validation_loss")
Translations = dict[Any, tuple[str, str]]  # doc_id -> (reference, response)


def page_text(text: str, runs_dir: str | Path) -> str:
    """Return a message as the page shows it: without credentials, and with runs named relative to
    runs_dir.
    """
    beginning = rf"(?<![\w./-]){re.escape(str(runs_dir))}/"
    return re.sub(beginning, "", str(without_credentials(text)))


def less_is_better(task: str, metric: str) -> bool:
    """Return True if less of a metric is better. An empty metric is the task's own."""
    return lower_is_better(task) and metric in ("", primary_metric(task)[0])


def first_failure(name: str, failed: Mapping[str, str]) -> str:
    """Return the run that a run failed by: itself, or the first of its parents that did.

    Args: failed: run -> reason.
    """
    while (reason := failed.get(name, "")).startswith(BLOCKED):
        name = reason.removeprefix(BLOCKED).removesuffix(" failed")
    return name


@dataclass
class StoredAnswers:
    """The scores, answers and facts under a table.

    failed: name of a run -> why it failed; damaged: name of a run -> what of it was changed after
        it was written;
    answers: by `read_answers`.
    """

    table: Planning
    failed: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    answers: dict[Place, Answers] = field(default_factory=dict)

    # --- numbers ---

    def value(self, cell: Cell, keep: Sequence[str] = ()) -> np.ndarray:
        """Return the number of a cell, or (levels ...) numbers at each value of the axes `keep`.

        Percent; BLEU, chrF++, bits and facts on their own scale. Raises NoScore if one of its
        scores is missing.
        """
        import numpy as np

        plan = self.table.plan
        shown = {line.score for line in lines_of(plan, [cell])}

        def number(leaf: Cell, score: Any) -> np.ndarray:
            if isinstance(score, str) or (leaf.fact and score in shown):
                return np.array([self.fact(leaf, score)])
            if score in shown:
                return np.array([self.number(score, leaf.metric, leaf.pair)])
            return np.array([self.number(score)])  # the choice's own metric

        return evaluate(plan, cell, number, number, keep)[..., 0]

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        """One score. Raises NoScore if it is missing."""
        parts = difference_of(score, metric)
        if parts:
            return self.number(score, parts[0], pair) - self.number(parts[1], parts[0], pair)
        run = self.finished(score)
        rows = score_rows(run, metric, pair)
        values = [row.value for row in rows if row.value is not None]
        if not rows or len(values) < len(rows):
            reason = reason_left_out(run)
            if reason:
                raise NoScore(reason)
            remedy = ""
            if metric == "spbleu":
                remedy = f": give {SPM_MODEL}"
            which = f"{'finite ' * bool(rows)}{metric or 'score'}{f' of {pair}' if pair else ''}"
            raise NoScore(f"{run.name} has no {which}{remedy}")
        return statistics.fmean(values) * percent_factor(rows[0].metric)

    def rows_of(self, score: ScoreRef, cell: Cell) -> list[ScoreRow]:
        """Return the stored scores that a cell shows of a score; none of one that is not
        finished.
        """
        run = self.table.evaluation_of(score)
        if run and run.name not in self.damaged:
            return score_rows(run, cell.metric, cell.pair)
        return []

    def fact(self, cell: Cell, key: ScoreRef | str) -> float:
        """Return a number that a training, or the evaluation of a merge in memory, recorded.

        Raises: NoScore: it is missing.
        """
        fact, run = cell.fact or "", self.finished(key)
        if fact in VALIDATIONS:
            value = validation_loss(run, fact)
        elif ROWS_CHANGED.fullmatch(fact):
            value = percent_rows_changed(run, fact)
        else:
            manifest = read_manifest(run.folder)
            value = None
            if manifest:
                value = manifest.facts.get(fact)
        if not isinstance(value, int | float):
            raise NoScore(f"{run.name} records no {fact}")
        return float(value)

    def run_of(self, key: ScoreRef | str) -> Run | None:
        return self.table.run_of(key)

    def finished(self, key: ScoreRef | str) -> Run:
        """Return the run of a score, or of a spec with a fact.

        Raises: NoScore: it is not there, or unfinished.
        """
        run = self.run_of(key)
        if run is None:
            waits = "its run cannot be planned, or is still to be chosen"
            if isinstance(key, ScoreRef) and key.model in self.table.plan.chosen:
                waits = (
                    f"{self.table.plan.chosen[key.model].choice} waits for its candidates' scores"
                )
            raise NoScore(self.table.problems.get(key, waits))
        if not (run.folder / MANIFEST).is_file():
            name = first_failure(run.name, self.failed)
            raise NoScore(
                f"{name}"
                f" {'failed: ' * (name in self.failed)}{self.failed.get(name, 'is not made yet')}"
            )
        if run.name in self.damaged:
            raise NoScore(self.damaged[run.name])
        return run

    # --- answers ---

    def frame(self, plan: Plan, cells: Sequence[Cell], metric: str) -> Frame:
        """Return the frame of the answers under some cells.

        Raises NoScore if one of their scores has none.
        """
        keys = scores_of(plan, cells)
        if metric in CORPUS_METRICS:
            return CorpusFrame.of(plan, cells, metric, self.aligned_texts(keys))
        answers = {key: self.scores_by_question(key[0], metric, key[1]) for key in keys}
        benchmark = find_benchmark(task_of(keys[0][0]))
        bounded = not is_measure(metric)
        groups: dict[Any, Any] = {}
        if (
            benchmark is not None and benchmark.of_harness
        ):  # what its metric gives, only the answers tell
            numbers = []
            for of_score in answers.values():
                for value in of_score.values():
                    numbers.append(value)
            bounded = percent_factor(metric) == 100 and all(0 <= value <= 1 for value in numbers)
        if benchmark is not None and benchmark.passage is not None:
            for key in keys:
                groups |= self.groups_of(*key)
        return answers_frame(plan, cells, answers, bounded, groups)

    def aligned_texts(self, keys: Sequence[Key]) -> dict[Key, Sentences]:
        """Return each score's sentences in each of its pairs, aligned by question across all of
        them.
        """
        translations = {key: self.read_translations(*key) for key in keys}
        ids = shared_questions(texts for pairs in translations.values() for texts in pairs.values())
        aligned: dict[Key, Sentences] = {}
        for key, pairs in translations.items():
            aligned[key] = [
                (pair, tuple(texts[question] for question in ids)) for pair, texts in pairs.items()
            ]
        return aligned

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """Return question -> score, as tables show it, over 100.

        Raises NoScore for an unfinished run, or one without such answers.
        """
        parts = difference_of(score, metric)
        if parts:
            measure, subtracted = parts
            values = self.scores_by_question(score, measure, pair)
            subtrahends = self.scores_by_question(subtracted, measure, pair)
            shared = []
            for question in values:
                if question in subtrahends:
                    shared.append(question)
            return {question: values[question] - subtrahends[question] for question in shared}
        (answers,) = self.answers_under(score, pair or score.language).values()
        run = self.finished(score)
        benchmark = find_benchmark(run.config.eval.tasks[0].task)
        of_harness = benchmark is not None and benchmark.of_harness
        of_all = NoScore(f"{metric} is of all answers together, not of each")
        if of_harness and not answers.has_numbers(metric):
            raise of_all
        scale = percent_factor(metric) / 100
        stored = {key: scale * value for key, value in answers.by_question(metric).items()}
        if of_harness and not is_mean_of(
            self.number(score, metric, pair) / 100, [*stored.values()]
        ):
            raise of_all  # a task's own function of them, as a perplexity is
        if not all(map(math.isfinite, stored.values())):
            raise NoScore(f"{run.name} has an answer whose {metric} is not a finite number")
        return stored

    def answers_under(self, score: ScoreRef, language: str | None) -> dict[str, Answers]:
        """Return the answers of a score in a language or pair; None: in each of its pairs."""
        run = self.finished(score)
        task = run.config.eval.tasks[0].task
        if language:
            languages = [language]
        else:
            languages = [f"en-{score.language}", f"{score.language}-en"]
        answers = {}
        for where in languages:
            key = (run.name, task, where)
            if key in self.answers:
                answers[where] = self.answers[key]
        if not answers:
            raise NoScore(f"{run.name} kept no answers of {task}.{language or '*'}")
        return answers

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[Any, Any]:
        """doc_id -> the passage that the question is about."""
        (answers,) = self.answers_under(score, pair or score.language).values()
        return answers.groups

    def read_translations(self, score: ScoreRef, pair: str | None) -> dict[str, Translations]:
        """Pair -> doc_id -> (reference, response): of one pair, or of all pairs that were
        scored.
        """
        return {where: answers.texts for where, answers in self.answers_under(score, pair).items()}


def validation_loss(run: Run, fact: str) -> float | None:
    """Return the validation loss of a training before its first step, or the last one; on a joint
    set, that of both sides.
    """
    log = run.folder / "log.jsonl"
    rows = read_jsonl(log) if log.is_file() else []
    losses = []
    for row in rows:
        if "validation_loss" in row:
            losses.append((row["step"], row["validation_loss"]))
    if fact == "starting_validation_loss":
        losses = [point for point in losses if point[0] == 0]
    if losses:
        return losses[-1][1]
    return None


def percent_rows_changed(run: Run, fact: str) -> float | None:
    """Return the percent of rows whose change is above the threshold of an analysis, as the
    published maps show it.

    This is the mean over the two-dimensional parameters of some columns and layers, such as
    rows_changed.attention.0-1,30-31. None unless the analysis has all of these layers.
    """
    _, columns, spans = fact.split(".")
    layers: set[str] = set()
    for span in spans.split(","):
        first, last = map(int, span.split("-"))
        layers |= {str(layer) for layer in range(first, last + 1)}
    kinds = ("attention", "feed_forward") if columns == "all" else (columns,)
    shares: dict[str, list[float]] = {}
    with open(run.folder / "delta.csv", encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["column"].startswith(kinds) and row["layer"] in layers:
                shares.setdefault(row["layer"], []).append(float(row["share"]))
    if shares.keys() != layers:
        return None
    return 100 * statistics.fmean(share for of_layer in shares.values() for share in of_layer)
