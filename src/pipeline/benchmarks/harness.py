"""Any task or group of the evaluation harness, as its own files define it: prompts, metrics,
filters, splits, repeats.

A task is one test set, whatever language is asked for: `languages` and a table's `in` are the name
under which its scores are reported. Training rows are not compared with these tasks.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from pipeline.benchmarks.benchmark import Ask, Benchmark, Kind, TaskSpec
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.task_files import read_from, write_task
from pipeline.benchmarks.task_safety import (
    outside_paths,
    refuse_card,
    refuse_internals,
    runs_model_programs,
    why_unsafe,
)
from pipeline.config.harness_tasks import (
    file_of,
    files_of_task,
    harness_index,
    included_folder,
    included_state,
    members,
    name_tasks,
)
from pipeline.config.task_yaml import (
    TaskFile,
    data_files,
    data_folders,
    local_rows,
    names_of_rows,
    outside_metric,
)
from pipeline.errors import PipelineError
from pipeline.files import content_hash
from pipeline.limits import time_limit

# Output type -> kind, and the metric of tasks that name none
KINDS: dict[str, tuple[Kind, str]] = {
    "multiple_choice": ("choice", "acc"),
    "generate_until": ("answer", "exact_match"),
    "loglikelihood": ("text", "acc"),
    "loglikelihood_rolling": ("text", "bits_per_byte"),
}
# Metrics of the harness that are no shares of 1, and those of which less is better, unless a task
# says otherwise
NO_SHARES = (
    "perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "ter",
    "likelihood_diff",
)
LOWER = (*NO_SHARES, "brier_score")
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
MOST_REPEATS = 1_000  # answers to each question
ASSUMED_QUESTIONS, ASSUMED_TOKENS = 1000, 100  # for the plan


def harness_benchmark(task: str) -> Benchmark | None:
    """Return the benchmark of a task or group of the harness, or None.

    The first metric and the first filter of the file are the primary ones.
    """
    return _benchmark(task, included_state())


@cache
def _benchmark(task: str, state: tuple[str, ...]) -> Benchmark | None:
    index = harness_index()
    if task not in index.tasks and task not in index.groups:
        return None
    parts = members(task)
    if not parts:
        raise PipelineError(f"the group {task} has no tasks: leave it out")
    body = file_of(parts[0]).body
    kind, metric = KINDS[body.get("output_type", "generate_until")]
    names = [
        entry["metric"] if isinstance(entry["metric"], str) else ""
        for entry in body.get("metric_list") or []
    ]
    if not (metric in names or not names):
        metric = names[0]
    directions = []
    for entry in body.get("metric_list") or []:
        if entry["metric"] == metric:
            directions.append(entry.get("higher_is_better"))
    if directions in ([], [None]):
        lower = metric in LOWER
    else:
        lower = directions[0] is False
    filters = [entry["name"] for entry in body.get("filter_list") or []]
    if task in index.groups:
        aggregates = group_metrics(task)
        if aggregates:
            metric = aggregates[0]["metric"]
            filters = [*(aggregates[0].get("filter_list") or []), *filters]
    files = tuple(f"harness/{name}/*.jsonl" for name in dict.fromkeys([task, *parts]))
    choices = None
    if kind == "choice" and len(parts) == 1:
        choices = body.get("doc_to_choice")
    return Benchmark(
        name=task,
        title=task,
        kind=kind,
        metric=metric,
        define=define,
        filter=filters[0] if filters else "none",
        texts=lambda row: [],
        sources=lambda language: [],
        questions=ASSUMED_QUESTIONS * len(parts),
        choices=len(choices) if isinstance(choices, list) else 0,
        tokens=ASSUMED_TOKENS,
        built_from=files,
        of_harness=True,
        one_set=True,
        lower_is_better=lower,
    )


def group_metrics(group: str) -> list[Row]:
    """Return the metrics that the harness aggregates over the tasks of a group.

    They have `metric`, `filter_list` (None: all) and `weight_by_size`.
    """
    listed = file_of(group).body.get("aggregate_metric_list") or []
    metrics = []
    for entry in [listed] if isinstance(listed, dict) else listed:
        filters = entry.get("filter_list")
        metrics.append(
            {
                "weight_by_size": True,
                **entry,
                "filter_list": [filters] if isinstance(filters, str) else filters,
            }
        )
    return metrics


def define(ask: Ask) -> list[TaskSpec]:
    """Write the task's file with the requested number of exemplars, and with rows of data_root
    where it is given.

    A group has a file for each of its tasks.
    """
    task, index = ask.task, harness_index()
    if ask.split != "test":
        raise PipelineError(
            f"eval.split={ask.split}: {task} scores the harness' split: leave it out"
        )
    if task in index.tasks:
        return [write_task(ask, task_body(ask, task, task))]
    metrics = check_group(task)
    return [
        write_task(ask, task_body(ask, part, task), group=task, part=part, aggregates=metrics)
        for part in members(task)
    ]


def check_group(group: str) -> list[Row]:
    """Return the metrics of a group.

    Raise PipelineError for a group that has no score of its own.
    """
    parts = members(group)
    bodies = [file_of(part).body for part in parts]
    remedy = f"list its tasks, {name_tasks(parts)}"
    metrics = group_metrics(group)
    if not metrics:
        raise PipelineError(f"the group {group} has no score of its own: {remedy}")
    if len({body.get("output_type", "generate_until") for body in bodies}) > 1:
        raise PipelineError(f"the group {group} has tasks of several kinds: {remedy}")
    for part, body in zip(parts, bodies, strict=True):
        names = [entry["metric"] for entry in body.get("metric_list") or []]
        if names and "process_results" not in body:
            lost = {entry["metric"] for entry in metrics} - {*names}
            if lost:
                raise PipelineError(
                    f"the group {group} aggregates {lost.pop()}, which {part} has not: {remedy}"
                )
    return metrics


def task_body(ask: Ask, task: str, folder: str) -> Row:
    """Return what the file of a task contains over its stock file.

    A user-defined task that names its files reads these, unless data_root has rows of it.

    Args: folder: below data_root/harness, unless the task has one.

    Raises: PipelineError: the task scores no data, or would run code without consent.
    """
    file = harness_index().tasks[task]
    task_file = file_of(task)
    stock = task_file.body
    body: Row = {"include": [str(file)]}
    if runs_model_programs(task_file):
        raise PipelineError(
            f"{task} runs the model's programs without a sandbox: score mbpp with"
            " eval.run_code=true, which has one"
        )
    if not ask.run_code:
        metric = outside_metric(stock)
        if metric:
            raise PipelineError(
                f"{task}: its metric {metric} is not the harness' own but a program from the Hub:"
                " give eval.run_code=true if you trust it, or leave the task out"
            )
    if not scored_split(stock):
        raise PipelineError(
            f"{task} has no test data: set test_split or validation_split in {file.name}"
        )
    repeats = stock.get("repeats") or 1
    if not isinstance(repeats, int) or not 0 < repeats <= MOST_REPEATS:
        raise PipelineError(
            f"{task} has repeats: {repeats}. Set a number from 1 to {MOST_REPEATS:,} in"
            f" {file.name}."
        )
    included = included_folder(task)
    names_rows = included and (data_files(stock) or data_folders(stock))
    own_rows = names_rows and not any(
        row_folder.is_dir() for row_folder in row_folders(ask, task, folder)
    )
    local = ask.data_root is not None and not own_rows
    if included:
        if not ask.run_code:
            unsafe = task_file.python
            if unsafe:
                raise PipelineError(
                    f"{task} of eval.include_path={included} runs Python: {unsafe} has !function or"
                    " class. Give eval.run_code=true if you trust it, or leave the task out"
                )
        if not ask.run_code:
            reason = why_unsafe(task_file)
            if reason:
                raise PipelineError(
                    f"{task} of eval.include_path={included} could run code: {reason}. Give"
                    " eval.run_code=true if you trust it, or remove that key"
                )
        refuse_internals(task_file)
        for rows_folder in data_folders(stock):
            refuse_card(rows_folder)
        refuse_includes_outside(task, task_file, included)
        if folder != task:
            refuse_includes_outside(folder, file_of(folder), included)
        if not local:
            refuse_files_outside(task, stock, included)
        rows = scored_rows(task, ask.data_root if local else None)
        if rows:
            refuse_missing_columns(task, stock, rows)
        content = content_hash([*files_of_task(task)], included)
        body["metadata"] = {"version": 0, **(stock.get("metadata") or {}), "content": content}
    if ask.max_gen_toks and stock.get("output_type", "generate_until") == "generate_until":
        body["generation_kwargs"] = {
            **(stock.get("generation_kwargs") or {}),
            "max_gen_toks": ask.max_gen_toks,
        }
    if local:
        body |= local_splits(ask, task, folder, stock)
    elif (stock.get("dataset_kwargs") or {}).get("trust_remote_code"):
        raise PipelineError(
            f"{task}: its data set on the Hub is a program, which is not run: give data_root with "
            f"harness/{task}/{scored_split(stock)}.jsonl"
        )
    return body


def refuse_includes_outside(name: str, task_file: TaskFile, folder: Path) -> None:
    """Raise PipelineError for a user-defined task or group whose file includes one that no hash
    knows.
    """
    outside = task_file.outside(folder)
    if outside:
        raise PipelineError(
            f"{name} includes {outside}, outside of eval.include_path={folder}, whose content"
            " identifies a run: move it there"
        )


def refuse_files_outside(task: str, stock: Row, folder: Path) -> None:
    """Raise PipelineError for local rows of a user-defined task that no hash knows: those outside
    its folder.
    """
    without_folder = not data_folders(stock)  # in which the names are
    for name in names_of_rows(stock) if without_folder else ():
        if "://" not in name and not glob(name, recursive=True):
            raise PipelineError(
                f"{task} reads {name}, which is not there. Write its rows to it, or leave the task"
                " out."
            )
    elsewhere = (
        str(file.resolve()) for file in local_rows(stock) if folder not in file.resolve().parents
    )
    for path in itertools.chain(outside_paths(stock, folder), elsewhere):
        raise PipelineError(
            f"{task} reads {path}, outside of eval.include_path={folder}, whose content identifies"
            " a run: move it there and name it from the working directory, or give data_root with"
            f" harness/{task}/{scored_split(stock)}.jsonl"
        )


def refuse_missing_columns(task: str, stock: Row, rows: Path) -> None:
    """Raise PipelineError if there are no rows, or a template of the task names a column that the
    first row lacks.

    Templates are parsed and not rendered. Those that ask whether a column is defined may name any.
    """
    from jinja2 import TemplateSyntaxError, meta

    from pipeline.sandbox import SECONDS, SandboxedEnvironment

    with rows.open(encoding="utf-8") as lines:
        line = next(filter(str.strip, lines), None)
    if line is None:
        raise PipelineError(
            f"{task} has no questions: {rows} has no rows. Write rows to it, or leave the task out."
        )
    row, environment = json.loads(line), SandboxedEnvironment()
    if "process_docs" in stock:  # a function may add columns
        return
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        template = stock.get(key)
        if not isinstance(template, str) or re.search(r"\bdefined\b|\bdefault\b", template):
            continue
        try:
            with time_limit(
                SECONDS, f"{task}: {key} takes more than {SECONDS} seconds: shorten the template"
            ):
                names = meta.find_undeclared_variables(environment.parse(template))
        except (TemplateSyntaxError, RecursionError):  # which the harness reports
            continue
        missing = sorted(names - row.keys() - environment.globals.keys())
        if missing:
            raise PipelineError(
                f"{task}: {key} names the column {missing[0]}, which its rows do not have. Correct"
                f" the task file in eval.include_path; the columns are {', '.join(row)}."
            )


def row_folders(ask: Ask, task: str, group: str) -> list[Path]:
    """Where data_root has the rows of a task: in a folder of its own, else in that of its group."""
    if ask.data_root:
        return [ask.data_root / "harness" / name for name in (task, group)]
    return []


def scored_rows(task: str, data_root: Path | None) -> Path | None:
    """Return the file of the rows that a task of the harness scores, if it is here."""
    if task not in harness_index().tasks:
        return None
    stock = file_of(task).body
    named_files = data_files(stock)
    if isinstance(named_files, dict):
        own_files = named_files.get(scored_split(stock))
    else:
        own_files = named_files
    files = []
    if isinstance(own_files, str) and own_files:
        files = [Path(own_files)]
    files += [row_folder / f"{scored_split(stock)}.jsonl" for row_folder in data_folders(stock)]
    if data_root:
        files += [data_root / "harness" / task / f"{scored_split(stock)}.jsonl"]
    return next(
        (file for file in reversed(files) if file.is_file() and file.suffix == ".jsonl"), None
    )


def scored_split(stock: Row) -> Any:
    return stock.get("test_split") or stock.get("validation_split")


def local_splits(ask: Ask, task: str, group: str, stock: Row) -> Row:
    """Return the task's keys that point its splits to data_root/harness/TASK/SPLIT.jsonl.

    A group's task may also have data_root/harness/GROUP/SPLIT.jsonl. Splits without a file are
    removed.

    Raises: Missing: there is no file of the scored split, or of that of the exemplars.
    """
    folders = row_folders(ask, task, group)
    folder = next((row_folder for row_folder in folders if row_folder.is_dir()), folders[0])
    named_splits = {}
    for key in SPLITS:
        if stock.get(key):
            named_splits[key] = stock[key]
    files = {}
    for split in named_splits.values():
        file = folder / f"{split}.jsonl"
        if file.is_file():
            files[split] = file
    needed_splits = [scored_split(stock)]
    if ask.num_fewshot and not (stock.get("fewshot_config") or {}).get("samples"):
        needed_splits.append(
            next(
                named_splits[key]
                for key in ("fewshot_split", "training_split", *SPLITS)
                if key in named_splits
            )
        )
    absent = []
    for split in needed_splits:
        if split not in files:
            absent.append(split)
    if absent:
        raise Missing(
            f"{task}: {folder / absent[0]}.jsonl is missing: write the rows of its split there,"
            f" give {task} a data_root of its own (null: the Hub), or leave it out"
        )
    rows_of(files[scored_split(stock)], {})  # or an error
    body: Row = {"include": [str(harness_index().tasks[task])]}
    read_from(body, **files)
    for key, split in named_splits.items():
        if split not in files:
            body[key] = None
    return body | ({"custom_dataset": None} if "custom_dataset" in stock else {})
