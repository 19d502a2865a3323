"""stage=compare: a report whose rows are the models of logs and whose columns are the metrics of
tasks.

The items that all logs of a task hold are compared: those with equal documents, by lm_eval's
doc_hash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
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
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"
KINDS = ("Logs", "Matched items", "Incomplete logs", "Different settings", "Not compared")
Sentences = dict[str, list[str]]  # kind -> how the logs differ, and what is not compared


@dataclass(frozen=True)
class Column:
    """A metric that can be compared, of the items `keys`, which all logs hold.

    lower: less of it is better; logs: of each model that has one.
    """

    title: str
    metric: str
    lower: bool
    logs: Mapping[str, Log]
    keys: Sequence[str]

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """Model -> the number of each item."""
        values = {}
        for model, log in self.logs.items():
            values[model] = [float(log.items[key]["scores"][self.metric]) for key in self.keys]
        return values

    @cached_property
    def is_share(self) -> bool:
        return all(0 <= value <= 1 for values in self.values.values() for value in values)

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """Model -> its cell, of one score."""
        cells = {}
        for model in self.logs:
            score = ScoreRef(model, ScoreWords(task=self.title), LANGUAGE)
            cells[model] = Cell(model, self.title, [Item({}, ({(): score},))])
        return cells

    @cached_property
    def frame(self) -> Frame:
        scale = 1 if self.is_share else 1 / 100
        answers: dict[Key, dict[int, float]] = {}
        for model, cell in self.cells.items():
            (score,) = cell.items[0].readings[0].values()
            answers[score, None] = {
                item: scale * value for item, value in enumerate(self.values[model])
            }
        return answers_frame(PlainPlan({}), list(self.cells.values()), answers, self.is_share)

    def comparison(self, left: str, right: str) -> Comparison:
        return Comparison(self.frame, [(1.0, self.cells[left])], [(1.0, self.cells[right])])

    def row(self, model: str) -> ScoreRow:
        """Return the row of results.csv, which has Wilson's interval if there is no standard
        error.
        """
        log, values = self.logs[model], self.values[model]
        scale = (100 if self.is_share else 1) / percent_factor(self.metric)
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
            scale * fmean(values),
            error,
            len(values),
        )

    def samples(self, model: str) -> tuple[Place, list[Sample]]:
        is_right = all(value in (0, 1) for values in self.values.values() for value in values)
        samples = []
        for number, (key, value) in enumerate(zip(self.keys, self.values[model], strict=True)):
            correct = bool(value) if is_right else None
            sample = {
                **self.logs[model].items[key],
                "doc_id": number,
                "scores": {self.metric: value},
            }
            samples.append({**sample, "correct": correct})
        return (model, self.title, LANGUAGE), samples

    def results(self, models: Iterable[str]) -> list[CellResult]:
        """Return the cells of the column. The best one is marked."""
        cells = []
        for model in models:
            if model in self.logs:
                value, low, high = (
                    100 * number for number in self.frame.estimate(self.cells[model])
                )
                scores = [CellScore(model, {}, [self.row(model)])]
                cells.append(
                    CellResult(
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
                )

        def contrast_of(top: CellResult, rival: CellResult) -> Contrast:
            return self.comparison(top.row, rival.row).contrast()

        best = best_of(cells, self.lower, contrast_of)
        marked = [replace(cell, best=cell is best) for cell in cells]
        missing = []
        for model in models:
            if model not in self.logs:
                missing.append(
                    CellResult(
                        model,
                        self.title,
                        missing=f"“{model}” has no log of {self.title}",
                        task=self.title,
                    )
                )
        return marked + missing


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """Return the results of a comparison.

    Raises PipelineError for a log that cannot be read, fewer than two models, or no item that two
    models share.
    """
    models = read_models(entries)
    titles = list(models)
    computed: Sentences = {kind: [] for kind in KINDS}
    columns = list(matched_columns(models, computed))
    computed = {kind: list(dict.fromkeys(sentences)) for kind, sentences in computed.items()}
    if not columns:
        reasons = " ".join(first_few(computed["Not compared"], IN_NOTE))
        raise PipelineError(f"results=[{','.join(entries)}] have nothing to compare: {reasons}")
    cells, measured = [], []
    for column in columns:
        cells += column.results(titles)
        for right, left in combinations(column.logs, 2):
            pair = Measured((left, right, column.title), "points", column.lower)
            measured.append(pair.with_result(column.comparison(left, right)))
    primary = measured[0].pair if len(measured) == 1 else ()
    evaluations = {}
    for model in titles:
        own = [column for column in columns if model in column.logs]
        evaluations[model] = Evaluation(
            [column.row(model) for column in own], samples=[column.samples(model) for column in own]
        )
    answers, parquet = read_answers(evaluations, questions_to_keep(cells))
    if len(titles) == 2:
        title = f"{titles[1]} against {titles[0]}"
    else:
        title = f"{len(titles)} models compared"
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
        runs=[run_of(model, list(logs.values())) for model, logs in models.items()],
        versions={"pipeline": package_version(DISTRIBUTION)},
        primary=primary,
        evaluations=evaluations,
        answers=answers,
        parquet=parquet,
    )


def matched_columns(models: Mapping[str, Logs], computed: Sentences) -> Iterator[Column]:
    """Yield the metrics that can be compared.

    `computed` gets sentences on differences, and on what is not compared.
    """
    for model, of_model in models.items():
        first = next(iter(of_model.values()))
        computed["Logs"].append(f"“{model}”: {pluralize(len(of_model), 'log')} by {first.version}.")
    for task, filter_name in dict.fromkeys(key for logs in models.values() for key in logs):
        logs = {
            model: logs[task, filter_name]
            for model, logs in models.items()
            if (task, filter_name) in logs
        }
        for model, log in logs.items():
            computed["Incomplete logs"] += [f"“{model}”: {problem}" for problem in log.problems]
        keys = shared_keys(list(logs.values()))
        if len(logs) < 2:
            computed["Not compared"].append(f"{task}: only “{next(iter(logs))}” has a log.")
        elif not keys:
            computed["Not compared"].append(f"{task}: no item is in all logs.")
        else:
            if any(len(log.items) > len(keys) for log in logs.values()):
                counts = " and ".join(
                    f"{len(log.items)} of “{model}”" for model, log in logs.items()
                )
                matched = (
                    f"{task}: {len(keys)} matched items, of {counts}; only these are compared."
                )
                computed["Matched items"].append(matched)
            computed["Different settings"] += differences_of(task, logs, keys)
        for metric in metrics_in(logs.values()):
            reason = why_not(logs, metric)
            if reason:
                computed["Not compared"].append(f"{reason}.")
            elif keys:
                lower = any(metric in log.lower_is_better for log in logs.values())
                title = f"{task} {metric}"
                if filter_name != "none":
                    title += f" ({filter_name})"
                if lower:
                    title += " (lower is better)"
                yield Column(re.sub(r"[\x00-\x1f]+", "_", title), metric, lower, logs, keys)


def shared_keys(logs: Sequence[Log]) -> list[str]:
    """Return the items that all logs hold, in the order of the first log; none if there is one
    log.
    """
    first, *others = logs
    found = []
    for key in first.items:
        if others and all(key in other.items for other in others):
            found.append(key)
    return found


def metrics_in(logs: Iterable[Log]) -> list[str]:
    """Return the metrics that the items of logs have."""
    return list(
        dict.fromkeys(
            metric for log in logs for item in log.items.values() for metric in item["scores"]
        )
    )


def why_not(logs: Mapping[str, Log], metric: str) -> str:
    """Return why a metric cannot be compared, or an empty text."""
    for model, log in logs.items():
        numbers = [finite_or_none(item["scores"].get(metric)) for item in log.items.values()]
        known = [number for number in numbers if number is not None]
        lacking = len(numbers) - len(known)
        if lacking:
            return (
                f"{metric} of {log.task} has no number for {lacking} of {len(numbers)} items of"
                f" “{model}”"
            )
        printed, value = log.printed.get(metric), fmean(known)
        if (
            printed is not None
            and not log.problems
            and abs(value - printed) > 1e-6 * max(1.0, abs(printed))
        ):
            score = (
                f"{metric} of {log.task} is {printed:.6g} for “{model}”, but the mean of its items"
                f" {value:.6g}"
            )
            return f"{score}, so a comparison of items says nothing about it"
    return ""


def run_of(model: str, logs: Sequence[Log]) -> RunResult:
    shared = set.intersection(*(set(log.settings.items()) for log in logs))
    tool, _, version = logs[0].version.partition(" ")
    return RunResult(
        name=model,
        stage="eval",
        folder=Path(),
        label=model,
        model=logs[0].model,
        started=logs[0].started,
        config=dict(sorted(shared)),
        versions={tool: version},
    )


def differences_of(task: str, logs: Mapping[str, Log], keys: Sequence[str]) -> Iterator[str]:
    """Yield sentences on what the logs of a task differ in: prompts and targets of matched items,
    and settings.
    """
    for what in ("prompt", "target"):
        count = sum(len({log.items[key][what] for log in logs.values()}) > 1 for key in keys)
        if count:
            yield f"{task}: the {what}s of {count} of {len(keys)} items differ."
    for name in dict.fromkeys(name for log in logs.values() for name in log.settings):
        values = {model: log.settings.get(name, "not set") for model, log in logs.items()}
        if len(set(values.values())) > 1:
            texts = [f"{shortened(text)} (“{model}”)" for model, text in values.items()]
            yield f"{name}: {', '.join(texts)}."


def shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}…"


def note_of(computed: Sentences) -> str:
    """Return what a reader of the verdict must know: the matched part, different settings, and what
    is not compared.
    """
    if computed["Different settings"]:
        sentences = []
    else:
        sentences = ["The recorded settings are the same."]
    for kind, listed in computed.items():
        if listed and kind != "Logs":
            shown = first_few(listed, IN_NOTE, " under “How it was computed”.")
            sentences.append(f"{kind}: {' '.join(shown)}")
    return " ".join(sentences)
