"""stage=compare: the logs of other evaluation tools as the results that a report shows.

A model of an entry of `results` is a row of the table; a metric of a task that is a number for every item, a column.
Compared are the items that all logs of the task hold: equal documents by lm_eval's doc_hash, equal sample ids and
inputs of inspect_ai. Every two models are one contrast in each column.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean, mean_stderr
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.shown_scores import interval_of_mean, percent_factor
from pipeline.report.contrasts import MeasuredPair, contrast_lines
from pipeline.report.load.contents import CellResult, CellScore, Evaluation, Results, RunResult
from pipeline.report.logs import Log, finite_number, read_file
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stats.ranks import holm
from pipeline.stats.statistics import LEVEL, contrast
from pipeline.text import pluralize

LANGUAGE = "all"  # stands where a language does: logs do not name one
LONGEST = 120  # characters of a setting that are shown
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"

Key = tuple[str, str, str]  # tool, task, filter
Sides = dict[str, dict[Key, Log]]  # by title: the rows of the table


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """The results of a comparison. Raises PipelineError for a log that cannot be read, fewer than two models, or no
    item that two models share."""
    sides = read_sides(entries)
    titles = list(sides)
    by_key: dict[Key, dict[str, Log]] = {}
    for title, logs in sides.items():
        for key, log in logs.items():
            by_key.setdefault(key, {})[title] = log
    matched = [Matched(logs) for logs in by_key.values() if len(logs) > 1]
    columns, refused = columns_of(matched)
    refused += [f"{task}: only “{title}” has a log." for (_, task, _), (title, *others) in by_key.items() if not others]
    computed = describe_logs(sides, matched, list(dict.fromkeys(refused)))
    if not columns:
        problem = f"results=[{','.join(entries)}] have nothing to compare: {first_of(computed['Not compared'], '.')}"
        raise PipelineError(problem.rstrip("."))
    pairs = ((column, *pair) for column in columns for pair in combinations(column.values, 2))
    measured = [measure_pair(column, left, right) for column, right, left in pairs]
    primary = [measured[0].line[key] for key in ("left", "right", "place")] if len(measured) == 1 else []
    lines = contrast_lines(measured, primary)
    cells = [cell for column in columns for cell in cells_of(column, titles, lines)]
    runs = [run_of(title, list(logs.values())) for title, logs in sides.items()]
    return Results(
        table=name, title=f"{titles[1]} against {titles[0]}" if len(titles) == 2 else f"{len(titles)} models compared",
        note=note_of(computed), command=command, rows=titles, cells=cells, runs=runs,
        columns=list(dict.fromkeys(cell.column for cell in cells)), seconds=sum(run.seconds or 0.0 for run in runs),
        versions={"pipeline": package_version(DISTRIBUTION)}, computed=computed, contrasts=lines, primary=primary,
        linked=False, evaluations={title: answers_of_side(columns, title) for title in titles},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- reading


def read_sides(entries: Sequence[str]) -> Sides:
    """The models in these folders and files. Raises PipelineError, among others, for a task that a model ran twice."""
    sides: dict[tuple[Path, str], dict[Key, Log]] = {}
    for entry in entries:
        for log in read_entry(entry):
            logs, key = sides.setdefault((Path(entry).resolve(), log.model), {}), (log.tool, log.task, log.filter)
            if key in logs:
                files = f"{logs[key].file.name} and {log.file.name}"
                problem = f"results={entry} holds {log.task} of {log.model} twice, in {files}"
                raise PipelineError(f"{problem}: name one of these files instead")
            logs[key] = log
    names = Counter(model for _, model in sides)
    shared = os.path.commonpath([entry for entry, _ in sides])
    titles = [f"{model} ({os.path.relpath(entry, shared)})" if names[model] > 1 else model for entry, model in sides]
    if len(titles) < 2:
        raise PipelineError(f"results holds one model, {titles[0]}: name the folders or files of two or more")
    return dict(zip(titles, sides.values(), strict=True))


def read_entry(entry: str) -> list[Log]:
    """The logs of a file, or of all files below a folder."""
    path = Path(entry)
    if not path.exists():
        raise PipelineError(f"results={entry} does not exist: give folders or files that lm_eval or inspect_ai wrote")
    files = [path] if path.is_file() else [
        file for file in sorted(path.rglob("*"))
        if file.suffix in (".json", ".eval") and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]  # fmt: skip
    logs = [log for file in files for log in read_file(file)]
    if not logs:
        wanted = "results_*.json with samples_*.jsonl of lm_eval, nor .eval or .json of inspect_ai"
        raise PipelineError(f"results={entry} holds no log, neither {wanted}: give another folder or file")
    return logs


# ---------------------------------------------------------------------------------------------------- matching


class Matched:
    """A task as all sides with a log of it answered it. logs, items: by the title of the side; keys: of the items that
    all of them hold, in the first one's order."""

    def __init__(self, logs: Mapping[str, Log]) -> None:
        self.logs = logs
        self.task = next(iter(logs.values())).task
        self.items = {title: log.by_key for title, log in logs.items()}
        first, *others = self.items.values()
        self.keys = [name for name in first if all(name in other for other in others)]

    def describe_match(self) -> str:
        """How many items of each side are matched."""
        if all(len(items) == len(self.keys) for items in self.items.values()):
            return f"{self.task}: the same {pluralize(len(self.keys), 'item')} in all logs."
        counts = " and ".join(f"{len(items)} of “{title}”" for title, items in self.items.items())
        return f"{self.task}: {len(self.keys)} matched items, of {counts}; only these are compared."

    def differing_items(self) -> Iterator[str]:
        """Sentences on matched items whose prompts or targets differ."""
        for what in ("prompt", "target"):
            count = sum(len({getattr(items[key], what) for items in self.items.values()}) > 1 for key in self.keys)
            if count:
                yield f"{self.task}: the {what}s of {count} of {len(self.keys)} items differ."

    def printed_groups(self) -> Iterator[str]:
        """What lm_eval printed for groups of tasks such as mmlu, of which only the tasks are compared."""
        for group, metric in sorted(set.intersection(*(set(log.groups) for log in self.logs.values()))):
            values = {title: f"{log.groups[group, metric]:.4g}" for title, log in self.logs.items()}
            yield f"{group} {metric}: {by_side(values)}."

    def why_not(self, metric: str) -> str:
        """Why a metric cannot be compared; empty if it can."""
        for title, log in self.logs.items():
            known = [number for item in log.items if (number := finite_number(item.values.get(metric))) is not None]
            if lacking := len(log.items) - len(known):
                return f"{metric} of {self.task} has no number for {lacking} of {len(log.items)} items of “{title}”"
            printed, value = log.scores.get(metric), mean(known)
            if printed is not None and not log.problems and abs(value - printed) > 1e-6 * max(1.0, abs(printed)):
                score = f"{metric} of {self.task} is {printed:.6g} for “{title}”, but the mean of its items {value:.6g}"
                return f"{score}, so a comparison of items says nothing about it"
        return ""


@dataclass(frozen=True)
class Column:
    """A metric of a matched task: a column of the table. values: title of a side -> a number per matched item;
    is_share: all are shares of 1, shown in percent; factor: from a value to the number that is shown."""

    title: str
    metric: str
    matched: Matched
    values: dict[str, list[float]]
    is_share: bool
    factor: float
    lower_is_better: bool


def columns_of(matched: Sequence[Matched]) -> tuple[list[Column], list[str]]:
    """(the columns, sentences on metrics that are not compared)."""
    columns: dict[str, Column] = {}
    refused = []
    for one in matched:
        empty = [f"no item of {one.task} has a score in {log.file.name} of “{title}”."
                 for title, log in one.logs.items() if not log.items]  # fmt: skip
        refused += empty or ([] if one.keys else [f"{one.task}: no item is in all logs."])
        metrics = dict.fromkeys(name for log in one.logs.values() for item in log.items for name in item.values)
        reasons = {metric: "" if empty else one.why_not(metric) for metric in metrics}
        refused += [f"{reason}." for reason in reasons.values() if reason]
        for metric in [name for name, reason in reasons.items() if one.keys and not reason]:
            values = {title: [finite_number(items[key].values[metric]) or 0.0 for key in one.keys]
                      for title, items in one.items.items()}  # fmt: skip
            is_share = all(0 <= value <= 1 for numbers in values.values() for value in numbers)
            lower = any(metric in log.lower_is_better for log in one.logs.values())
            log = next(iter(one.logs.values()))
            title = f"{log.task} {metric}{f' ({log.filter})' * (log.filter != 'none')}{' (lower is better)' * lower}"
            title = re.sub(r"[\x00-\x1f]+", "_", title)
            title += f" of {log.tool}" * (title in columns)
            columns[title] = Column(title, metric, one, values, is_share, 100.0 if is_share else 1.0, lower)
    return list(columns.values()), refused


# ---------------------------------------------------------------------------------------------------- comparing


def measure_pair(column: Column, left: str, right: str) -> MeasuredPair:
    """Two sides of a column: Tango's score test of shares, Student's t of other numbers."""
    values = [column.values[side] for side in (left, right)]
    line: dict[str, Any] = {"left": left, "right": right, "place": column.title, "over": "problems", "unit": "points"}
    line |= {"n": len(values[0]), "chosen_of": 1, "lower_is_better": column.lower_is_better}
    line |= {"left_value": column.factor * mean(values[0]), "right_value": column.factor * mean(values[1])}
    try:
        differences = [a - b for a, b in zip(*values, strict=True)]
        test = contrast(differences, reach=1.0 if column.is_share else math.inf)
    except ValueError:
        test, line["missing"] = None, "the differences of all items are equal, so they show no variance"
    return MeasuredPair(line, column.metric, (), test, column.factor)


def cells_of(column: Column, titles: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> Iterator[CellResult]:
    sign = -1 if column.lower_is_better else 1
    top = max(column.values, key=lambda title: sign * mean(column.values[title]))
    ps = [1.0 if line["p"] is None or not line["difference"] else line["p"] for line in lines
          if line["place"] == column.title and top in (line["left"], line["right"])]  # fmt: skip
    best = top if ps and max(holm(ps)) < LEVEL else None
    for title in titles:
        if title not in column.values:
            yield CellResult(title, column.title, missing=f"“{title}” has no log of {column.matched.task}")
            continue
        values = column.values[title]
        ends = interval_of_mean(mean(values), mean_stderr(values), len(values), column.is_share)
        low, high = (column.factor * end for end in ends) if ends else (None, None)
        yield CellResult(
            title, column.title, value=column.factor * mean(values), low=low, high=high, n=1, runs=[title],
            scores=[CellScore(title)], task=column.title, metric=column.metric, best=title == best,
        )  # fmt: skip


def run_of(title: str, logs: Sequence[Log]) -> RunResult:
    seconds = {log.file.name if log.tool == "inspect_ai" else log.started: log.seconds for log in logs}
    return RunResult(
        name=title, stage="eval", folder=Path(), label=title, model=logs[0].model, started=logs[0].started,
        config=dict(sorted(set.intersection(*(set(log.settings.items()) for log in logs)))),
        seconds=sum(seconds.values()) or None, versions={logs[0].tool: logs[0].version},
    )  # fmt: skip


def answers_of_side(columns: Sequence[Column], title: str) -> Evaluation:
    """A side's scores and answers as evaluations store them. Numbers on a scale of their own have no standard error
    there: Wilson's interval would be computed from it. doc_id: the place among the matched items."""
    rows, samples = [], []
    for column in (column for column in columns if title in column.values):
        values, log = column.values[title], column.matched.logs[title]
        scale = column.factor / percent_factor(column.metric)
        rows.append(ScoreRow(
            task=column.title, language=LANGUAGE, pair=None, subject=None, num_fewshot=log.num_fewshot, n=len(values),
            metric=column.metric, filter=log.filter, value=scale * mean(values),
            stderr=mean_stderr(values) if column.is_share and scale == 1 else None,
        ))  # fmt: skip
        binary = all({*numbers} <= {0.0, 1.0} for numbers in column.values.values())
        items = [column.matched.items[title][key] for key in column.matched.keys]
        samples.append((column.title, LANGUAGE, [
            {"doc_id": number, "prompt": item.prompt, "target": item.target, "response": item.response,
             "extracted": item.extracted, "scores": {column.metric: value}, "correct": bool(value) if binary else None}
            for number, (item, value) in enumerate(zip(items, values, strict=True))
        ]))  # fmt: skip
    return Evaluation(rows, samples=samples)


# ---------------------------------------------------------------------------------------------------- in sentences


def describe_logs(sides: Sides, matched: Sequence[Matched], refused: list[str]) -> dict[str, list[str]]:
    """Title -> sentences: which logs, which items, how their settings differ, and what is not compared."""
    by_task = list({one.task: one for one in matched}.values())
    return {
        "Logs": [f"“{title}”: {pluralize(len(logs), 'log')} by {next(iter(logs.values())).tool} "
                 f"{next(iter(logs.values())).version}." for title, logs in sides.items()],
        "Matched items": list(dict.fromkeys(one.describe_match() for one in by_task if one.keys)),
        "Incomplete logs": list(dict.fromkeys(
            f"“{title}”: {problem}"
            for title, side in sides.items() for log in side.values() for problem in log.problems
        )),
        "Different settings": [
            *dict.fromkeys(sentence for one in by_task for sentence in one.differing_items()),
            *differing_settings(by_task),
        ],
        "Groups, as printed": list(dict.fromkeys(text for one in matched for text in one.printed_groups())),
        "Not compared": refused,
    }  # fmt: skip


def differing_settings(matched: Sequence[Matched]) -> list[str]:
    """A sentence for each setting that differs, with the tasks that it differs in if these are not all."""
    tasks_of: dict[str, list[str]] = {}
    for one in matched:
        for name in dict.fromkeys(name for log in one.logs.values() for name in log.settings):
            values = {title: log.settings.get(name, "not set") for title, log in one.logs.items()}
            if len(set(values.values())) > 1:
                tasks_of.setdefault(f"{name}: {by_side(values)}", []).append(one.task)
    return [f"{text}." if len(tasks) == len(matched) else f"{text}, in {', '.join(tasks)}."
            for text, tasks in tasks_of.items()]  # fmt: skip


def by_side(values: Mapping[str, str]) -> str:
    short = (f"{text[:LONGEST]}{'…' * (len(text) > LONGEST)} (“{title}”)" for title, text in values.items())
    return ", ".join(short)


def first_of(sentences: Sequence[str], where: str) -> str:
    more = [f"And {len(sentences) - IN_NOTE} more{where}"] if len(sentences) > IN_NOTE else []
    return " ".join([*sentences[:IN_NOTE], *more])


def note_of(computed: Mapping[str, Sequence[str]]) -> str:
    """What a reader of the verdict must know: the matched part, differences in settings, and what is not compared."""
    kinds = {
        "Not all items are in all logs.": [text for text in computed["Matched items"] if "matched items, of" in text],
        "Incomplete logs.": computed["Incomplete logs"], "The settings differ.": computed["Different settings"],
        "Not compared.": computed["Not compared"],
    }  # fmt: skip
    sentences = [] if computed["Different settings"] else ["The recorded settings are the same."]
    for title, listed in kinds.items():
        sentences += [title, first_of(listed, " under “How it was computed”.")] if listed else []
    return " ".join(sentences)
