"""Reads logs of `lm_eval --log_samples` and inspect_ai (with the extra inspect).

The files come from other machines and are untrusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.metrics import finite_or_none
from pipeline.hub.addresses import without_credentials
from pipeline.report.load.answers import read_samples, text_of
from pipeline.report.render.harness_logs import write_harness_logs
from pipeline.runs.folders import label_in
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import flatten_dict
from pipeline.text import one_line

TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
SECRET = re.compile(r"(?i)token$|api_key|secret|password")
# beginnings of settings that are the model itself, have no effect on scores, or are named elsewhere
NO_SETTING = ("model", "batch_size", "use_cache", "bootstrap_iters", "gen_kwargs", "task.metadata.", "task.metric_list",
              "task.num_fewshot", "task.task", "generation.max_connections", "generation.max_retries",
              "generation.timeout", "generation.attempt_timeout", "generation.cache")  # fmt: skip
# of model_args; the model's name is the first of those that are set
THE_MODEL = ("peft", "delta", "pretrained", "model", "revision", "base_url", "tokenizer")
# of a row of lm_eval before 0.4.7, which lists its metrics next to these
NO_METRIC = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps",
             "doc_hash", "prompt_hash", "target_hash"}  # fmt: skip
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError, OSError)
Item = dict[str, Any]  # a sample: texts, and under scores what the tool recorded, numbers or not


@dataclass(frozen=True)
class Log:
    """A task of a model, as one filter (lm_eval) read its answers. printed: metric -> the number that the tool printed;
    lower_is_better: metrics, as far as the log tells; problems: what the log lacks."""

    tool: str
    model: str
    task: str
    filter: str
    file: Path
    started: str
    items: dict[str, Item]
    printed: Mapping[str, float]
    settings: Mapping[str, str]
    version: str
    num_fewshot: int | None = None
    lower_is_better: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


Logs = dict[tuple[str, str, str], Log]  # of a model: (tool, task, filter) -> its log


def read_models(entries: Sequence[str]) -> dict[str, Logs]:
    """The logs of the models in these folders and files, by their titles. Raises PipelineError, among others, for a
    task that a model ran twice."""
    models: dict[tuple[str, str], Logs] = {}
    for entry in entries:
        for log in read_entry(Path(entry)):
            logs = models.setdefault((os.path.realpath(entry), log.model), {})
            if (other := logs.setdefault((log.tool, log.task, log.filter), log)) is not log:
                problem = f"results={entry} holds {log.task} of {log.model} twice, in {other.file.name} and"
                raise PipelineError(f"{problem} {log.file.name}: name one of these files instead")
    names, shared = Counter(model for _, model in models), os.path.commonpath([entry for entry, _ in models])
    titles = [f"{model} ({os.path.relpath(entry, shared)})" if names[model] > 1 else model for entry, model in models]
    if len(titles) < 2:
        raise PipelineError(f"results holds one model, {titles[0]}: name the folders or files of two or more")
    return dict(zip(titles, models.values(), strict=True))


def read_entry(path: Path) -> list[Log]:
    """The logs of a file, or of all files below a folder; of other JSON none. Raises PipelineError without any."""
    if path.suffix == ".jsonl":
        raise PipelineError(f"results={path} is a samples file: give the results_*.json next to it, or its folder")
    # lm_eval names the folder of pretrained=./model .__model; hidden files, such as macOS' ._results, are not logs
    below = (file for file in sorted(path.rglob("*")) if file.suffix in (".json", ".eval") and file.name[0] != ".")
    logs: list[Log] = []
    for file in filter(Path.is_file, [path] if path.is_file() else below):
        is_eval = file.suffix == ".eval"
        with as_one_sentence(file, "inspect_ai" if is_eval else "lm_eval or inspect_ai"):
            content = {} if is_eval else json.loads(file.read_bytes().decode(errors="replace"))
            keys = content.keys() if isinstance(content, dict) else ()
            if is_eval or {"version", "status", "eval"} <= set(keys):
                logs += read_inspect(file)
            elif {"results", "versions", "config"} == set(keys):
                raise PipelineError(
                    f"{file} is of lm_eval before 0.4, which logs no items: score again with a later one, --log_samples"
                )
            elif {"rows", "harness"} <= set(keys) and (file.parent / MANIFEST).is_file():
                with TemporaryDirectory() as folder:  # a run of stage=eval
                    written = write_harness_logs(file.parent, Path(folder), scored_model(file.parent))
                    logs += [replace(log, file=file) for log in read_lm_eval(written, json.loads(written.read_bytes()))]
            elif {"results", "configs", "n-shot"} <= set(keys):  # its unpaired surrogates become question marks
                logs += read_lm_eval(file, json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace")))
    if not logs:
        expected = "results_*.json with samples_*.jsonl of lm_eval, .eval or .json of inspect_ai, nor a run of eval"
        there = f"holds no log, neither {expected}" if path.exists() else "does not exist"
        raise PipelineError(
            f"results={path} {there}: give folders or files that lm_eval or inspect_ai "
            "wrote, or folders of evaluations, such as runs/eval-..."
        )
    return logs


def scored_model(run: Path) -> str:
    """The model that a run of stage=eval scored: the name of its checkpoint, or the label of a merge in memory."""
    manifest = read_manifest(run)
    assert manifest is not None
    if checkpoint := manifest.parents.get("checkpoint"):
        return checkpoint.name
    evaluated, languages = manifest.config["eval"]["name"], "-".join(manifest.config["languages"])
    return label_in(manifest.name).removeprefix(f"eval-{evaluated}-").removesuffix(f"-{languages}")


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


def keyed(items: Iterable[tuple[str, Item]]) -> dict[str, Item]:
    """Items by key; one that the data holds twice by its key and how often it came before."""
    counts: Counter[str] = Counter()
    by_key = {}
    for key, item in items:
        counts[key] += 1
        by_key[f"{key} {counts[key]}"] = item
    return by_key


def item_of(prompt: Any, target: Any, response: Any, extracted: Any, scores: Mapping[str, Any]) -> Item:
    texts = {"prompt": prompt, "target": target, "response": response, "extracted": extracted}
    return {name: text_of(value) for name, value in texts.items()} | {"scores": scores}


def read_lm_eval(path: Path, content: dict[str, Any]) -> Iterator[Log]:
    """The tasks of one results file, with the samples files next to it, of lm_eval 0.4.1 or later: until 0.4.2 their
    names have the model's arguments in place of the time."""
    time = TIME.search(path.name)
    begin = "samples_" if time else re.sub("/|=", "__", f"{content['config'].get('model_args')}_")
    names = {task: f"{begin}{task}{f'_{time[1]}' if time else ''}.jsonl" for task in content["configs"]}
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise PipelineError(f"{path} names a samples file in another folder ({outside[0]}): correct the task's name")
    there = {task: path.parent / name for task, name in names.items() if (path.parent / name).is_file()}
    if not there:
        expected = next(iter(names.values()), "samples_TASK_TIME.jsonl")
        raise PipelineError(f"{path} has no samples file {expected} next to it: run lm_eval with --log_samples")
    named = (model_arguments(content).get(key) for key in THE_MODEL)
    model = model_title(str(content.get("model_name") or next(filter(None, named), "")))
    for task, samples in there.items():
        by_filter: dict[str, list[tuple[str, Item]]] = {}
        scores = content["results"].get(task, {})
        with as_one_sentence(samples, "lm_eval"):
            for row in with_filters(read_samples(samples), scores):
                by_filter.setdefault(str(row["filter"]), []).append((str(row["doc_hash"]), lm_eval_item(row)))
            if not by_filter:
                raise ValueError("it is empty")
        expected, shots = content.get("n-samples", {}).get(task, {}).get("effective"), content["n-shot"].get(task)
        metrics = content["configs"][task].get("metric_list") or []
        directions = {metric["metric"]: metric.get("higher_is_better") for metric in metrics}
        directions |= content.get("higher_is_better", {}).get(task) or {}
        for name, items in by_filter.items():
            lacking = f"{samples.name} holds {len(items)} of the {expected} items that were scored."
            printed = {key.partition(",")[0]: value for key, value in scores.items()
                       if key.endswith(f",{name}") and finite_or_none(value) is not None}  # fmt: skip
            yield Log(
                "lm_eval", model, task, name, path,
                str(content.get("date") or ""), keyed(items), printed,
                setting_texts(lm_eval_settings(content, task)),
                str(content.get("lm_eval_version") or "of a version that it did not record"),
                shots if isinstance(shots, int) else None,
                frozenset(metric for metric, higher in directions.items() if higher is False),
                (lacking,) if isinstance(expected, int) and len(items) < expected else (),
            )  # fmt: skip


def with_filters(rows: Iterable[dict[str, Any]], scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows with their filter, metrics and hash: before 0.4.7 a question has a row for each filter, in the order of the
    scores, and until 0.4.2 no hash."""
    names = list(dict.fromkeys(key.partition(",")[2] for key in scores if "," in key))
    counts: Counter[Any] = Counter()
    for row in rows:
        if "filter" not in row:
            row["metrics"] = [key for key in row if key not in NO_METRIC]
            row["filter"] = names[counts[row["doc_id"]]]
            counts[row["doc_id"]] += 1
        if "doc_hash" not in row:
            text = json.dumps(row["doc"], indent=2, ensure_ascii=False)
            row["doc_hash"] = hashlib.sha256(text.encode()).hexdigest()
        yield row


def lm_eval_item(row: Mapping[str, Any]) -> Item:
    """One line of a samples file. Where options were weighed, what is extracted is the most likely one."""
    arguments = row["arguments"]
    requests = [list(argument.values()) if isinstance(argument, dict) else list(argument)
                for argument in (arguments.values() if isinstance(arguments, dict) else arguments)]  # fmt: skip
    read, response = row["filtered_resps"], row["resps"]
    while isinstance(response, list) and len(response) == 1:
        response = response[0]
    extracted = read[0] if isinstance(read, list) and read else read
    if len(requests) == len(read) > 1 and all(isinstance(pair, list) and len(pair) == 2 for pair in read):
        extracted = requests[max(range(len(read)), key=lambda at: float(read[at][0]))][1]
    values = {str(metric): row.get(metric) for metric in row["metrics"]}
    return item_of(requests[0][0], row["target"], response, extracted, values)


def lm_eval_settings(content: dict[str, Any], task: str) -> dict[str, Any]:
    """What may differ between two runs of a task: of the task, of the command, and versions."""
    config = content.get("config", {})
    return config | {
        "num_fewshot": content["n-shot"].get(task), "version of the task": content["versions"].get(task),
        "chat_template": content.get("chat_template_sha"), "system_instruction": content.get("system_instruction_sha"),
        **{key: content.get(key) for key in ("fewshot_as_multiturn", "max_length")},
        **{key: content.get(f"{key}_version") for key in ("lm_eval", "transformers")},
        "generation": config.get("gen_kwargs"), "task": content["configs"][task],
        "arguments": {key: value for key, value in model_arguments(content).items() if key not in THE_MODEL},
    }  # fmt: skip


def model_arguments(content: dict[str, Any]) -> dict[str, Any]:
    """--model_args by name, which older versions record as they were typed."""
    given = content.get("config", {}).get("model_args") or {}
    return given if isinstance(given, dict) else dict(pair.partition("=")[::2] for pair in given.split(","))


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
    to_float, by_name = value_to_float(), dict[str, list[Any]]()
    for sample in sorted(log.samples, key=lambda sample: sample.epoch):
        by_name.setdefault(str(sample.id), []).append(sample)
    items = []
    for name, epochs in by_name.items():
        first, recorded = epochs[0], dict[str, list[float]]()
        for scorer, score in (pair for sample in epochs for pair in (sample.scores or {}).items()):
            parts = score.value if isinstance(score.value, dict) else {"": score.value}
            for part, value in parts.items():
                recorded.setdefault(f"{scorer} {part}".strip(), []).append(to_float(value))
        messages = [f"{message.role}: {message.text}" for message in first.messages if message.role != "assistant"]
        prompt = first.input if isinstance(first.input, str) else "\n\n".join(message.text for message in first.input)
        target = first.target if isinstance(first.target, str) else ", ".join(first.target)
        key = hashlib.sha256(json.dumps([name, prompt]).encode()).hexdigest()
        response = first.output.completion if first.output else ""
        answer = next((score.answer for score in (first.scores or {}).values() if score.answer), response)
        values = {metric: fmean(numbers) for metric, numbers in recorded.items()}
        items.append((key, item_of("\n\n".join(messages) or prompt, target, response, answer, values)))
    scored = [(key, item) for key, item in items if item["scores"]]
    problems = [f"The run of {path.name} has status={log.status}."] * (log.status != "success")
    if len(scored) < len(items):
        problems.append(f"{len(items) - len(scored)} of {len(items)} items of {path.name} have no score.")
    printed = {}
    for summary in log.results.scores if log.results else []:
        if number := summary.metrics.get("accuracy") or summary.metrics.get("mean"):
            name = summary.name if summary.name == summary.scorer else f"{summary.scorer} {summary.name}"
            printed[name] = number.value
    spec, plan = (part.model_dump(mode="json") for part in (log.eval, log.plan))
    settings = {
        **{key: spec[key] for key in ("task_version", "packages", "scorers", "task_args", "config")},
        "generation": {**spec["model_generate_config"], **plan["config"]}, "solvers": plan["steps"],
        "dataset": {key: spec["dataset"][key] for key in ("name", "location")},
    }  # fmt: skip
    return [Log(
        "inspect_ai", model_title(log.eval.model), log.eval.task, "none", path, str(log.eval.created or ""),
        keyed(scored), printed, setting_texts(settings), str(log.eval.packages.get("inspect_ai")),
        problems=tuple(problems),
    )]  # fmt: skip


def model_title(name: str) -> str:
    """A model's name on the page: of a local folder (also hf//FOLDER of inspect_ai) its last part, on one line."""
    is_path = name.startswith(("/", ".", "~")) or "//" in name
    last = name.rstrip("/").rsplit("/", 1)[-1] if is_path else name
    return one_line(last)[:80] or "unnamed model"


def setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted names as text on one line, without those unset or without effect, secrets and local paths."""
    texts = {}
    for name, value in flatten_dict(dict(settings)).items():
        if value not in (None, {}, []) and not name.startswith(NO_SETTING) and not SECRET.search(name):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
            texts[name] = one_line(without_credentials(text)) or repr(text)
    return texts
