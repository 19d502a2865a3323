"""Logs of `lm_eval --log_samples` 0.4.8 or later: results_TIME.json, samples_TASK_TIME.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.evaluate.records import Sample
from pipeline.extras.log import Answer, Log, log_of
from pipeline.report.load.answers import read_samples

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
    "model_dtype",
    "limit",
    "gen_kwargs",
    "random_seed",
    "numpy_seed",
    "torch_seed",
    "fewshot_seed",
    "device",
)


def read_harness_logs(path: Path, content: Mapping[str, Any]) -> Iterator[Log]:
    """Yield the logs of a results file and of the samples files next to it, by task and filter."""
    time = TIME.search(path.name)
    if time is None or not {"results", "config", "configs"} <= content.keys():
        return
    for task in content["configs"]:
        file = path.parent / f"samples_{task}_{time[1]}.jsonl"
        if file.parent != path.parent:
            raise ValueError(f"{task} names a file in another folder")
        if not file.is_file():
            continue
        by_filter: dict[str, list[Sample]] = {}
        for row in read_samples(file):
            by_filter.setdefault(row["filter"], []).append(row)
        for name, rows in by_filter.items():
            title = task if name == "none" else f"{task} ({name})"
            answers = map(answer_of, rows)
            printed = printed_scores(content["results"].get(task, {}), name)
            yield log_of(title, path, settings_of(content, task), answers, printed)


def answer_of(row: Sample) -> Answer:
    scores = {metric: row[metric] for metric in row["metrics"]}
    return Answer(f"{row['doc_hash']} {row['target_hash']}", row["prompt_hash"], scores)


def printed_scores(scores: Mapping[str, Any], filter_name: str) -> dict[str, float]:
    """Return the numbers that lm_eval printed for a filter, by metric."""
    printed = {}
    for key, value in scores.items():
        metric, _, of_filter = key.partition(",")
        if of_filter == filter_name:
            printed[metric] = float(value)
    return printed


def settings_of(content: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the settings of a task that change its scores."""
    settings = {"num_fewshot": content["n-shot"].get(task)}
    settings["version of the task"] = content["versions"].get(task)
    settings |= {key: content.get(key) for key in OF_THE_RUN}
    settings |= {key: content["config"].get(key) for key in OF_THE_COMMAND}
    return settings
