"""Reads logs of `lm_eval --log_samples` and inspect_ai (with the extra inspect).

The files come from other machines and are untrusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.metrics import mean
from pipeline.evaluate.shown_scores import finite_or_none
from pipeline.report.load.answers import read_samples, text_of
from pipeline.report.private import without_private
from pipeline.runs.run import flatten_dict

TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
SECRET = re.compile(r"(?i)token$|api_key|secret|password")
# beginnings of settings that are the model itself, have no effect on scores, or are named elsewhere
NO_SETTING = ("model", "batch_size", "use_cache", "bootstrap_iters", "gen_kwargs", "task.metadata.", "task.metric_list",
              "task.num_fewshot", "task.task", "generation.max_connections", "generation.max_retries",
              "generation.timeout", "generation.attempt_timeout", "generation.cache")  # fmt: skip
THE_MODEL = ("pretrained", "model", "peft", "delta", "revision", "base_url", "tokenizer")  # of model_args
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError, OSError)


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
    by_key = {}
    for key, item in items:
        counts[key] += 1
        by_key[f"{key} {counts[key]}"] = item
    return by_key


def sample_of(prompt: Any, target: Any, response: Any, extracted: Any, scores: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"prompt": prompt, "target": target, "response": response, "extracted": extracted}
    return {name: text_of(value) for name, value in texts.items()} | {"scores": scores}


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
        expected = "results_*.json with samples_*.jsonl of lm_eval, nor .eval or .json of inspect_ai"
        raise PipelineError(f"results={path} holds no log, neither {expected}: give another folder or file")
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
    match = TIME.search(path.name)
    names = {task: f"samples_{task}_{match[1]}.jsonl" for task in content["configs"]} if match else {}
    there = {task: path.parent / name for task, name in names.items() if (path.parent / name).is_file()}
    if not there:
        expected = next(iter(names.values()), "samples_TASK_TIME.jsonl")
        raise PipelineError(f"{path} has no samples file {expected} next to it: run lm_eval with --log_samples")
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
    requests = [list(argument.values()) if isinstance(argument, dict) else list(argument)
                for argument in (arguments.values() if isinstance(arguments, dict) else arguments)]  # fmt: skip
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
        of_item = [sample for sample in log.samples if str(sample.id) == name]
        first, *_ = epochs = sorted(of_item, key=lambda sample: sample.epoch)
        recorded: dict[str, list[float]] = {}
        for scorer, score in (pair for sample in epochs for pair in (sample.scores or {}).items()):
            for metric, value in named(scorer, score.value).items():
                recorded.setdefault(metric, []).append(value)
        messages = [f"{message.role}: {message.text}" for message in first.messages if message.role != "assistant"]
        prompt = first.input if isinstance(first.input, str) else "\n\n".join(message.text for message in first.input)
        target = first.target if isinstance(first.target, str) else ", ".join(first.target)
        key = hashlib.sha256(json.dumps([name, prompt]).encode()).hexdigest()
        response = first.output.completion if first.output else ""
        answer = next((score.answer for score in (first.scores or {}).values() if score.answer), response)
        values = {metric: mean(numbers) for metric, numbers in recorded.items()}
        items.append((key, sample_of("\n\n".join(messages) or prompt, target, response, answer, values)))
    scored_items = [(key, item) for key, item in items if item["scores"]]
    problems = [] if log.status == "success" else [f"The run of {path.name} has status={log.status}."]
    if len(scored_items) < len(items):
        problems.append(f"{len(items) - len(scored_items)} of {len(items)} items of {path.name} have no score.")
    printed = {}
    for summary in log.results.scores if log.results else []:
        if number := summary.metrics.get("accuracy") or summary.metrics.get("mean"):
            name = summary.name if summary.name == summary.scorer else f"{summary.scorer} {summary.name}"
            printed[name] = number.value
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
