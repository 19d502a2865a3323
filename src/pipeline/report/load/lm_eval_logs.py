"""Reading what `lm_eval --log_samples --output_path DIR` writes: results_TIME.json and samples_TASK_TIME.jsonl.

With `--output_path FILE.json` the first is FILE_TIME.json. Written for the format of lm_eval 0.4.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.report.load.answers import read_samples, text_of
from pipeline.report.load.task_logs import (
    LoggedItem,
    TaskLog,
    as_one_sentence,
    finite_number,
    model_title,
    setting_texts,
)
from pipeline.runs.run import flatten_dict

TIME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
# keys of config that are the model itself, that are compared under other names, or have no effect on scores
NO_SETTING = (
    *("model", "model_args", "model_num_parameters", "model_revision", "model_sha"),
    *("batch_sizes", "use_cache", "bootstrap_iters", "gen_kwargs"),
)
THE_MODEL = ("pretrained", "model", "peft", "delta", "revision", "base_url", "tokenizer")  # of model_args
NO_TASK_SETTING = ("metadata.", "metric_list", "num_fewshot", "task")  # versions and shots are compared by themselves


def is_lm_eval(content: Any) -> bool:
    """Whether JSON is what lm_eval writes as its results."""
    return isinstance(content, dict) and {"results", "configs", "n-shot"} <= content.keys()


def read_lm_eval(path: Path, content: dict[str, Any]) -> list[TaskLog]:
    """The tasks of one results file, with the samples files next to it. Raises PipelineError if these are missing."""
    with as_one_sentence(path, "lm_eval"):
        found = TIME.search(path.name)
        names = {task: f"samples_{task}_{found[1]}.jsonl" for task in content["configs"]} if found else {}
        there = {task: path.parent / name for task, name in names.items() if (path.parent / name).is_file()}
        if not there:
            wanted = next(iter(names.values()), "samples_TASK_TIME.jsonl")
            raise PipelineError(f"{path} has no samples file {wanted} next to it: run lm_eval with --log_samples")
        logs = [log for task, samples in there.items() for log in task_logs(path, content, task, samples)]
        return [*group_logs(content, logs), *logs]


def task_logs(path: Path, content: dict[str, Any], task: str, samples: Path) -> list[TaskLog]:
    """A task's answers by filter: each reads other answers from the same responses."""
    rows: dict[str, list[dict[str, Any]]] = {}
    with as_one_sentence(samples, "lm_eval"):
        try:
            listed = read_samples(samples)
        except (PipelineError, UnicodeDecodeError):
            raise PipelineError(f"{samples} holds a line that is not JSON: copy it again") from None
        if not listed:
            raise PipelineError(f"{samples} is empty: copy it again")
        for row in sorted(listed, key=lambda row: row["doc_id"]):
            rows.setdefault(str(row["filter"]), []).append(row)
        items = {name: [logged_item(row) for row in filtered] for name, filtered in rows.items()}
    expected = content.get("n-samples", {}).get(task, {}).get("effective")
    directions = content.get("higher_is_better", {}).get(task) or {}
    seconds = content.get("total_evaluation_time_seconds")
    logs = []
    for name, logged in items.items():
        lacking = f"{samples.name} holds {len(logged)} of the {expected} items that were scored."
        logs.append(TaskLog(
            tool="lm_eval", model=model_title(str(content.get("model_name") or "")), task=task, filter=name, file=path,
            started=str(content.get("date") or ""), items=logged,
            scores=printed_scores(content, task, name),
            settings=setting_texts(settings_of(content, task)),
            versions={tool: str(content[f"{tool}_version"]) for tool in ("lm_eval", "transformers")
                      if content.get(f"{tool}_version")},
            num_fewshot=shots_of(content, task),
            lower_is_better=frozenset(metric for metric, higher in directions.items() if higher is False),
            problems=(lacking,) if isinstance(expected, int) and len(logged) < expected else (),
            seconds=float(seconds) if seconds else None,
        ))  # fmt: skip
    return logs


def group_logs(content: Mapping[str, Any], logs: Sequence[TaskLog]) -> Iterator[TaskLog]:
    """A log of each group for which lm_eval printed a score, such as mmlu, with all items of its tasks."""
    members: dict[str, list[str]] = content.get("group_subtasks") or {}

    def tasks_in(name: str, above: tuple[str, ...] = ()) -> list[str]:
        inner = members.get(name, []) if name not in above else []
        return [task for part in inner for task in tasks_in(part, (*above, name))] or [name]

    for group in members:
        parts = tuple(dict.fromkeys(tasks_in(group)))
        for name in dict.fromkeys(log.filter for log in logs if log.task in parts):
            inside = [log for log in logs if log.task in parts and log.filter == name]
            scores = printed_scores(content, group, name)
            if scores and {log.task for log in inside} == {*parts}:
                items = [
                    replace(item, key=f"{log.task} {item.key}", values={key: item.values.get(key) for key in scores})
                    for log in inside for item in log.items
                ]  # fmt: skip
                shared = set.intersection(*(set(log.settings.items()) for log in inside))
                problems = dict.fromkeys(problem for log in inside for problem in log.problems)
                yield replace(
                    inside[0], task=group, items=items, scores=scores, settings=dict(sorted(shared)), parts=parts,
                    problems=tuple(problems), num_fewshot=shots_of(content, group),
                )  # fmt: skip


def printed_scores(content: Mapping[str, Any], task: str, filter_name: str) -> dict[str, float]:
    """Metric -> the number that lm_eval printed for a task or group, without standard errors."""
    return {
        key.partition(",")[0]: value for key, value in content["results"].get(task, {}).items()
        if key.endswith(f",{filter_name}") and "_stderr," not in key and finite_number(value) is not None
    }  # fmt: skip


def shots_of(content: Mapping[str, Any], task: str) -> int | None:
    shots = content["n-shot"].get(task)
    return shots if isinstance(shots, int) else None


def logged_item(row: Mapping[str, Any]) -> LoggedItem:
    """One line of a samples file. Its doc_hash is lm_eval's digest of the document."""
    arguments = row["arguments"]
    requests = [
        list(request.values()) if isinstance(request, dict) else list(request)
        for request in (arguments.values() if isinstance(arguments, dict) else arguments)
    ]
    read = row["filtered_resps"]
    values = {str(metric): row.get(metric) for metric in row["metrics"]}
    item = LoggedItem(
        key=str(row["doc_hash"]), values=values, prompt=text_of(requests[0][0]), prompt_hash=str(row["prompt_hash"]),
        target=text_of(row["target"]), response=text_of(first_response(row["resps"])),
        extracted=text_of(read[0] if isinstance(read, list) and read else read),
    )  # fmt: skip
    likelihoods = [float(pair[0]) for pair in read] if weighs_options(requests, read) else []
    return of_options(item, [str(request[1]) for request in requests], likelihoods) if likelihoods else item


def first_response(responses: Any) -> Any:
    while isinstance(responses, list) and responses:
        responses = responses[0]
    return responses


def weighs_options(requests: list[list[Any]], read: Any) -> bool:
    """Whether the responses are the log-likelihoods of given continuations, [number, whether greedy] each."""
    texts = all(len(request) > 1 and isinstance(request[1], str) for request in requests)
    return texts and len(read) == len(requests) and all(isinstance(pair, list) and len(pair) == 2 for pair in read)


def of_options(item: LoggedItem, options: list[str], likelihoods: list[float]) -> LoggedItem:
    """The item with its options and their log-likelihoods as response. acc_norm chooses by the likelihood per
    character, as lm_eval does."""
    names = [option.strip() for option in options]
    by_length = [number / max(1, len(name)) for number, name in zip(likelihoods, names, strict=True)]
    target = int(item.target) if item.target.isdecimal() and int(item.target) < len(names) > 1 else None
    best = names[likelihoods.index(max(likelihoods))]
    return replace(
        item, target=item.target if target is None else names[target], extracted=best,
        response="\n".join(f"{number:.2f}  {name}" for number, name in zip(likelihoods, names, strict=True)),
        chosen={"acc_norm": names[by_length.index(max(by_length))]},
    )  # fmt: skip


def settings_of(content: dict[str, Any], task: str) -> dict[str, Any]:
    """What may differ between two runs of a task, by dotted names: of the task, of the command, and versions."""
    config, of_task = content.get("config", {}), content["configs"][task]
    settings = {"num_fewshot": content["n-shot"].get(task)}
    settings |= {f"gen_kwargs.{key}": value for key, value in flatten_dict(config.get("gen_kwargs") or {}).items()}
    for key in ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn", "max_length"):
        settings[key.removesuffix("_sha")] = content.get(key)
    settings |= {
        f"task.{key}": value for key, value in flatten_dict(of_task).items() if not key.startswith(NO_TASK_SETTING)
    }
    settings["version of the task"] = content["versions"].get(task)
    if isinstance(arguments := config.get("model_args"), dict):
        settings |= {f"model_args.{key}": value for key, value in arguments.items() if key not in THE_MODEL}
    settings |= {key: content.get(f"{key}_version") for key in ("lm_eval", "transformers")}
    return settings | {key: value for key, value in config.items() if key not in NO_SETTING}
