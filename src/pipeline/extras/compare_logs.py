"""The report of stage=compare, with a row per model and a column per metric of a task.

The items that all logs of a task hold are compared. Items are equal if their documents are equal,
by lm_eval's doc_hash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.extras.log import Log
from pipeline.extras.logs import Logs, read_models
from pipeline.report.contrasts import Measured, best_of, contrast_lines
from pipeline.report.expression import Key, PlainPlan
from pipeline.report.frame import Comparison, Frame, answers_frame
from pipeline.report.load.answers import Evaluation, Place, read_answers
from pipeline.report.load.contents import CellResult, CellScore, Results, RunResult
from pipeline.report.marks import questions_to_keep
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stats.contrast import Contrast
from pipeline.stats.statistics import mean_stderr
from pipeline.tables.plan import Cell, Item, ScoreRef, ScoreWords
from pipeline.text import first_few, pluralize

LANGUAGE = "all"  # logs do not name a language
LONGEST = 120  # characters of a setting that are shown
IN_NOTE = 3  # sentences of a kind next to the verdict; further ones are on the page
KINDS = ("Logs", "Matched items", "Incomplete logs", "Different settings", "Not compared")
Sentences = dict[str, list[str]]  # kind -> sentences about the logs and the comparison


@dataclass(frozen=True)
class Column:
    """A metric of a task that can be compared.

    Args:
        title: the title of the column.
        metric: the metric.
        lower: a lower value is better.
        logs: the logs by model.
        keys: the items that all logs hold.
    """

    title: str
    metric: str
    lower: bool
    logs: Mapping[str, Log]
    keys: Sequence[str]

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """The number of each item, by model."""
        values = {}
        for model, log in self.logs.items():
            scores = [log.items[key]["scores"] for key in self.keys]
            values[model] = [float(of_item[self.metric]) for of_item in scores]
        return values

    @cached_property
    def is_share(self) -> bool:
        all_values = chain.from_iterable(self.values.values())
        return all(0 <= value <= 1 for value in all_values)

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """The cell of each model, with one score."""
        cells = {}
        for model in self.logs:
            score = ScoreRef(model, ScoreWords(task=self.title), LANGUAGE)
            item = Item({}, ({(): score},))
            cells[model] = Cell(model, self.title, [item])
        return cells

    @cached_property
    def frame(self) -> Frame:
        scale = 1 if self.is_share else 1 / 100
        answers: dict[Key, dict[int, float]] = {}
        for model, cell in self.cells.items():
            (score,) = cell.items[0].readings[0].values()
            scaled = [scale * value for value in self.values[model]]
            answers[score, None] = dict(enumerate(scaled))
        cells = list(self.cells.values())
        return answers_frame(PlainPlan({}), cells, answers, self.is_share)

    def comparison(self, left: str, right: str) -> Comparison:
        left_cell, right_cell = self.cells[left], self.cells[right]
        return Comparison(self.frame, [(1.0, left_cell)], [(1.0, right_cell)])

    def row(self, model: str) -> ScoreRow:
        """Return the row of results.csv; without a standard error it has Wilson's interval."""
        log, values = self.logs[model], self.values[model]
        scale = (100 if self.is_share else 1) / percent_factor(self.metric)
        mean = scale * fmean(values)
        error = None
        if self.is_share and scale == 1:
            error = mean_stderr(values)
        return ScoreRow(
            self.title,
            LANGUAGE,
            None,
            None,
            log.num_fewshot,
            self.metric,
            log.filter,
            mean,
            error,
            len(values),
        )

    def samples(self, model: str) -> tuple[Place, list[Sample]]:
        all_values = chain.from_iterable(self.values.values())
        is_right = all(value in (0, 1) for value in all_values)
        items = self.logs[model].items
        samples = []
        for number, key in enumerate(self.keys):
            value = self.values[model][number]
            sample = {**items[key], "doc_id": number, "scores": {self.metric: value}}
            sample["correct"] = bool(value) if is_right else None
            samples.append(sample)
        return (model, self.title, LANGUAGE), samples

    def results(self, models: Iterable[str]) -> list[CellResult]:
        """Return the cells of the column, the best one marked, cells without a log last."""
        cells, missing = [], []
        for model in models:
            if model in self.logs:
                cells.append(self.cell_result(model))
            else:
                reason = f"“{model}” has no log of {self.title}"
                missing.append(CellResult(model, self.title, missing=reason, task=self.title))

        def contrast_of(top: CellResult, rival: CellResult) -> Contrast:
            return self.comparison(top.row, rival.row).contrast()

        best = best_of(cells, self.lower, contrast_of)
        marked = [replace(cell, best=cell is best) for cell in cells]
        return marked + missing

    def cell_result(self, model: str) -> CellResult:
        estimate = self.frame.estimate(self.cells[model])
        value, low, high = (100 * number for number in estimate)
        scores = [CellScore(model, {}, [self.row(model)])]
        return CellResult(
            model,
            self.title,
            value,
            low,
            high,
            1,
            runs=[model],
            scores=scores,
            task=self.title,
            metric=self.title,
        )


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """Return the results of a comparison.

    Args:
        entries: folders and files of logs.
        name: the name of the report.
        command: the command line that the page shows.

    Raises:
        PipelineError: a log cannot be read, there are fewer than two models, or no two models share
            an item.
    """
    models = read_models(entries)
    titles = list(models)
    computed: Sentences = {kind: [] for kind in KINDS}
    columns = list(matched_columns(models, computed))
    computed = {kind: list(dict.fromkeys(sentences)) for kind, sentences in computed.items()}
    if not columns:
        reasons = " ".join(first_few(computed["Not compared"], IN_NOTE))
        raise PipelineError(
            f"results=[{','.join(entries)}] cannot be compared. Give logs of the same tasks."
            f" {reasons}"
        )
    cells, measured = [], []
    for column in columns:
        cells += column.results(titles)
        for right, left in combinations(column.logs, 2):
            pair = Measured((left, right, column.title), "points", column.lower)
            measured.append(pair.with_result(column.comparison(left, right)))
    primary = measured[0].pair if len(measured) == 1 else ()
    evaluations = {model: evaluation_of(model, columns) for model in titles}
    runs = [run_of(model, list(logs.values())) for model, logs in models.items()]
    answers, parquet = read_answers(evaluations, questions_to_keep(cells))
    title = f"{len(titles)} models compared"
    if len(titles) == 2:
        title = f"{titles[1]} against {titles[0]}"
    return Results(
        table=name,
        title=title,
        note=note_of(computed),
        command=command,
        rows=titles,
        columns=[column.title for column in columns],
        cells=cells,
        computed=computed,
        contrasts=contrast_lines(measured, {}, primary),
        runs=runs,
        versions={"pipeline": package_version(DISTRIBUTION)},
        primary=primary,
        evaluations=evaluations,
        answers=answers,
        parquet=parquet,
    )


def evaluation_of(model: str, columns: Sequence[Column]) -> Evaluation:
    rows, samples = [], []
    for column in columns:
        if model in column.logs:
            rows.append(column.row(model))
            samples.append(column.samples(model))
    return Evaluation(rows, samples=samples)


def matched_columns(models: Mapping[str, Logs], computed: Sentences) -> Iterator[Column]:
    """Yield the metrics that can be compared.

    Sentences about differences, and about metrics that are not compared, are added to `computed`.
    """
    for model, of_model in models.items():
        first = next(iter(of_model.values()))
        count = pluralize(len(of_model), "log")
        computed["Logs"].append(f"“{model}”: {count} by {first.version}.")
    for place in dict.fromkeys(chain.from_iterable(models.values())):
        task, filter_name = place
        logs = {model: of_model[place] for model, of_model in models.items() if place in of_model}
        keys = shared_keys(list(logs.values()))
        add_sentences(computed, task, logs, keys)
        for metric in metrics_in(logs.values()):
            reason = why_not(logs, metric)
            if reason:
                computed["Not compared"].append(f"{reason}.")
                continue
            if not keys:
                continue
            lower = any(metric in log.lower_is_better for log in logs.values())
            title = f"{task} {metric}"
            if filter_name != "none":
                title += f" ({filter_name})"
            if lower:
                title += " (lower is better)"
            yield Column(re.sub(r"[\x00-\x1f]+", "_", title), metric, lower, logs, keys)


def add_sentences(
    computed: Sentences, task: str, logs: Mapping[str, Log], keys: Sequence[str]
) -> None:
    """Add sentences about the logs of a task and their matched items."""
    for model, log in logs.items():
        computed["Incomplete logs"] += [f"“{model}”: {problem}" for problem in log.problems]
    if len(logs) < 2:
        (model,) = logs
        computed["Not compared"].append(f"{task}: only “{model}” has a log.")
        return
    if not keys:
        computed["Not compared"].append(f"{task}: no item is in all logs.")
        return
    if any(len(log.items) > len(keys) for log in logs.values()):
        counts = " and ".join(f"{len(log.items)} of “{model}”" for model, log in logs.items())
        matched = f"{task}: {len(keys)} matched items, of {counts}; only these are compared."
        computed["Matched items"].append(matched)
    computed["Different settings"] += differences_of(task, logs, keys)


def shared_keys(logs: Sequence[Log]) -> list[str]:
    """Return the items that all of several logs hold, in the order of the first log."""
    first, *others = logs
    if not others:
        return []
    return [key for key in first.items if all(key in other.items for other in others)]


def metrics_in(logs: Iterable[Log]) -> list[str]:
    """Return the metrics that the items of logs have."""
    metrics: dict[str, None] = {}
    for log in logs:
        for item in log.items.values():
            metrics |= dict.fromkeys(item["scores"])
    return list(metrics)


def why_not(logs: Mapping[str, Log], metric: str) -> str:
    """Return why a metric cannot be compared, or an empty text."""
    for model, log in logs.items():
        known = []
        for item in log.items.values():
            number = finite_or_none(item["scores"].get(metric))
            if number is not None:
                known.append(number)
        lacking = len(log.items) - len(known)
        if lacking:
            return (
                f"{metric} of {log.task} has no number for {lacking} of {len(log.items)} items of"
                f" “{model}”"
            )
        printed = log.printed.get(metric)
        if printed is None or log.problems:
            continue
        value = fmean(known)
        if abs(value - printed) > 1e-6 * max(1.0, abs(printed)):
            return (
                f"{metric} of {log.task} is {printed:.6g} for “{model}”, but the mean of its items"
                f" {value:.6g}, so a comparison of items says nothing about it"
            )
    return ""


def run_of(model: str, logs: Sequence[Log]) -> RunResult:
    first = logs[0]
    shared = set.intersection(*(set(log.settings.items()) for log in logs))
    tool, _, version = first.version.partition(" ")
    return RunResult(
        name=model,
        stage="eval",
        folder=Path(),
        label=model,
        model=first.model,
        started=first.started,
        config=dict(sorted(shared)),
        versions={tool: version},
    )


def differences_of(task: str, logs: Mapping[str, Log], keys: Sequence[str]) -> Iterator[str]:
    """Yield sentences about prompts and targets of matched items, and settings, that differ."""
    for what in ("prompt", "target"):
        count = 0
        for key in keys:
            texts = {log.items[key][what] for log in logs.values()}
            count += len(texts) > 1
        if count:
            yield f"{task}: the {what}s of {count} of {len(keys)} items differ."
    settings = chain.from_iterable(log.settings for log in logs.values())
    for name in dict.fromkeys(settings):
        values = {model: log.settings.get(name, "not set") for model, log in logs.items()}
        if len(set(values.values())) > 1:
            shown = [f"{shortened(text)} (“{model}”)" for model, text in values.items()]
            yield f"{name}: {', '.join(shown)}."


def shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}…"


def note_of(computed: Sentences) -> str:
    """Return the note next to the verdict: matched items, settings, metrics not compared."""
    sentences = []
    if not computed["Different settings"]:
        sentences.append("The recorded settings are the same.")
    for kind, listed in computed.items():
        if listed and kind != "Logs":
            shown = first_few(listed, IN_NOTE, " under “How it was computed”.")
            sentences.append(f"{kind}: {' '.join(shown)}")
    return " ".join(sentences)
