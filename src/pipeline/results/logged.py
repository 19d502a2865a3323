"""Results of other evaluation tools as the report reads them: `lm_eval --log_samples` and inspect_ai, from any machine.

A model of an entry of `results` is a row of the table; a metric of a task that is a number for every item, a column.
Compared are the items that all logs of the task hold: equal documents by lm_eval's doc_hash, equal sample ids and
inputs of inspect_ai. Every two models are one contrast in each column.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean, mean_stderr
from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.contents import CellResult, CellScore, Results, RunResult
from pipeline.report.load.inspect_logs import is_inspect, read_inspect
from pipeline.report.load.lm_eval_logs import is_lm_eval, read_lm_eval
from pipeline.report.load.scores import percent_factor
from pipeline.report.load.task_logs import (
    LONGEST_SETTING,
    LoggedItem,
    TaskLog,
    as_one_sentence,
    finite_number,
    parse_json,
    with_ordinals,
)
from pipeline.report.render.text import pluralize
from pipeline.report.stats.compare import holm_level
from pipeline.report.stats.ranks import holm
from pipeline.report.stats.statistics import (
    LEVEL,
    Contrast,
    NormalTest,
    contrast,
    measure_contrast,
    share_interval,
)
from pipeline.results.contrasts import MEASURED
from pipeline.runs.provenance import DISTRIBUTION, package_version

LANGUAGE = "all"  # stands where a language does: logs do not name one
# beginnings of settings that are listed first: prompts, generation, the task
FIRST = ("num_fewshot", "gen", "chat", "system", "solvers", "epochs", "task", "version", "dataset", "model_")
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Side:
    """A model of an entry of `results`: a row of the table. logs: by (tool, task, filter)."""

    title: str
    entry: str
    logs: Mapping[tuple[str, str, str], TaskLog]


def read_sides(entries: Sequence[str]) -> list[Side]:
    """The models in these folders and files. Raises PipelineError, among others, for a task that a model ran twice."""
    logs: dict[tuple[str, str], dict[tuple[str, str, str], TaskLog]] = {}
    entry_of: dict[Path, str] = {}
    for entry in entries:
        for log in read_entry(entry):
            if (other := entry_of.setdefault(log.file.resolve(), entry)) != entry or list(entries).count(entry) > 1:
                named = f"{other} and {entry}" if other != entry else entry
                raise PipelineError(f"results names {log.file.name} twice, in {named}: name each folder or file once")
            of_model = logs.setdefault((entry, log.model), {})
            key = log.tool, log.task, log.filter
            if key in of_model:
                files = f"{of_model[key].file.name} and {log.file.name}"
                problem = f"results={entry} holds {log.task} of {log.model} twice, in {files}"
                raise PipelineError(f"{problem}: name one of these files instead")
            of_model[key] = log
    titles = side_titles(list(logs))
    if len(titles) < 2:
        raise PipelineError(f"results holds one model, {titles[0]}: name the folders or files of two or more")
    return [Side(title, entry, of_model) for title, ((entry, _), of_model) in zip(titles, logs.items(), strict=True)]


def read_entry(entry: str) -> list[TaskLog]:
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


def read_file(file: Path) -> list[TaskLog]:
    """The logs in a file; none if it is JSON of something else."""
    if file.suffix == ".eval":
        return read_inspect(file)
    if file.suffix == ".jsonl":
        raise PipelineError(f"results={file} is a samples file: give the results_*.json next to it, or its folder")
    with as_one_sentence(file, "lm_eval or inspect_ai"):
        content = parse_json(file.read_bytes(), file)
    if is_inspect(content):
        return read_inspect(file, content)
    return read_lm_eval(file, content) if is_lm_eval(content) else []


def side_titles(models: Sequence[tuple[str, str]]) -> list[str]:
    """A title for each (entry, model): the model, with the end of the entry's path if others have the same name."""
    titles = []
    for entry, model in models:
        same = [other for other, name in models if name == model and other != entry]
        parts = Path(entry).parts
        ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = ["/" + "/".join(Path(other).parts) for other in same]
        end = next((end for end in ends if not any(other.endswith(f"/{end}") for other in others)), entry)
        titles.append(f"{model} ({end})" if same else model)
    return titles


# ---------------------------------------------------------------------------------------------------- matching


@dataclass(frozen=True)
class Matched:
    """A task as all sides with a log of it answered it. keys: the items that all of them hold, in the first one's
    order."""

    task: str
    filter: str
    logs: Mapping[str, TaskLog]  # by the title of the side
    keys: Sequence[str]
    items: Mapping[str, Mapping[str, LoggedItem]]

    @classmethod
    def of(cls, key: tuple[str, str, str], sides: Sequence[Side]) -> Matched:
        logs = {side.title: side.logs[key] for side in sides if key in side.logs}
        items = {title: with_ordinals(log.items) for title, log in logs.items()}
        first, *others = items.values()
        keys = [name for name in first if all(name in other for other in others)]
        return cls(key[1], key[2], logs, keys, items)

    @property
    def is_partial(self) -> bool:
        return any(len(items) > len(self.keys) for items in self.items.values())

    def describe_match(self) -> str:
        """How many items of each side are matched."""
        if not self.is_partial:
            return f"{self.task}: the same {pluralize(len(self.keys), 'item')} in all logs."
        counts = " and ".join(f"{len(items)} of “{title}”" for title, items in self.items.items())
        return f"{self.task}: {len(self.keys)} matched items, of {counts}; only these are compared."

    def differing_items(self) -> Iterator[str]:
        """Sentences on matched items whose prompts or targets differ."""
        for what, values in (("prompt", lambda item: item.prompt_hash), ("target", lambda item: item.target)):
            count = sum(len({values(items[key]) for items in self.items.values()}) > 1 for key in self.keys)
            if count:
                yield f"{self.task}: the {what}s of {count} of {len(self.keys)} items differ."

    def lower_is_better(self, metric: str) -> bool:
        return any(metric in log.lower_is_better for log in self.logs.values())

    def metrics(self) -> dict[str, str]:
        """Metric -> why it cannot be compared; empty if it can."""
        recorded = dict.fromkeys(name for log in self.logs.values() for item in log.items for name in item.values)
        return {metric: self.why_not(metric) for metric in recorded}

    def why_not(self, metric: str) -> str:
        for title, log in self.logs.items():
            numbers = [finite_number(item.values.get(metric)) for item in log.items]
            missing = sum(number is None for number in numbers)
            if not numbers:
                return f"no item of {self.task} has a score in {log.file.name} of “{title}”"
            if has_parallel_parts(log):
                return (
                    f"the {len(log.parts)} tasks of {self.task} have the same number of items, as one set of questions "
                    "in several languages has: their answers are not independent"
                )
            if missing:
                return f"{metric} of {self.task} has no number for {missing} of {len(numbers)} items of “{title}”"
            printed, value = log.scores.get(metric), mean([number for number in numbers if number is not None])
            if printed is not None and not log.problems and abs(value - printed) > 1e-6 * max(1.0, abs(printed)):
                score = f"{metric} of {self.task} is {printed:.6g} for “{title}”, but the mean of its items {value:.6g}"
                return f"{score}, so a comparison of items says nothing about it"
        return ""


def has_parallel_parts(log: TaskLog) -> bool:
    """Whether all tasks of a group have the same number of items. Belebele, XNLI and AfriMGSM ask the same questions in
    each language; a test that takes their answers as independent rejects in 23 to 37 % of cases without a difference,
    where models differ in which questions they know (10 languages, 250 questions)."""
    sizes = Counter(item.key.rpartition(" ")[0] for item in log.items)
    return len(log.parts) > 1 and len({*sizes.values()}) == 1


@dataclass
class Column:
    """A metric of a matched task: a column of the table. values: title of a side -> a number per matched item."""

    title: str
    metric: str
    matched: Matched
    values: dict[str, list[float]] = field(default_factory=dict)

    @cached_property
    def is_share(self) -> bool:
        """Whether all numbers are shares of 1, shown in percent; else they have a scale of their own."""
        return all(0 <= value <= 1 for values in self.values.values() for value in values)

    @property
    def tasks(self) -> set[str]:
        """The tasks that it scores: several for a group."""
        return {task for log in self.matched.logs.values() for task in log.parts or (log.task,)}

    @cached_property
    def is_right_or_wrong(self) -> bool:
        return all(set(values) <= {0.0, 1.0} for values in self.values.values())

    @property
    def factor(self) -> float:
        """From values to what is shown."""
        return 100.0 if self.is_share else 1.0


def columns_of(matched: Sequence[Matched]) -> tuple[list[Column], list[str]]:
    """(the columns, sentences on metrics that are not compared)."""
    columns: list[Column] = []
    refused = []
    for one in matched:
        for metric, reason in one.metrics().items():
            refused += [f"{reason}."] if reason else []
            if one.keys and not reason:
                column = Column(unique_title(one, metric, [other.title for other in columns]), metric, one)
                for name, items in one.items.items():
                    column.values[name] = [finite_number(items[key].values[metric]) or 0.0 for key in one.keys]
                columns.append(column)
    return columns, refused


def unique_title(matched: Matched, metric: str, taken: Sequence[str]) -> str:
    """Task, metric and filter, as part of a file name. It has a space, which no task of this program has: those are
    scored in other ways."""
    parts = [matched.task, metric, *([f"({matched.filter})"] if matched.filter != "none" else [])]
    parts += ["(lower is better)"] if matched.lower_is_better(metric) else []
    shortened = [part.encode()[:70].decode(errors="ignore") or "_" for part in parts]  # in total below 255 bytes
    cleaned = " ".join(re.sub(r"[./\\\x00-\x1f]+", "_", part) for part in shortened)
    number, title = 2, cleaned
    while title in taken:
        number, title = number + 1, f"{cleaned} ({number})"
    return title


# ---------------------------------------------------------------------------------------------------- comparing


def compare_logs(entries: Sequence[str], name: str, command: str, folder: Path) -> Results:
    """The results of a comparison, with its scores and answers in `folder`, laid out like runs.

    Raises:
        PipelineError: a log that cannot be read, fewer than two models, or no item that two models share.
    """
    sides = read_sides(entries)
    keys = list(dict.fromkeys(key for side in sides for key in side.logs))
    shared = [key for key in keys if sum(key in side.logs for side in sides) > 1]
    matched = [Matched.of(key, sides) for key in shared]
    columns, refused = columns_of(matched)
    refused += [f"{one.task}: no item is in all logs." for one in matched if not one.keys]
    refused += [f"{key[1]}: only “{side.title}” has a log." for side in sides for key in side.logs if key not in shared]
    if not columns:
        reasons = list(dict.fromkeys(refused))
        more = f" And {len(reasons) - IN_NOTE} more." if len(reasons) > IN_NOTE else ""
        problem = f"results=[{','.join(entries)}] have nothing to compare: {' '.join(reasons[:IN_NOTE])}{more}"
        raise PipelineError(problem.rstrip("."))
    lines = [line for column in columns for line in contrast_lines(column)]
    first, tested = primary_of(columns, lines), sum(line["p"] is not None for line in lines)
    factors = {column.title: column.factor for column in columns}
    for line in lines:
        if (detectable := line.pop("detectable")) is not None:
            is_first = [line[key] for key in ("left", "right", "place")] == first
            line["could_see"] = factors[line["place"]] * detectable(holm_level(tested, is_first, bool(first)))
    runs = [write_side(side, columns, folder / str(number)) for number, side in enumerate(sides)]
    computed = describe_logs(sides, matched, list(dict.fromkeys(refused)))
    titles = [side.title for side in sides]
    return Results(
        table=name, title=f"{titles[1]} against {titles[0]}" if len(titles) == 2 else f"{len(titles)} models compared",
        note=note_of(computed), command=command, rows=titles, columns=[column.title for column in columns],
        cells=[cell for column in columns for cell in cells_of(column, sides, lines)], runs=runs,
        seconds=sum(run.seconds or 0.0 for run in runs), versions={"pipeline": package_version(DISTRIBUTION)},
        computed={title: sentences for title, sentences in computed.items() if sentences}, contrasts=lines,
        primary=first, linked=False,
    )  # fmt: skip


def primary_of(columns: Sequence[Column], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The contrast of two models in the only column that is no part of a group of tasks; empty if there are more."""
    outer = [column.title for column in columns if not any(column.tasks < other.tasks for other in columns)]
    found = [line for line in lines if line["place"] in outer]
    return [found[0][key] for key in ("left", "right", "place")] if len(found) == 1 else []


def contrast_lines(column: Column) -> list[dict[str, Any]]:
    """A line of contrasts.csv for every two sides of a column: the later one against the earlier one."""
    lines, is_loss = [], column.matched.lower_is_better(column.metric)
    for right, left in combinations(column.values, 2):
        line: dict[str, Any] = {"left": left, "right": right, "place": column.title, "over": "problems"}
        line |= {"unit": "points", "chosen_of": 1, "n": len(column.matched.keys)}
        for side, title in (("left_value", left), ("right_value", right)):
            line[side] = column.factor * mean(column.values[title])
        try:
            found = contrast_of(column, left, right)
        except ValueError:
            line["missing"] = "the differences of all items are equal, so they show no variance"
        else:
            line |= {key: column.factor * getattr(found, key) for key in ("difference", "low", "high", "could_see")}
            line["detectable"] = found.detectable
            line |= {"p": found.p, "discordant": found.discordant}
        lines.append({key: line.get(key) for key in (*MEASURED, "detectable")} | {"lower_is_better": is_loss})
    return lines


def contrast_of(column: Column, left: str, right: str) -> Contrast:
    """Tango's score test of shares, Student's t of other numbers."""
    differences = [a - b for a, b in zip(column.values[left], column.values[right], strict=True)]
    return contrast(differences) if column.is_share else measure_contrast(differences)


def cells_of(column: Column, sides: Sequence[Side], lines: Sequence[Mapping[str, Any]]) -> Iterator[CellResult]:
    best = best_side(column, lines)
    for side in sides:
        values = column.values.get(side.title)
        if values is None:
            yield CellResult(side.title, column.title, missing=f"“{side.title}” has no log of {column.matched.task}")
            continue
        low, high = interval_of(column, values) or (None, None)
        yield CellResult(
            side.title, column.title, value=column.factor * mean(values), low=low, high=high, n=1, runs=[side.title],
            scores=[CellScore(side.title)], task=column.title, metric=column.metric, best=side.title == best,
        )  # fmt: skip


def interval_of(column: Column, values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of a mean as shown; None if it has no variance that is known."""
    center, n = mean(values), len(values)
    squares = math.fsum((value - center) ** 2 for value in values)
    if column.is_share:
        low, high = share_interval(center, n, squares / n**2)
        return 100 * low, 100 * high
    if n < 2 or not squares:
        return None
    return NormalTest(center, math.sqrt(squares / (n - 1) / n), n - 1, math.inf).interval()


def best_side(column: Column, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The side that is significantly better than every other one, after Holm's correction; None if none is."""
    sign = -1 if column.matched.lower_is_better(column.metric) else 1
    top = max(column.values, key=lambda title: sign * mean(column.values[title]))
    ps = []
    for line in lines:
        if line["place"] == column.title and top in (line["left"], line["right"]):
            ps.append(1.0 if line["p"] is None or not line["difference"] else line["p"])
    return top if ps and max(holm(ps)) < LEVEL else None


# ---------------------------------------------------------------------------------------------------- writing


def write_side(side: Side, columns: Sequence[Column], folder: Path) -> RunResult:
    """Write a side's scores.json and samples/ into a folder, as an evaluation has them."""
    (folder / "samples").mkdir(parents=True)
    rows = []
    for column in columns:
        if side.title in column.values:
            rows.append(score_row(column, side.title).as_json())
            samples = folder / "samples" / f"{column.title}.{LANGUAGE}.jsonl"
            with samples.open("w", encoding="utf-8") as file:
                for number in range(len(column.matched.keys)):
                    file.write(json.dumps(sample_of(column, side.title, number)) + "\n")
    (folder / "scores.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    logs = list(side.logs.values())
    seconds = {log.file.name if log.tool == "inspect_ai" else log.started: log.seconds or 0.0 for log in logs}
    return RunResult(
        name=side.title, stage="eval", folder=folder, label=side.title, model=logs[0].model, started=logs[0].started,
        config=dict(sorted(set.intersection(*(set(log.settings.items()) for log in logs)))),
        seconds=sum(seconds.values()) or None, versions=dict(logs[0].versions),
    )  # fmt: skip


def score_row(column: Column, title: str) -> ScoreRow:
    """The score as scores.json has it. Numbers on a scale of their own have no standard error there: Wilson's interval
    would be computed from it."""
    values, scale = column.values[title], column.factor / percent_factor(column.metric)
    error = mean_stderr(values) if column.is_share and scale == 1 else None
    log = column.matched.logs[title]
    return ScoreRow(
        task=column.title, language=LANGUAGE, pair=None, subject=None, num_fewshot=log.num_fewshot, n=len(values),
        metric=column.metric, filter=log.filter, value=scale * mean(values), stderr=error,
    )  # fmt: skip


def sample_of(column: Column, title: str, number: int) -> dict[str, Any]:
    """An answer as samples/ has it. doc_id: the place among the matched items, the same for all sides."""
    item, value = column.matched.items[title][column.matched.keys[number]], column.values[title][number]
    sample = {
        "doc_id": number, "prompt": item.prompt, "target": item.target, "response": item.response,
        "extracted": item.chosen.get(column.metric, item.extracted), "scores": {column.metric: value},
        "correct": bool(value) if column.is_right_or_wrong else None,
    }  # fmt: skip
    return sample if item.cut_off is None else sample | {"cut_off": item.cut_off}


# ---------------------------------------------------------------------------------------------------- in sentences


def describe_logs(sides: Sequence[Side], matched: Sequence[Matched], refused: list[str]) -> dict[str, list[str]]:
    """Title -> sentences: which logs, which items, how their settings differ, and what is not compared."""
    by_task = list({one.task: one for one in matched}.values())
    return {
        "Logs": [describe_side(side) for side in sides],
        "Matched items": list(dict.fromkeys(one.describe_match() for one in by_task if one.keys)),
        "Incomplete logs": list(dict.fromkeys(
            f"“{side.title}”: {problem}" for side in sides for log in side.logs.values() for problem in log.problems)),
        "Different settings": [
            *dict.fromkeys(sentence for one in by_task for sentence in one.differing_items()),
            *differing_settings(by_task),
        ],
        "Not compared": refused,
    }  # fmt: skip


def describe_side(side: Side) -> str:
    logs = list(side.logs.values())
    tools = dict.fromkeys(f"{log.tool} {log.versions.get(log.tool, 'of unknown version')}" for log in logs)
    tasks = pluralize(len({log.task for log in logs}), "task")
    return f"“{side.title}”: {tasks} by {' and '.join(tools)}, in {pluralize(len({log.file for log in logs}), 'file')}."


def differing_settings(matched: Sequence[Matched]) -> list[str]:
    """A sentence for each setting that differs, with the tasks that it differs in if these are not all; those of FIRST
    first."""
    tasks_of: dict[str, list[str]] = {}
    for one in matched:
        settings = {title: log.settings for title, log in one.logs.items()}
        for name in dict.fromkeys(name for values in settings.values() for name in values):
            values = {title: texts.get(name, "not set") for title, texts in settings.items()}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{shortened_text(text)} (“{title}”)" for title, text in values.items())
                tasks_of.setdefault(f"{name}: {shown}", []).append(one.task)
    places = {text: [text.startswith(start) for start in (*FIRST, "")].index(True) for text in tasks_of}
    return [
        f"{text}." if len(tasks_of[text]) == len(matched) else f"{text}, in {', '.join(tasks_of[text])}."
        for text in sorted(tasks_of, key=places.__getitem__)
    ]


def shortened_text(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"{text[:LONGEST_SETTING]}…"


def note_of(computed: Mapping[str, Sequence[str]]) -> str:
    """What a reader of the verdict must know: the matched part, differences in settings, and what is not compared."""
    partial = [sentence for sentence in computed["Matched items"] if "matched items, of" in sentence]
    kinds = {
        "Not all items are in all logs.": partial, "Incomplete logs.": computed["Incomplete logs"],
        "The settings differ.": computed["Different settings"], "Not compared.": computed["Not compared"],
    }  # fmt: skip
    sentences = [] if computed["Different settings"] else ["The recorded settings are the same."]
    for title, listed in kinds.items():
        more = [f"And {len(listed) - IN_NOTE} more under “How it was computed”."] if len(listed) > IN_NOTE else []
        sentences += [title, *listed[:IN_NOTE], *more] if listed else []
    return " ".join(sentences)
