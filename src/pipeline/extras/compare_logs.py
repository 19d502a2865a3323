"""stage=compare: logs as scores and answers of a table, whose rows are models and whose columns metrics of tasks.

Compared are the items that all logs of a task hold: equal documents by lm_eval's doc_hash, equal sample ids and inputs
of inspect_ai.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean, mean_stderr
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import finite_or_none, percent_factor
from pipeline.extras.logs import Log, Logs, read_models
from pipeline.report.cells import cell_result
from pipeline.report.contrasts import mark_best, measure_pairs
from pipeline.report.load.answers import Evaluation, Place, Vector, read_answers
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.marks import questions_to_keep
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan
from pipeline.tables.schema import Side, Table
from pipeline.text import pluralize

LANGUAGE = "all"  # stands where a language does: logs do not name one
LONGEST = 120  # characters of a setting that are shown
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"
Samples = dict[str, list[tuple[Place, list[Sample]]]]  # of each model
Sentences = dict[str, list[str]]  # title -> how the logs differ, and what is not compared


@dataclass
class LogAnswers(StoredAnswers):
    """The matched items of logs. numbers: item -> its number, over 100 as tables have it; rows: of results.csv; shares:
    the columns of shares of 1; lower: those of which less is better."""

    numbers: dict[ScoreRef, Vector] = field(default_factory=dict)
    rows: dict[ScoreRef, ScoreRow] = field(default_factory=dict)
    shares: set[str] = field(default_factory=set)
    lower: set[str] = field(default_factory=set)

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        if score not in self.numbers:
            raise NoScore(f"“{score.model}” has no log of {metric}")
        return self.numbers[score]

    def number(self, score: ScoreRef, metric: str | None = None, pair: str | None = None) -> float:
        return 100 * mean([*self.scores_by_question(score, metric or "", pair).values()])

    def rows_of(self, score: ScoreRef, cell: Cell) -> list[ScoreRow]:
        return [self.rows[score]]

    def run_of(self, key: Any) -> Any:
        return SimpleNamespace(name=key.model) if key in self.numbers else None

    def is_share(self, metric: str) -> bool:
        return metric in self.shares

    def less_is_better(self, task: str, metric: str) -> bool:
        return metric in self.lower


class Column(NamedTuple):
    """A metric that can be compared. values: model -> the number of each item that all logs hold, whose keys are
    `keys`; lower: less of it is better."""

    title: str
    metric: str
    lower: bool
    logs: Mapping[str, Log]
    keys: Sequence[str]
    values: Mapping[str, Sequence[float]]

    def all_values(self, test: Any) -> bool:
        return all(test(value) for values in self.values.values() for value in values)


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """The results of a comparison. Raises PipelineError for a log that cannot be read, fewer than two models, or no
    item that two models share."""
    models = read_models(entries)
    titles, logs_of = list(models), {title: list(logs.values()) for title, logs in models.items()}
    computed: Sentences = {
        "Logs": [f"“{title}”: {pluralize(len(logs), 'log')} by {logs[0].tool} {logs[0].version}."
                 for title, logs in logs_of.items()],
        "Matched items": [], "Incomplete logs": [], "Different settings": [], "Not compared": [],
    }  # fmt: skip
    columns = {column.title: column for column in matched_columns(models, computed)}
    computed = {title: list(dict.fromkeys(sentences)) for title, sentences in computed.items()}
    if not columns:
        problem = f"results=[{','.join(entries)}] have nothing to compare: {first_of(computed['Not compared'], '.')}"
        raise PipelineError(problem.rstrip("."))
    sides = [Side(title, {"run": title}) for title in titles]
    table = Table("", name, "", "", None, {}, {}, {}, {}, Side(""), [], sides, (), [], False)
    plan = TablePlan(table, {}, rows=titles, columns=list(columns))
    stored = LogAnswers(BoundTable(plan, {}, {}, {}, {}))
    samples: Samples = {title: [] for title in titles}
    for column in columns.values():
        add_column(plan, stored, samples, column)
    evaluations = {
        title: Evaluation([row for score, row in stored.rows.items() if score.model == title], samples=samples[title])
        for title in titles
    }
    cells = [cell_result(stored, cell) for cell in plan.cells.values()]
    scored = {title: [cell.row for cell in cells if cell.column == title and cell.value is not None]
              for title in columns}  # fmt: skip
    pairs = [(left, right, place) for place, rows in scored.items() for right, left in combinations(rows, 2)]
    table.primary = pairs[0] if len(pairs) == 1 else ()
    answers, parquet = read_answers(evaluations, questions_to_keep(cells))
    return Results(
        table=name, title=f"{titles[1]} against {titles[0]}" if len(titles) == 2 else f"{len(titles)} models compared",
        note=note_of(computed), command=command, rows=titles, columns=plan.columns,
        runs=[run_of(title, logs) for title, logs in logs_of.items()],
        cells=mark_best(plan, stored, cells), computed=computed,
        seconds=sum(log.seconds for logs in logs_of.values() for log in logs),
        versions={"pipeline": package_version(DISTRIBUTION)}, primary=table.primary,
        contrasts=measure_pairs(plan, stored, dict.fromkeys(pairs, 1)),
        evaluations=evaluations, answers=answers, parquet=parquet,
    )  # fmt: skip


def add_column(plan: TablePlan, stored: LogAnswers, samples: Samples, column: Column) -> None:
    """A cell of each model; of those with a log also its items, its row of results.csv and its answers."""
    title, is_binary = column.title, column.all_values(lambda value: value in (0, 1))
    is_share = column.all_values(lambda value: 0 <= value <= 1)
    factor = 100 if is_share else 1
    scale = factor / percent_factor(column.metric)
    stored.shares |= {title} if is_share else set()
    stored.lower |= {title} if column.lower else set()
    for model in plan.rows:
        score = ScoreRef(model, (("task", title),), LANGUAGE)
        plan.cells[model, title] = Cell(model, title, [Item({}, ({(): score},))], metric=title)
        if model not in column.logs:
            continue
        log, values = column.logs[model], column.values[model]
        error = mean_stderr(values) if is_share and scale == 1 else None  # else results.csv has Wilson's of it
        stored.numbers[score] = {at: factor * value / 100 for at, value in enumerate(values)}
        stored.rows[score] = ScoreRow(title, LANGUAGE, None, None, log.num_fewshot, column.metric, log.filter,
                                      scale * mean(values), error, len(values))  # fmt: skip
        samples[model].append(((model, title, LANGUAGE), [
            {**log.items[key], "doc_id": at, "scores": {column.metric: value},
             "correct": bool(value) if is_binary else None}
            for at, (key, value) in enumerate(zip(column.keys, values, strict=True))
        ]))  # fmt: skip


def matched_columns(models: Mapping[str, Logs], computed: Sentences) -> Iterator[Column]:
    """The metrics that can be compared; `computed` gets sentences on how the logs differ, and what is not compared."""
    titles = Counter[str]()
    for tool, task, filter_name in dict.fromkeys(key for of_model in models.values() for key in of_model):
        found = ((title, of_model.get((tool, task, filter_name))) for title, of_model in models.items())
        logs = {title: log for title, log in found if log}
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
                column = f"{task} {metric}{f' ({filter_name})' * (filter_name != 'none')}"
                column = re.sub(r"[\x00-\x1f]+", "_", column + " (lower is better)" * lower)
                titles[column] += 1
                values = {title: [float(log.items[key]["scores"][metric]) for key in keys]
                          for title, log in logs.items()}  # fmt: skip
                yield Column(column + f" of {tool}" * (titles[column] > 1), metric, lower, logs, keys, values)


def why_not(logs: Mapping[str, Log], metric: str) -> str:
    """Why a metric cannot be compared; empty if it can."""
    for title, log in logs.items():
        numbers = [finite_or_none(item["scores"].get(metric)) for item in log.items.values()]
        known = [number for number in numbers if number is not None]
        if lacking := len(numbers) - len(known):
            return f"{metric} of {log.task} has no number for {lacking} of {len(numbers)} items of “{title}”"
        printed, value = log.printed.get(metric), mean(known)
        if printed is not None and not log.problems and abs(value - printed) > 1e-6 * max(1.0, abs(printed)):
            score = f"{metric} of {log.task} is {printed:.6g} for “{title}”, but the mean of its items {value:.6g}"
            return f"{score}, so a comparison of items says nothing about it"
    return ""


def run_of(title: str, logs: Sequence[Log]) -> RunResult:
    seconds = {log.file.name if log.tool == "inspect_ai" else log.started: log.seconds for log in logs}
    return RunResult(
        name=title, stage="eval", folder=Path(), label=title, model=logs[0].model, started=logs[0].started,
        config=dict(sorted(set.intersection(*(set(log.settings.items()) for log in logs)))),
        seconds=sum(seconds.values()) or None, versions={logs[0].tool: logs[0].version},
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


def first_of(sentences: Sequence[str], where: str) -> str:
    more = [f"And {len(sentences) - IN_NOTE} more{where}"] if len(sentences) > IN_NOTE else []
    return " ".join([*sentences[:IN_NOTE], *more])


def note_of(computed: Sentences) -> str:
    """What a reader of the verdict must know: the matched part, differences in settings, and what is not compared."""
    sentences = [f"{title}: {first_of(listed, ' under “How it was computed”.')}" for title, listed in computed.items()
                 if listed and title != "Logs"]  # fmt: skip
    same = [] if computed["Different settings"] else ["The recorded settings are the same."]
    return " ".join([*same, *sentences])
