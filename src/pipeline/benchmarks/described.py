"""Benchmarks that a file of this folder describes, NAME.yaml: the fields of the record, and in
`data` where its rows are, what they must hold, and what of them must not stand in training data.
The task file is the harness' stock one, or tasks/NAME.yaml, or both.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.task_files import (
    by_text,
    check_exemplars,
    generation_kwargs,
    has_stock_file,
    own_task_file,
    read_from,
    stock_file,
    write_task,
)
from pipeline.config.data import Source
from pipeline.config.task_yaml import load_plain
from pipeline.errors import PipelineError
from pipeline.languages import Language

TYPES = {"text": str, "number": int, "list": list}


def read_benchmark(file: Path) -> Benchmark:
    fields: Row = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in load_plain(file).items()
    }
    data = fields.pop("data")

    def texts(row: Row) -> list[str]:
        return [template.format_map(row) for template in data.get("texts", [])]

    def sources(spoken: Language) -> list[Source]:
        if "hub" not in data or (
            "stock" in data and not has_stock_file(data["stock"][0].format(**codes(spoken)))
        ):
            return []
        return [on_hub(data["hub"], data["hub_config"].format(**codes(spoken)))]

    return Benchmark(
        name=file.stem,
        define=partial(define, file.stem, data),
        texts=texts,
        sources=sources,
        **fields,
    )


def codes(spoken: Language) -> dict[str, str]:
    return {
        "code": spoken.code,
        "flores": spoken.flores,
        "global_mmlu": spoken.global_mmlu or spoken.code,
    }


def define(name: str, data: Row, ask: Ask) -> list[TaskSpec]:
    """The task file of one task.

    data: `stock`, the harness' files of a language and of English; `files`, split -> the file of
    eval.split=test and of dev, and `path`, where these are below data_root, by default
    NAME/LANGUAGE; `exemplars`, whose split is shown, `scored` where these are the first rows of the
    scored split, null where there are none; `holds`, column -> its type or its values; `optional`,
    the same of columns that rows may lack; `least`, column -> texts.

    Raises:
        PipelineError: data is missing or broken, or there are fewer exemplars than asked for.
    """
    shown, spoken, own_file = data["exemplars"], ask.language, own_task_file(name)
    if ask.num_fewshot and not shown:
        raise PipelineError(
            f"{name} is asked without exemplars: num_fewshot=0, not {ask.num_fewshot}"
        )
    if data.get("runs_code") and not ask.run_code:
        raise Missing(
            f"{name} runs the programs that a model writes: allow it with eval.run_code=true, or"
            f" leave {name} out"
        )
    files = {
        split: paths_of.get(ask.split, "").format(task=ask.task)
        for split, paths_of in data["files"].items()
    }
    if not files["test"]:
        raise PipelineError(
            f"{ask.task} has no development items: leave eval.split={ask.split} out"
        )
    hint = data.get("made_by", "").format(data_root=ask.data_root or "DATA_ROOT", code=spoken.code)
    path = data.get("path", f"{name}/{spoken.code}/{{split}}.jsonl")
    path_of_split = {split: path.format(split=file) for split, file in files.items()}
    if not ask.data_root and spoken.code not in data.get(
        "hub_languages", [spoken.code] if "hub" in data else []
    ):
        problem = f"{ask.task} in {spoken.name} is not on the Hub"
        raise Missing(f"{problem}: set data_root to a folder with {path_of_split['test']}{hint}")
    stock = []
    if "stock" in data:
        stock = [str(stock_file(ask, *(path.format(**codes(spoken)) for path in data["stock"])))]
    body: Row = {
        "include": [*stock, *([str(own_file)] if own_file.is_file() else []), *by_text(ask)]
    }
    if own_file.is_file() and "generation_kwargs" in load_plain(own_file):
        body |= generation_kwargs(ask, own_file)
    if ask.data_root:
        if not ask.num_fewshot:  # a file of exemplars need not be there
            path_of_split = {"test": path_of_split["test"]}
            if shown not in (None, "scored"):
                body |= {"training_split": None, "fewshot_split": None}
        paths = {split: ask.data_root / relative for split, relative in path_of_split.items()}
        try:
            order = sorted(paths, key=lambda split: split != "test")
            rows = {split: read_rows(paths[split], data, ask.data_root) for split in order}
        except Missing as error:
            raise Missing(f"{error}{hint}") from error
        group, split = data.get("group", ""), "test" if shown == "scored" else shown
        shots = Counter(row.get(group) for row in rows.get(split, [])[shown == "scored" :])
        for subject in (
            dict.fromkeys(row.get(group) for row in rows["test"]) if ask.num_fewshot else ()
        ):
            check_exemplars(
                ask, f"{name}, {subject}" if subject else name, shots[subject], paths[split]
            )
        read_from(body, **paths)
    return [write_task(ask, body, first=ask.num_fewshot if shown == "scored" else 0)]


def read_rows(file: Path, data: Row, data_root: Path) -> list[Row]:
    holds: dict[str, Any] = data["holds"]
    types = {}
    for column, kind in holds.items():
        if isinstance(kind, str):
            types[column] = TYPES[kind]
    options = {}
    for column, values in holds.items():
        if column not in types:
            options[column] = tuple(values)
    optional = {column: TYPES[kind] for column, kind in data.get("optional", {}).items()}
    rows = rows_of(file, types, options, optional, data_root)
    for column, least in data.get("least", {}).items():
        for number, row in enumerate(rows, start=1):
            if len(row[column]) < least or not all(isinstance(text, str) for text in row[column]):
                raise PipelineError(
                    f"{file}, row {number}: {column} must hold {least} texts, as the prompt shows"
                    " them"
                )
    return rows
