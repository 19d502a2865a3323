"""Logs of `lm_eval --log_samples` 0.4.8 or later: results_TIME.json, samples_TASK_TIME.jsonl."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.records import Sample
from pipeline.extras.log import Item, Log, Reader, as_one_sentence
from pipeline.report.load.answers import read_samples, text_of
from pipeline.text import one_line

FIRST_VERSION = (0, 4, 8)
OF_A_ROW = {"doc_hash", "filter", "metrics"}  # keys that earlier versions lack
TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
# Settings of the run and of its command that change scores
OF_THE_RUN = (
    "chat_template_sha",
    "system_instruction_sha",
    "fewshot_as_multiturn",
    "max_length",
    "lm_eval_version",
    "transformers_version",
)
OF_THE_COMMAND = (
    "limit",
    "gen_kwargs",
    "random_seed",
    "numpy_seed",
    "torch_seed",
    "fewshot_seed",
    "device",
)
# Keys of model_args: the model's name is the first that is set
THE_MODEL = ("peft", "delta", "pretrained", "model", "revision", "base_url", "tokenizer")


def recognizes(_: Path, content: Mapping[str, Any]) -> bool:
    has_results = {"results", "config"} <= content.keys()
    return has_results and ("configs" in content or "versions" in content)


def read(path: Path, content: dict[str, Any]) -> Iterator[Log]:
    """Yield the logs of a results file and the samples files next to it, by task and filter."""
    time = TIME.search(path.name)
    version = str(content.get("lm_eval_version") or "")
    if "configs" not in content or time is None or is_too_old(version):
        raise too_old(path, version)
    yield from logs_written_at(time[1], path, content)


def logs_written_at(time: str, path: Path, content: dict[str, Any]) -> Iterator[Log]:
    """Yield the logs of a results file and the samples files of this time next to it."""
    samples = {}
    for task in content["configs"]:
        name = f"samples_{task}_{time}.jsonl"
        if Path(name).name != name:
            raise PipelineError(
                f"{path} names a samples file in another folder ({name}). Correct the task's name."
            )
        if (path.parent / name).is_file():
            samples[task] = path.parent / name
    if not samples:
        task = next(iter(content["configs"]), "TASK")
        raise PipelineError(
            f"{path} has no samples file samples_{task}_{time}.jsonl next to it. Run lm_eval with"
            " --log_samples."
        )
    for task, file in samples.items():
        with as_one_sentence(file):
            rows = read_samples(file)
            if not rows:
                raise ValueError("it is empty")
            if any(not row.keys() >= OF_A_ROW for row in rows):
                raise too_old(path, str(content.get("lm_eval_version") or ""))
            yield from logs_of_task(path, content, task, rows, file.name)


def is_too_old(version: str) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return bool(numbers) and numbers < FIRST_VERSION


def too_old(path: Path, version: str) -> PipelineError:
    wrote = f"lm_eval {version}" if is_too_old(version) else "lm_eval before 0.4.8"
    return PipelineError(
        f"{path} is of {wrote}. Score again with lm_eval 0.4.8 or later, and --log_samples."
    )


def logs_of_task(
    path: Path, content: dict[str, Any], task: str, rows: list[Sample], samples_name: str
) -> Iterator[Log]:
    by_filter: dict[str, list[Sample]] = {}
    for row in rows:
        by_filter.setdefault(str(row["filter"]), []).append(row)
    counts = content.get("n-samples", {}).get(task, {})
    expected = counts.get("effective")
    shots = content.get("n-shot", {}).get(task)
    if not isinstance(shots, int):
        shots = None
    directions = (content.get("higher_is_better") or {}).get(task) or {}
    lower_is_better = [metric for metric, higher in directions.items() if higher is False]
    model = model_of(content)
    started = str(content.get("date") or "")
    scores = content["results"].get(task, {})
    settings = settings_of(content, task)
    version = content.get("lm_eval_version") or "of a version that it did not record"
    for name, of_filter in by_filter.items():
        problems = []
        if isinstance(expected, int) and len(of_filter) < expected:
            problems.append(
                f"{samples_name} holds {len(of_filter)} of the {expected} items that were scored."
            )
        yield Log(
            model=model,
            task=task,
            filter=name,
            file=path,
            started=started,
            items=items_by_document(of_filter),
            printed=printed_scores(scores, name),
            settings=settings,
            version=f"lm_eval {version}",
            num_fewshot=shots,
            lower_is_better=frozenset(lower_is_better),
            problems=tuple(problems),
        )


def printed_scores(scores: Mapping[str, Any], filter_name: str) -> dict[str, float]:
    """Return the numbers that lm_eval printed for a filter, by metric."""
    printed = {}
    for key, value in scores.items():
        metric, _, of_filter = key.partition(",")
        if of_filter == filter_name and finite_or_none(value) is not None:
            printed[metric] = value
    return printed


def items_by_document(rows: list[Sample]) -> dict[str, Item]:
    """Return the items by the hash of their document and its number of occurrences so far."""
    counts: Counter[str] = Counter()
    items = {}
    for row in rows:
        document = str(row["doc_hash"])
        counts[document] += 1
        items[f"{document} {counts[document]}"] = item_of(row)
    return items


def item_of(row: Sample) -> Item:
    """Return the item of a line of a samples file."""
    requests = [list(argument.values()) for argument in row["arguments"].values()]
    prompt = requests[0][0]
    response = row["resps"]
    while isinstance(response, list) and len(response) == 1:
        response = response[0]
    extracted = _extracted(row["filtered_resps"], requests)
    scores = {str(metric): row.get(metric) for metric in row["metrics"]}
    return {
        "prompt": text_of(prompt),
        "target": text_of(row["target"]),
        "response": text_of(response),
        "extracted": text_of(extracted),
        "scores": scores,
    }


def _extracted(filtered: Any, requests: list[list[Any]]) -> Any:
    """Return the extracted answer: of options with likelihoods, the most likely one."""
    is_scored = all(isinstance(pair, list) and len(pair) == 2 for pair in filtered)
    if is_scored and len(requests) == len(filtered) > 1:
        likelihoods = [float(pair[0]) for pair in filtered]
        return requests[likelihoods.index(max(likelihoods))][1]
    if isinstance(filtered, list) and filtered:
        return filtered[0]
    return filtered


def model_of(content: Mapping[str, Any]) -> str:
    """Return the model's name on the page, on one line; for a local folder, its last part."""
    arguments = model_arguments(content)
    named = [content.get("model_name"), *map(arguments.get, THE_MODEL)]
    name = str(next(filter(None, named), ""))
    if name.startswith(("/", ".", "~")):
        name = name.rstrip("/").rpartition("/")[2]
    return one_line(name)[:80] or "unnamed model"


def model_arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return --model_args by name. Some versions record them as typed."""
    arguments = content["config"].get("model_args") or {}
    if isinstance(arguments, dict):
        return arguments
    return dict(pair.partition("=")[::2] for pair in arguments.split(","))


def settings_of(content: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return the settings of a task that change its scores, as one-line texts."""
    config = content["config"]
    shots, versions = content.get("n-shot", {}), content.get("versions", {})
    settings = {"num_fewshot": shots.get(task), "version of the task": versions.get(task)}
    settings["dtype"] = model_arguments(content).get("dtype")
    settings |= {key: content.get(key) for key in OF_THE_RUN}
    settings |= {key: config.get(key) for key in OF_THE_COMMAND}
    texts = {}
    for key, value in settings.items():
        if value not in (None, {}, ""):
            texts[key] = one_line(str(value))
    return texts


READER = Reader(recognizes, read)
