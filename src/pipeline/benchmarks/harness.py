"""Any task or group of the evaluation harness, as its task file defines it.

The file defines prompts, metrics, filters, splits and repeats. A task is one test set in any
language: `languages` and a table's `in` are only the name under which its scores are reported.
Training rows are not compared with these tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.benchmarks.benchmark import Ask, Benchmark, Kind, TaskSpec
from pipeline.benchmarks.local_files import Missing, Row
from pipeline.benchmarks.task_files import write_task
from pipeline.benchmarks.task_safety import (
    folder_of_rows,
    outside_paths,
    runs_model_programs,
    why_unsafe,
)
from pipeline.config.harness_tasks import (
    file_of,
    harness_index,
    included_folder,
    is_group,
    members,
    remembered,
)
from pipeline.config.task_yaml import (
    data_files,
    outside_metric,
)
from pipeline.errors import PipelineError, first_few

# Output type -> kind, and the metric of tasks without a metric_list
KINDS: dict[str, tuple[Kind, str]] = {
    "multiple_choice": ("choice", "acc"),
    "generate_until": ("answer", "exact_match"),
    "loglikelihood": ("text", "acc"),
    "loglikelihood_rolling": ("text", "bits_per_byte"),
}
# Metrics of the harness that are not shares of 1
NO_SHARES = (
    "perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "ter",
    "likelihood_diff",
)
LOWER = (*NO_SHARES, "brier_score")  # lower is better, unless a task says otherwise
ASSUMED_QUESTIONS, ASSUMED_TOKENS = 1000, 100  # for plans


@remembered
def harness_benchmark(task: str) -> Benchmark | None:
    """Return the benchmark of a task or group of the harness, or None for other tasks.

    Its primary metric and filter are the first in the file.
    """
    if task not in harness_index():
        return None
    parts = members(task)
    body = file_of(parts[0]).body
    output = body.get("output_type", "generate_until")
    if output not in KINDS:
        raise PipelineError(f"{task}: output_type={output} is not one of {', '.join(KINDS)}.")
    kind, default_metric = KINDS[output]
    metric, lower = _primary_metric(body.get("metric_list") or [], default_metric)
    filters = [entry["name"] for entry in body.get("filter_list") or []]
    for aggregate in group_metrics(task)[:1]:
        metric = aggregate["metric"]
        filters = [*(aggregate["filter_list"] or []), *filters]
    choices = None
    if kind == "choice" and len(parts) == 1:
        choices = body.get("doc_to_choice")
    return Benchmark(
        name=task,
        kind=kind,
        metric=metric,
        define=define,
        filter=filters[0] if filters else "none",
        texts=lambda row: [],
        sources=lambda language: [],
        questions=ASSUMED_QUESTIONS * len(parts),
        choices=len(choices) if isinstance(choices, list) else 0,
        tokens=ASSUMED_TOKENS,
        of_harness=True,
        lower_is_better=lower,
    )


def _primary_metric(listed: list[Row], default: str) -> tuple[str, bool]:
    """Return the main metric of a metric_list, and True if a lower value is better."""
    by_name = {entry["metric"]: entry for entry in listed}
    metric = default
    if by_name and default not in by_name:
        metric = next(iter(by_name))
    higher_is_better = by_name.get(metric, {}).get("higher_is_better")
    if higher_is_better is None:
        return metric, metric in LOWER
    return metric, not higher_is_better


def group_metrics(group: str) -> list[Row]:
    """Return the metrics that the harness aggregates over the tasks of a group; [] for a task.

    They have `metric`, `filter_list` (None: all filters) and `weight_by_size`.
    """
    listed = file_of(group).body.get("aggregate_metric_list") or []
    if isinstance(listed, dict):
        listed = [listed]
    metrics = []
    for entry in listed:
        filters = entry.get("filter_list")
        if isinstance(filters, str):
            filters = [filters]
        metrics.append({"weight_by_size": True, **entry, "filter_list": filters})
    return metrics


def define(ask: Ask) -> list[TaskSpec]:
    """Write a task's file with the few-shot examples of the request.

    A group has a file for each of its tasks.
    """
    task = ask.task
    if ask.split != "test":
        raise PipelineError(
            f"eval.split={ask.split}: {task} scores the harness' split. Leave it out."
        )
    if not is_group(task):
        return [write_task(ask, task_body(ask, task))]
    check_group(task)
    return [write_task(ask, task_body(ask, part), part=part) for part in members(task)]


def check_group(group: str) -> None:
    """Raise PipelineError if a group has no score, or includes a file outside its folder."""
    parts = members(group)
    remedy = f"Give eval.tasks=[{first_few(parts, 10, ',')}] in place of it."
    if not group_metrics(group):
        raise PipelineError(f"The group {group} has no score. {remedy}")
    kinds = {file_of(part).body.get("output_type", "generate_until") for part in parts}
    if len(kinds) > 1:
        raise PipelineError(f"The group {group} has tasks of several kinds. {remedy}")
    refuse_includes_outside(group)


def task_body(ask: Ask, task: str) -> Row:
    """Return the content of a task's file that changes its stock file.

    Raises:
        PipelineError: the task scores no data, or would run code without consent.
    """
    check_task(ask, task)
    stock = file_of(task).body
    body: Row = {"include": [str(harness_index()[task])]}
    has_own_rows = included_folder(task) and data_files(stock)
    if ask.data_root and not has_own_rows:
        raise Missing(
            f"{task} is a task of the harness, and data_root={ask.data_root} has no rows of it."
            f" Name its rows in a task file of eval.include_path, give {task} another data_root"
            " (null: the Hub), or leave it out."
        )
    if ask.max_gen_toks and stock.get("output_type", "generate_until") == "generate_until":
        kwargs = stock.get("generation_kwargs") or {}
        body["generation_kwargs"] = {**kwargs, "max_gen_toks": ask.max_gen_toks}
    return body


def check_task(ask: Ask, task: str) -> None:
    """Raise PipelineError if a task has no questions or would run code without consent.

    A user-defined task must not read files outside its folder.
    """
    task_file = file_of(task)
    stock = task_file.body
    if runs_model_programs(task_file):
        raise PipelineError(
            f"{task} runs the model's programs without a sandbox. Score mbpp with"
            " eval.run_code=true, which has a sandbox."
        )
    metric = outside_metric(stock)
    if metric and not ask.run_code:
        raise PipelineError(
            f"{task}: its metric {metric} is not the harness' but a program from the Hub. Give"
            " eval.run_code=true if you trust it, or leave the task out."
        )
    if not scored_split(stock):
        raise PipelineError(
            f"{task} has no test data. Set test_split or validation_split in its task file."
        )
    folder = included_folder(task)
    if folder is None:
        return
    reason = why_unsafe(task_file)
    if reason and not ask.run_code:
        raise PipelineError(
            f"{task} of eval.include_path={folder} could run code: {reason}. Give"
            " eval.run_code=true if you trust it, or remove that key."
        )
    refuse_includes_outside(task)
    source = folder_of_rows(stock)
    if source:
        raise PipelineError(
            f"{task} reads rows of the folder {source}. Name their files in"
            f" eval.include_path={folder} by dataset_kwargs.data_files, with dataset_path: json."
        )
    for outside in outside_paths(stock, folder):
        raise PipelineError(
            f"{task} reads {outside}, outside of eval.include_path={folder}, whose content"
            " identifies a run. Move it there and name it from the working directory."
        )


def refuse_includes_outside(name: str) -> None:
    """Raise PipelineError if a user-defined task or group includes a file outside its folder."""
    folder = included_folder(name)
    if folder is None:
        return
    for path, _ in file_of(name).own:
        if folder not in path.resolve().parents:
            raise PipelineError(
                f"{name} includes {path}, outside of eval.include_path={folder}, whose content"
                " identifies a run. Move it there."
            )


def scored_rows(task: str) -> Path | None:
    """Return the local file of the rows that a user-defined task scores, or None."""
    if task not in harness_index():
        return None
    stock = file_of(task).body
    own_file = data_files(stock)
    if isinstance(own_file, dict):
        own_file = own_file.get(scored_split(stock))
    if isinstance(own_file, str) and own_file.endswith(".jsonl") and Path(own_file).is_file():
        return Path(own_file)
    return None


def scored_split(stock: Row) -> Any:
    return stock.get("test_split") or stock.get("validation_split")
