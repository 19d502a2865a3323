"""stage=compare: logs of `lm_eval --log_samples` and inspect_ai (with the extra inspect) as scores and answers of a
table, whose rows are models and whose columns metrics of tasks.

Compared are the items that all logs of a task hold: equal documents by lm_eval's doc_hash, equal sample ids and inputs
of inspect_ai. The files come from other machines and are untrusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.metrics import mean, mean_stderr
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import finite_or_none, percent_factor
from pipeline.report.cells import cell_result
from pipeline.report.contrasts import best_of, measure_pairs
from pipeline.report.load.answers import Evaluation, Place, Vector, read_answers, read_samples, text_of
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.marks import questions_to_keep
from pipeline.report.private import without_private
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.runs.run import flatten_dict
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan
from pipeline.tables.schema import Side, Table
from pipeline.text import pluralize

TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
SECRET = re.compile(r"(?i)token$|api_key|secret|password")
# beginnings of settings that are the model itself, have no effect on scores, or are named elsewhere
NO_SETTING = ("model", "batch_size", "use_cache", "bootstrap_iters", "gen_kwargs", "task.metadata.", "task.metric_list",
              "task.num_fewshot", "task.task", "generation.max_connections", "generation.max_retries",
              "generation.timeout", "generation.attempt_timeout", "generation.cache")  # fmt: skip
THE_MODEL = ("pretrained", "model", "peft", "delta", "revision", "base_url", "tokenizer")  # of model_args
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError, OSError)
LANGUAGE = "all"  # stands where a language does: logs do not name one
LONGEST = 120  # characters of a setting that are shown
IN_NOTE = 3  # sentences of a kind next to the verdict; the others are under "How it was computed"


@dataclass(frozen=True)
class Log:
    """A task of a model, as one filter (lm_eval) read its answers. items: key -> a sample, whose scores are what the
    tool recorded, numbers or not; scores: metric -> the number that the tool printed; lower_is_better: metrics, as far
    as the log tells; problems: what the log lacks."""

    tool: str
    model: str
    task: str
    filter: str
    file: Path
    started: str
    items: dict[str, dict[str, Any]]
    scores: Mapping[str, float]
    settings: Mapping[str, str]
    version: str
    num_fewshot: int | None = None
    lower_is_better: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def keyed(items: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Items by key; one that the data holds twice by its key and how often it came before."""
    counts: Counter[str] = Counter()
    found = {}
    for key, item in items:
        counts[key] += 1
        found[f"{key} {counts[key]}"] = item
    return found


def sample_of(prompt: Any, target: Any, response: Any, extracted: Any, scores: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"prompt": prompt, "target": target, "response": response, "extracted": extracted}
    return {name: text_of(value) for name, value in texts.items()} | {"scores": scores}


# ---------------------------------------------------------------------------------------------------- comparing


@dataclass
class LogAnswers(StoredAnswers):
    """The matched items of logs. numbers: item -> its number, over 100 as tables have it; rows: of results.csv; shares:
    the columns of shares of 1."""

    numbers: dict[ScoreRef, Vector] = field(default_factory=dict)
    rows: dict[ScoreRef, ScoreRow] = field(default_factory=dict)
    shares: set[str] = field(default_factory=set)

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


def compare_logs(entries: Sequence[str], name: str, command: str) -> Results:
    """The results of a comparison. Raises PipelineError for a log that cannot be read, fewer than two models, or no
    item that two models share."""
    models = read_models(entries)
    titles = list(models)
    sides = [Side(title, {"run": title}) for title in titles]
    table = Table("", name, "", "", None, {}, {}, {}, {}, Side(""), [], sides, (), [], False)
    plan = TablePlan(table, {}, rows=titles)
    stored = LogAnswers(BoundTable(plan, {}, {}, {}, {}))
    told: dict[str, list[str]] = {
        "Logs": [f"“{title}”: {pluralize(len(logs), 'log')} by {logs[0].tool} {logs[0].version}."
                 for title, logs in models.items()],
        "Matched items": [], "Incomplete logs": [], "Different settings": [], "Not compared": [],
    }  # fmt: skip
    samples: dict[str, list[tuple[Place, list[Sample]]]] = {title: [] for title in titles}
    lower: set[str] = set()
    for column, metric, logs, keys in matched_columns(models, told):
        numbers = {title: [float(log.items[key]["scores"][metric]) for key in keys] for title, log in logs.items()}
        is_share, is_binary = (all(test(value) for values in numbers.values() for value in values)
                               for test in (lambda value: 0 <= value <= 1, lambda value: value in (0, 1)))  # fmt: skip
        plan.columns.append(column)
        stored.shares |= {column} if is_share else set()
        lower |= {column} if any(metric in log.lower_is_better for log in logs.values()) else set()
        for title in titles:
            score = ScoreRef(title, (("task", column),), LANGUAGE)
            plan.cells[title, column] = Cell(title, column, [Item({}, ({(): score},))], metric=column)
            if title not in logs:
                continue
            values, factor = numbers[title], 100 if is_share else 1
            scale = factor / percent_factor(metric)
            error = mean_stderr(values) if is_share and scale == 1 else None  # else results.csv has Wilson's of it
            stored.numbers[score] = {at: factor * value / 100 for at, value in enumerate(values)}
            stored.rows[score] = ScoreRow(column, LANGUAGE, None, None, logs[title].num_fewshot, metric,
                                          logs[title].filter, scale * mean(values), error, len(values))  # fmt: skip
            samples[title].append(((title, column, LANGUAGE), [
                {**logs[title].items[key], "doc_id": at, "scores": {metric: value},
                 "correct": bool(value) if is_binary else None}
                for at, (key, value) in enumerate(zip(keys, values, strict=True))
            ]))  # fmt: skip
    told = {title: list(dict.fromkeys(sentences)) for title, sentences in told.items()}
    if not plan.columns:
        problem = f"results=[{','.join(entries)}] have nothing to compare: {first_of(told['Not compared'], '.')}"
        raise PipelineError(problem.rstrip("."))
    cells = [cell_result(stored, cell) for cell in plan.cells.values()]
    scored = {column: [cell for cell in cells if cell.column == column and cell.value is not None]
              for column in plan.columns}  # fmt: skip
    best = [best_of(plan, stored, rivals, column in lower) for column, rivals in scored.items()]
    pairs = [(left.row, right.row, column) for column, rivals in scored.items()
             for right, left in combinations(rivals, 2)]  # fmt: skip
    table.primary = pairs[0] if len(pairs) == 1 else ()
    evaluations = {
        title: Evaluation([row for score, row in stored.rows.items() if score.model == title], samples=samples[title])
        for title in titles
    }
    answers, parquet = read_answers(evaluations, questions_to_keep(cells))
    return Results(
        table=name, title=f"{titles[1]} against {titles[0]}" if len(titles) == 2 else f"{len(titles)} models compared",
        note=note_of(told), command=command, rows=titles, columns=plan.columns,
        runs=[run_of(title, logs) for title, logs in models.items()],
        cells=[replace(cell, best=any(cell is one for one in best)) for cell in cells], computed=told,
        seconds=sum(log.seconds for logs in models.values() for log in logs),
        versions={"pipeline": package_version(DISTRIBUTION)}, primary=table.primary,
        contrasts=[{**line, "lower_is_better": line["place"] in lower} for line in measure_pairs(plan, stored, pairs)],
        evaluations=evaluations, answers=answers, parquet=parquet,
    )  # fmt: skip


Column = tuple[str, str, dict[str, Log], list[str]]  # title, metric, logs by model, keys of the items that all hold


def matched_columns(models: Mapping[str, Sequence[Log]], told: Mapping[str, list[str]]) -> Iterator[Column]:
    """The metrics that can be compared; `told` gets sentences on how the logs differ, and on what is not compared."""
    tasks: dict[tuple[str, str, str], dict[str, Log]] = {}
    for title, listed in models.items():
        for log in listed:
            tasks.setdefault((log.tool, log.task, log.filter), {})[title] = log
    titles = Counter[str]()
    for (tool, task, filter_name), logs in tasks.items():
        first, *others = logs.values()
        keys = [key for key in first.items if all(key in other.items for other in others)]
        told["Incomplete logs"] += [f"“{title}”: {text}" for title, log in logs.items() for text in log.problems]
        if not (others and keys):
            empty = [f"no item of {task} has a score in {log.file.name} of “{title}”."
                     for title, log in logs.items() if not log.items]  # fmt: skip
            alone = f"{task}: only “{next(iter(logs))}” has a log."
            told["Not compared"] += empty or [f"{task}: no item is in all logs." if others else alone]
        elif any(len(log.items) > len(keys) for log in logs.values()):
            counts = " and ".join(f"{len(log.items)} of “{title}”" for title, log in logs.items())
            told["Matched items"].append(f"{task}: {len(keys)} matched items, of {counts}; only these are compared.")
        told["Different settings"] += differences_of(task, logs, keys) if others and keys else ()
        metrics = {name: None for log in logs.values() for one in log.items.values() for name in one["scores"]}
        for metric in metrics if all(log.items for log in logs.values()) else ():
            if reason := why_not(logs, metric):
                told["Not compared"].append(f"{reason}.")
            elif others and keys:
                is_lower = any(metric in log.lower_is_better for log in logs.values())
                column = f"{task} {metric}{f' ({filter_name})' * (filter_name != 'none')}"
                column = re.sub(r"[\x00-\x1f]+", "_", column + " (lower is better)" * is_lower)
                titles[column] += 1
                yield column + f" of {tool}" * (titles[column] > 1), metric, logs, keys


def why_not(logs: Mapping[str, Log], metric: str) -> str:
    """Why a metric cannot be compared; empty if it can."""
    for title, log in logs.items():
        known = [
            number for item in log.items.values() if (number := finite_or_none(item["scores"].get(metric))) is not None
        ]
        if lacking := len(log.items) - len(known):
            return f"{metric} of {log.task} has no number for {lacking} of {len(log.items)} items of “{title}”"
        printed, value = log.scores.get(metric), mean(known)
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


def note_of(told: Mapping[str, Sequence[str]]) -> str:
    """What a reader of the verdict must know: the matched part, differences in settings, and what is not compared."""
    sentences = [f"{title}: {first_of(listed, ' under “How it was computed”.')}" for title, listed in told.items()
                 if listed and title != "Logs"]  # fmt: skip
    return " ".join(sentences if told["Different settings"] else ["The recorded settings are the same.", *sentences])


# ---------------------------------------------------------------------------------------------------- reading


def read_models(entries: Sequence[str]) -> dict[str, list[Log]]:
    """The logs of the models in these folders and files, by their titles. Raises PipelineError, among others, for a
    task that a model ran twice."""
    models: dict[tuple[Path, str], list[Log]] = {}
    for entry in entries:
        for log in read_entry(Path(entry)):
            logs = models.setdefault((Path(entry).resolve(), log.model), [])
            for other in logs:
                if (log.tool, log.task, log.filter) == (other.tool, other.task, other.filter):
                    problem = f"results={entry} holds {log.task} of {log.model} twice"
                    files = f"{other.file.name} and {log.file.name}"
                    raise PipelineError(f"{problem}, in {files}: name one of these files instead")
            logs.append(log)
    names = Counter(model for _, model in models)
    shared = os.path.commonpath([entry for entry, _ in models])
    titles = [f"{model} ({os.path.relpath(entry, shared)})" if names[model] > 1 else model for entry, model in models]
    if len(titles) < 2:
        raise PipelineError(f"results holds one model, {titles[0]}: name the folders or files of two or more")
    return dict(zip(titles, models.values(), strict=True))


def read_entry(path: Path) -> list[Log]:
    """The logs of a file, or of all files below a folder."""
    if not path.exists():
        raise PipelineError(f"results={path} does not exist: give folders or files that lm_eval or inspect_ai wrote")
    below = [file for file in sorted(path.rglob("*")) if file.suffix in (".json", ".eval")
             and not any(part.startswith(".") for part in file.relative_to(path).parts)]  # fmt: skip
    logs = [log for file in ([path] if path.is_file() else below) if file.is_file() for log in read_file(file)]
    if not logs:
        wanted = "results_*.json with samples_*.jsonl of lm_eval, nor .eval or .json of inspect_ai"
        raise PipelineError(f"results={path} holds no log, neither {wanted}: give another folder or file")
    return logs


def read_file(file: Path) -> list[Log]:
    """The logs in a file; none if it is JSON of something else."""
    if file.suffix == ".jsonl":
        raise PipelineError(f"results={file} is a samples file: give the results_*.json next to it, or its folder")
    with as_one_sentence(file, "inspect_ai" if file.suffix == ".eval" else "lm_eval or inspect_ai"):
        if file.suffix == ".eval":
            return read_inspect(file)
        content = json.loads(file.read_bytes().decode(errors="replace"))
        if isinstance(content, dict) and {"version", "status", "eval"} <= content.keys():
            return read_inspect(file)
        is_lm_eval = isinstance(content, dict) and {"results", "configs", "n-shot"} <= content.keys()
        with as_one_sentence(file, "lm_eval"):
            return read_lm_eval(file, replaced_surrogates(content)) if is_lm_eval else []


def replaced_surrogates(content: Any) -> Any:
    """JSON whose unpaired surrogates, which JSON can write and UTF-8 cannot, are question marks."""
    return json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))


# ---------------------------------------------------------------------------------------------------- lm_eval


def read_lm_eval(path: Path, content: dict[str, Any]) -> list[Log]:
    """The tasks of one results file, with the samples files next to it."""
    found = TIME.search(path.name)
    names = {task: f"samples_{task}_{found[1]}.jsonl" for task in content["configs"]} if found else {}
    there = {task: path.parent / name for task, name in names.items() if (path.parent / name).is_file()}
    if not there:
        wanted = next(iter(names.values()), "samples_TASK_TIME.jsonl")
        raise PipelineError(f"{path} has no samples file {wanted} next to it: run lm_eval with --log_samples")
    logs = []
    for task, samples in there.items():
        by_filter: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        with as_one_sentence(samples, "lm_eval"):
            for row in read_lines(samples):
                by_filter.setdefault(str(row["filter"]), []).append((str(row["doc_hash"]), lm_eval_item(row)))
        expected, shots = content.get("n-samples", {}).get(task, {}).get("effective"), content["n-shot"].get(task)
        directions = content.get("higher_is_better", {}).get(task) or {}
        for name, items in by_filter.items():
            lacking = f"{samples.name} holds {len(items)} of the {expected} items that were scored."
            printed = {key.partition(",")[0]: value for key, value in content["results"].get(task, {}).items()
                       if key.endswith(f",{name}") and finite_or_none(value) is not None}  # fmt: skip
            logs.append(Log(
                "lm_eval", model_title(str(content.get("model_name") or "")), task, name, path,
                str(content.get("date") or ""), keyed(items), printed,
                setting_texts(lm_eval_settings(content, task)), str(content.get("lm_eval_version")),
                shots if isinstance(shots, int) else None,
                frozenset(metric for metric, higher in directions.items() if higher is False),
                (lacking,) if isinstance(expected, int) and len(items) < expected else (),
                float(content.get("total_evaluation_time_seconds") or 0),
            ))  # fmt: skip
    return logs


def read_lines(samples: Path) -> list[dict[str, Any]]:
    try:
        lines = read_samples(samples)
    except (PipelineError, UnicodeDecodeError):
        raise PipelineError(f"{samples} holds a line that is not JSON: copy it again") from None
    if not lines:
        raise PipelineError(f"{samples} is empty: copy it again")
    return lines


def lm_eval_item(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line of a samples file. Where options were weighed, what is extracted is the most likely one."""
    arguments = row["arguments"]
    requests = [list(one.values()) if isinstance(one, dict) else list(one)
                for one in (arguments.values() if isinstance(arguments, dict) else arguments)]  # fmt: skip
    read, response = row["filtered_resps"], row["resps"]
    while isinstance(response, list) and len(response) == 1:
        response = response[0]
    extracted = read[0] if isinstance(read, list) and read else read
    if len(requests) == len(read) > 1 and all(isinstance(pair, list) and len(pair) == 2 for pair in read):
        extracted = requests[max(range(len(read)), key=lambda at: float(read[at][0]))][1]
    values = {str(metric): row.get(metric) for metric in row["metrics"]}
    return sample_of(requests[0][0], row["target"], response, extracted, values)


def lm_eval_settings(content: dict[str, Any], task: str) -> dict[str, Any]:
    """What may differ between two runs of a task, by dotted names: of the task, of the command, and versions."""
    config = content.get("config", {})
    arguments = config.get("model_args")
    settings = config | {
        "num_fewshot": content["n-shot"].get(task), "version of the task": content["versions"].get(task),
        "chat_template": content.get("chat_template_sha"), "system_instruction": content.get("system_instruction_sha"),
        **{key: content.get(key) for key in ("fewshot_as_multiturn", "max_length")},
        **{key: content.get(f"{key}_version") for key in ("lm_eval", "transformers")},
        "generation": config.get("gen_kwargs"), "task": content["configs"][task],
        "arguments": {key: value for key, value in arguments.items() if key not in THE_MODEL}
        if isinstance(arguments, dict) else None,
    }  # fmt: skip
    return {key: value for key, value in flatten_dict(settings).items() if not key.startswith(NO_SETTING)}


# ---------------------------------------------------------------------------------------------------- inspect_ai


def read_inspect(path: Path) -> list[Log]:
    """The log of one task, by inspect_ai: its own value of each item over epochs, the answer that of the first."""
    try:
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import value_to_float
    except ImportError:
        raise PipelineError(f"{path} is a log of inspect_ai: pip install 'cross-lingual-merging[inspect]'") from None
    try:
        log = read_eval_log(str(path), resolve_attachments=True)
    except Exception as error:  # whatever a damaged file raises in it
        raise ValueError(str(error)) from error
    if not log.samples:
        raise PipelineError(f"{path} holds no samples: run inspect eval without --no-log-samples")
    to_float = value_to_float()

    def named(scorer: str, value: Any) -> dict[str, float]:
        parts = value.items() if isinstance(value, dict) else [("", value)]
        return {f"{scorer} {key}".strip(): to_float(part) for key, part in parts}

    items = []
    for name in dict.fromkeys(str(sample.id) for sample in log.samples):
        first, *_ = epochs = sorted((one for one in log.samples if str(one.id) == name), key=lambda one: one.epoch)
        recorded: dict[str, list[float]] = {}
        for scorer, score in (pair for one in epochs for pair in (one.scores or {}).items()):
            for metric, value in named(scorer, score.value).items():
                recorded.setdefault(metric, []).append(value)
        messages = [f"{one.role}: {one.text}" for one in first.messages if one.role != "assistant"]
        given = first.input if isinstance(first.input, str) else "\n\n".join(one.text for one in first.input)
        target = first.target if isinstance(first.target, str) else ", ".join(first.target)
        key = hashlib.sha256(json.dumps([name, given]).encode()).hexdigest()
        response = first.output.completion if first.output else ""
        answer = next((score.answer for score in (first.scores or {}).values() if score.answer), response)
        values = {metric: mean(numbers) for metric, numbers in recorded.items()}
        items.append((key, sample_of("\n\n".join(messages) or given, target, response, answer, values)))
    scored_items = [(key, item) for key, item in items if item["scores"]]
    problems = [] if log.status == "success" else [f"The run of {path.name} has status={log.status}."]
    if len(scored_items) < len(items):
        problems.append(f"{len(items) - len(scored_items)} of {len(items)} items of {path.name} have no score.")
    printed = {}
    for one in log.results.scores if log.results else []:
        if number := one.metrics.get("accuracy") or one.metrics.get("mean"):
            printed[one.name if one.name == one.scorer else f"{one.scorer} {one.name}"] = number.value
    spec, plan = (part.model_dump(mode="json") for part in (log.eval, log.plan))
    settings = {key: spec[key] for key in ("task_version", "packages", "scorers", "task_args", "config")}
    settings |= {"generation": {**spec["model_generate_config"], **plan["config"]}, "solvers": plan["steps"]}
    settings |= {"dataset": {key: spec["dataset"][key] for key in ("name", "location")}}
    return [Log(
        "inspect_ai", model_title(log.eval.model), log.eval.task, "none", path, str(log.eval.created or ""),
        keyed(scored_items), printed, setting_texts(flatten_dict(settings)), str(log.eval.packages.get("inspect_ai")),
        problems=tuple(problems),
    )]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- texts


@contextmanager
def as_one_sentence(path: Path, tool: str) -> Iterator[None]:
    """Raise PipelineError, naming the file, for whatever a malformed one raises while it is read."""
    try:
        yield
    except PipelineError:
        raise
    except MALFORMED as error:
        problem = f"{path} is not a complete log of {tool} ({type(error).__name__}: {first_line(error)})"
        raise PipelineError(f"{problem}: copy it again, or name other files in results") from error


def model_title(name: str) -> str:
    """A model's name on the page: of a local folder (also hf//FOLDER of inspect_ai) its last part, on one line."""
    is_path = name.startswith(("/", ".", "~")) or "//" in name
    last = name.rstrip("/").rsplit("/", 1)[-1] if is_path else name
    return " ".join(last.split())[:80] or "unnamed model"


def setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text on one line, without those unset, secrets and local paths."""
    texts = {}
    for name, value in settings.items():
        if value is not None and value != {} and value != [] and not SECRET.search(name):
            private = without_private(value)
            text = private if isinstance(private, str) else json.dumps(private, ensure_ascii=False, sort_keys=True)
            texts[name] = " ".join(text.split()) or repr(text)
    return texts
