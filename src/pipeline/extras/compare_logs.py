"""stage=compare: logs as scores and answers of a table, whose rows are models and whose columns metrics of tasks.

Compared are the items that all logs of a task hold: equal documents by lm_eval's doc_hash, equal sample ids and inputs
of inspect_ai.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from pipeline.config.stages import TableStage
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.extras.logs import Log, Logs, read_models
from pipeline.report.collect import fill_cells
from pipeline.report.contrasts import mark_best, measure_pairs
from pipeline.report.load.answers import Evaluation, Place, Vector
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stats.statistics import mean_stderr
from pipeline.tables.plan import Cell, Item, ScoreRef, ScoreWords, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import Side, Table
from pipeline.text import first_few, pluralize

LANGUAGE = "all"  # stands where a language does: logs do not name one
LONGEST = 120  # characters of a setting that are shown
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"
Sentences = dict[str, list[str]]  # title -> how the logs differ, and what is not compared


@dataclass(frozen=True)
class Column:
    """A metric that can be compared, of the items `keys`, which all logs hold; lower: less of it is better."""

    title: str
    metric: str
    lower: bool
    logs: Mapping[str, Log]  # of each model that has one
    keys: Sequence[str]

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """Model -> the number of each item."""
        return {model: [float(log.items[key]["scores"][self.metric]) for key in self.keys]
                for model, log in self.logs.items()}  # fmt: skip

    @cached_property
    def is_share(self) -> bool:
        return all(0 <= value <= 1 for value in chain(*self.values.values()))

    @property
    def factor(self) -> int:
        """By which a number is multiplied as a table shows it."""
        return 100 if self.is_share else 1

    def row(self, model: str) -> ScoreRow:
        """The row of results.csv, which has Wilson's interval where there is no standard error."""
        log, values, scale = self.logs[model], self.values[model], self.factor / percent_factor(self.metric)
        error = mean_stderr(values) if self.is_share and scale == 1 else None
        return ScoreRow(self.title, LANGUAGE, None, None, log.num_fewshot, self.metric, log.filter,
                        scale * fmean(values), error, len(values))  # fmt: skip

    def samples(self, model: str) -> tuple[Place, list[Sample]]:
        is_right = all(value in (0, 1) for value in chain(*self.values.values()))
        return (model, self.title, LANGUAGE), [
            {**self.logs[model].items[key], "doc_id": at, "scores": {self.metric: value},
             "correct": bool(value) if is_right else None}
            for at, (key, value) in enumerate(zip(self.keys, self.values[model], strict=True))
        ]  # fmt: skip


@dataclass
class LogAnswers(StoredAnswers):
    """The matched items of logs, by the titles of their columns."""

    columns: Mapping[str, Column] = field(default_factory=dict)

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        column = self.columns[metric]
        if score.model not in column.logs:
            raise NoScore(f"“{score.model}” has no log of {metric}")
        return {at: column.factor * value / 100 for at, value in enumerate(column.values[score.model])}

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        return 100 * fmean([*self.scores_by_question(score, metric or "", pair).values()])

    def rows_of(self, score: ScoreRef, cell: Cell) -> list[ScoreRow]:
        return [self.columns[cell.column].row(score.model)]

    def run_of(self, key: Any) -> Any:
        return SimpleNamespace(name=key.model) if key.model in self.columns[key.words["task"]].logs else None

    def is_share(self, metric: str) -> bool:
        return self.columns[metric].is_share

    def less_is_better(self, task: str, metric: str) -> bool:
        return self.columns[metric].lower


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """The results of a comparison. Raises PipelineError for a log that cannot be read, fewer than two models, or no
    item that two models share."""
    models = read_models(entries)
    titles = list(models)
    computed: Sentences = {title: [] for title in (
        "Logs", "Matched items", "Incomplete logs", "Different settings", "Not compared"
    )}  # fmt: skip
    columns = {column.title: column for column in matched_columns(models, computed)}
    computed = {title: list(dict.fromkeys(sentences)) for title, sentences in computed.items()}
    if not columns:
        reasons = " ".join(first_few(computed["Not compared"], IN_NOTE))
        raise PipelineError(f"results=[{','.join(entries)}] have nothing to compare: {reasons}")
    pairs = [(left, right, column.title) for column in columns.values() for right, left in combinations(column.logs, 2)]
    sides = [Side(title, {"run": title}) for title in titles]
    primary = pairs[0] if len(pairs) == 1 else ()
    table = Table("", name, "", "", None, {}, {}, {}, Side(""), [], sides, (), [], False, primary=primary)
    cells = {
        (model, title): Cell(
            model, title, [Item({}, ({(): ScoreRef(model, ScoreWords(task=title), LANGUAGE)},))], metric=title
        )
        for title in columns for model in titles
    }  # fmt: skip
    plan = TablePlan(table, {}, rows=titles, columns=list(columns), cells=cells)
    stored = LogAnswers(Planning(TableStage(), plan), columns=columns)
    listed = {model: [column for column in columns.values() if model in column.logs] for model in titles}
    evaluations = {
        model: Evaluation([one.row(model) for one in own], samples=[one.samples(model) for one in own])
        for model, own in listed.items()
    }
    measured, parquet = fill_cells(stored, evaluations)
    contrasts = measure_pairs(plan, stored, dict.fromkeys(pairs, 1))
    return Results(
        table=name, title=f"{titles[1]} against {titles[0]}" if len(titles) == 2 else f"{len(titles)} models compared",
        note=note_of(computed), command=command, rows=titles, columns=plan.columns,
        cells=mark_best(plan, stored, measured), computed=computed, contrasts=contrasts,
        runs=[run_of(title, list(logs.values())) for title, logs in models.items()],
        versions={"pipeline": package_version(DISTRIBUTION)}, primary=primary,
        evaluations=evaluations, answers=stored.answers, parquet=parquet,
    )  # fmt: skip


def matched_columns(models: Mapping[str, Logs], computed: Sentences) -> Iterator[Column]:
    """The metrics that can be compared; `computed` gets sentences on how the logs differ, and what is not compared."""
    for title, of_model in models.items():
        first = next(iter(of_model.values()))
        computed["Logs"].append(f"“{title}”: {pluralize(len(of_model), 'log')} by {first.tool} {first.version}.")
    every = dict.fromkeys(chain(*models.values()))
    tools = {tool for tool, _, _ in every}
    for tool, task, filter_name in every:
        logs = {
            title: of_model[key] for title, of_model in models.items() if (key := (tool, task, filter_name)) in of_model
        }
        first, *others = logs.values()
        keys = [key for key in first.items if all(key in other.items for other in others)] if others else []
        computed["Incomplete logs"] += [f"“{title}”: {text}" for title, log in logs.items() for text in log.problems]
        if not keys:
            empty = [f"no item of {task} has a score in {log.file.name} of “{title}”."
                     for title, log in logs.items() if not log.items]  # fmt: skip
            alone = f"{task}: only “{next(iter(logs))}” has a log."
            computed["Not compared"] += empty or [f"{task}: no item is in all logs." if others else alone]
        elif any(len(log.items) > len(keys) for log in logs.values()):
            counts = " and ".join(f"{len(log.items)} of “{title}”" for title, log in logs.items())
            matched = f"{task}: {len(keys)} matched items, of {counts}; only these are compared."
            computed["Matched items"].append(matched)
        computed["Different settings"] += differences_of(task, logs, keys) if keys else ()
        metrics = {name: None for log in logs.values() for item in log.items.values() for name in item["scores"]}
        for metric in metrics if all(log.items for log in logs.values()) else ():
            if reason := why_not(logs, metric):
                computed["Not compared"].append(f"{reason}.")
            elif keys:
                lower = any(metric in log.lower_is_better for log in logs.values())
                column = f"{task} {metric}{f' ({filter_name})' * (filter_name != 'none')}{' (lower is better)' * lower}"
                column = re.sub(r"[\x00-\x1f]+", "_", column + f" of {tool}" * (len(tools) > 1))
                yield Column(column, metric, lower, logs, keys)


def why_not(logs: Mapping[str, Log], metric: str) -> str:
    """Why a metric cannot be compared; empty if it can."""
    for title, log in logs.items():
        numbers = [finite_or_none(item["scores"].get(metric)) for item in log.items.values()]
        known = [number for number in numbers if number is not None]
        if lacking := len(numbers) - len(known):
            return f"{metric} of {log.task} has no number for {lacking} of {len(numbers)} items of “{title}”"
        printed, value = log.printed.get(metric), fmean(known)
        if printed is not None and not log.problems and abs(value - printed) > 1e-6 * max(1.0, abs(printed)):
            score = f"{metric} of {log.task} is {printed:.6g} for “{title}”, but the mean of its items {value:.6g}"
            return f"{score}, so a comparison of items says nothing about it"
    return ""


def run_of(title: str, logs: Sequence[Log]) -> RunResult:
    return RunResult(
        name=title, stage="eval", folder=Path(), label=title, model=logs[0].model, started=logs[0].started,
        config=dict(sorted(set.intersection(*(set(log.settings.items()) for log in logs)))),
        versions={logs[0].tool: logs[0].version},
    )  # fmt: skip


def differences_of(task: str, logs: Mapping[str, Log], keys: Sequence[str]) -> Iterator[str]:
    """Sentences on what the logs of a task differ in: prompts and targets of matched items, and settings."""
    for what in ("prompt", "target"):
        if count := sum(len({log.items[key][what] for log in logs.values()}) > 1 for key in keys):
            yield f"{task}: the {what}s of {count} of {len(keys)} items differ."
    for name in dict.fromkeys(name for log in logs.values() for name in log.settings):
        values = {title: log.settings.get(name, "not set") for title, log in logs.items()}
        if len(set(values.values())) > 1:
            texts = (f"{text[:LONGEST]}{'…' * (len(text) > LONGEST)} (“{title}”)" for title, text in values.items())
            yield f"{name}: {', '.join(texts)}."


def note_of(computed: Sentences) -> str:
    """What a reader of the verdict must know: the matched part, differences in settings, and what is not compared."""
    sentences = [f"{title}: {' '.join(first_few(listed, IN_NOTE, ' under “How it was computed”.'))}"
                 for title, listed in computed.items() if listed and title != "Logs"]  # fmt: skip
    same = [] if computed["Different settings"] else ["The recorded settings are the same."]
    return " ".join([*same, *sentences])
