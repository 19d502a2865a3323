"""Logs of `lm_eval --log_samples`, version 0.4.8 or later: results_TIME.json with
samples_TASK_TIME.jsonl.
"""

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
OF_A_ROW = {"doc_hash", "filter", "metrics"}  # keys that earlier versions do not write
TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
# settings that decide scores: of the run, and of its command
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
# of model_args: the model's name is the first of these that are set
THE_MODEL = ("peft", "delta", "pretrained", "model", "revision", "base_url", "tokenizer")


def recognizes(_: Path, content: Mapping[str, Any]) -> bool:
    return {"results", "config"} <= content.keys() and bool(
        {"configs", "versions"} & content.keys()
    )


def read(path: Path, content: dict[str, Any]) -> Iterator[Log]:
    """Yield the log of each task and filter of a results file, with the samples files next to
    it.
    """
    time = TIME.search(path.name)
    version = str(content.get("lm_eval_version") or "")
    if "configs" not in content or time is None or is_too_old(version):
        raise too_old(path, version)
    yield from logs_written_at(time[1], path, content)


def logs_written_at(time: str, path: Path, content: dict[str, Any]) -> Iterator[Log]:
    """Yield the logs of a results file, with the samples files of this time next to it."""
    names = {task: f"samples_{task}_{time}.jsonl" for task in content["configs"]}
    outside = []
    for name in names.values():
        if Path(name).name != name:
            outside.append(name)
    if outside:
        raise PipelineError(
            f"{path} names a samples file in another folder ({outside[0]}): correct the task's name"
        )
    samples = {}
    for task, name in names.items():
        if (path.parent / name).is_file():
            samples[task] = path.parent / name
    if not samples:
        expected = next(iter(names.values()), "samples_TASK_TIME.jsonl")
        raise PipelineError(
            f"{path} has no samples file {expected} next to it: run lm_eval with --log_samples"
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
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return bool(numbers) and numbers < FIRST_VERSION


def too_old(path: Path, version: str) -> PipelineError:
    wrote = "lm_eval before 0.4.8"
    if is_too_old(version):
        wrote = f"lm_eval {version}"
    return PipelineError(
        f"{path} is of {wrote}: score again with lm_eval 0.4.8 or later, and --log_samples"
    )


def logs_of_task(
    path: Path, content: dict[str, Any], task: str, rows: list[Sample], samples_name: str
) -> Iterator[Log]:
    by_filter: dict[str, list[Sample]] = {}
    for row in rows:
        by_filter.setdefault(str(row["filter"]), []).append(row)
    expected = content.get("n-samples", {}).get(task, {}).get("effective")
    shots = content.get("n-shot", {}).get(task)
    directions = (content.get("higher_is_better") or {}).get(task) or {}
    settings = settings_of(content, task)
    for name, of_filter in by_filter.items():
        problems = []
        if isinstance(expected, int) and len(of_filter) < expected:
            problems.append(
                f"{samples_name} holds {len(of_filter)} of the {expected} items that were scored."
            )
        yield Log(
            model=model_of(content),
            task=task,
            filter=name,
            file=path,
            started=str(content.get("date") or ""),
            items=items_by_document(of_filter),
            printed=printed_scores(content["results"].get(task, {}), name),
            settings=settings,
            version=(
                f"lm_eval {content.get('lm_eval_version') or 'of a version that it did not record'}"
            ),
            num_fewshot=shots if isinstance(shots, int) else None,
            lower_is_better=frozenset(
                metric for metric, higher in directions.items() if higher is False
            ),
            problems=tuple(problems),
        )


def printed_scores(scores: Mapping[str, Any], filter_name: str) -> dict[str, float]:
    """Return metric -> the number that lm_eval printed, of one filter."""
    printed = {}
    for key, value in scores.items():
        metric, _, of_filter = key.partition(",")
        if of_filter == filter_name and finite_or_none(value) is not None:
            printed[metric] = value
    return printed


def items_by_document(rows: list[Sample]) -> dict[str, Item]:
    """Return the items by the hash of their document and how often it came before."""
    counts: Counter[str] = Counter()
    items = {}
    for row in rows:
        document = str(row["doc_hash"])
        counts[document] += 1
        items[f"{document} {counts[document]}"] = item_of(row)
    return items


def item_of(row: Sample) -> Item:
    """Return the item of a line of a samples file.

    Of weighed options the most likely one is the answer.
    """
    requests = [list(argument.values()) for argument in row["arguments"].values()]
    read, response = row["filtered_resps"], row["resps"]
    while isinstance(response, list) and len(response) == 1:
        response = response[0]
    if isinstance(read, list) and read:
        extracted = read[0]
    else:
        extracted = read
    are_options = len(requests) == len(read) > 1 and all(
        isinstance(pair, list) and len(pair) == 2 for pair in read
    )
    if are_options:
        likelihoods = [float(pair[0]) for pair in read]
        extracted = requests[likelihoods.index(max(likelihoods))][1]
    return {
        "prompt": text_of(requests[0][0]),
        "target": text_of(row["target"]),
        "response": text_of(response),
        "extracted": text_of(extracted),
        "scores": {str(metric): row.get(metric) for metric in row["metrics"]},
    }


def model_of(content: Mapping[str, Any]) -> str:
    """Return the model's name on the page: of a local folder its last part, on one line."""
    arguments = model_arguments(content)
    named = [content.get("model_name"), *(arguments.get(key) for key in THE_MODEL)]
    name = str(next(filter(None, named), ""))
    if name.startswith(("/", ".", "~")):
        last = name.rstrip("/").rsplit("/", 1)[-1]
    else:
        last = name
    return one_line(last)[:80] or "unnamed model"


def model_arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return --model_args by name. Some versions record them as they were typed."""
    arguments = content["config"].get("model_args") or {}
    if isinstance(arguments, dict):
        return arguments
    return dict(pair.partition("=")[::2] for pair in arguments.split(","))


def settings_of(content: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return the settings of a task that decide its scores, as text on one line, without unset
    ones.
    """
    config = content["config"]
    settings = {
        "num_fewshot": content.get("n-shot", {}).get(task),
        "version of the task": content.get("versions", {}).get(task),
        "dtype": model_arguments(content).get("dtype"),
        **{key: content.get(key) for key in OF_THE_RUN},
        **{key: config.get(key) for key in OF_THE_COMMAND},
    }
    found = {}
    for key, value in settings.items():
        if value not in (None, {}, ""):
            found[key] = one_line(str(value))
    return found


READER = Reader(recognizes, read)
