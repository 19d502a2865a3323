"""Benchmarks that a file NAME.yaml of this folder describes.

The file has the fields of the record. Its `data` says where the rows are, what they must hold, and
which texts training data must not contain. The task file is the harness' file, or tasks/NAME.yaml,
or both.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.task_files import (
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

TYPES: dict[str, type] = {"text": str, "number": int, "list": list}


def read_benchmark(file: Path) -> Benchmark:
    fields: Row = {}
    for key, value in load_plain(file).items():
        fields[key] = tuple(value) if isinstance(value, list) else value
    data = fields.pop("data")

    def texts(row: Row) -> list[str]:
        return [template.format_map(row) for template in data.get("texts", [])]

    def sources(spoken: Language) -> list[Source]:
        if "hub" not in data:
            return []
        names = codes(spoken)
        if "stock" in data and not has_stock_file(data["stock"][0].format(**names)):
            return []
        return [on_hub(data["hub"], data["hub_config"].format(**names))]

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
    """Check the data of a task, and write its task file.

    Args:
        name: the benchmark.
        data: `stock`, the harness' files of a language and of English; `files`, split -> the files
            of eval.split=test and dev; `path`, their place below data_root (NAME/LANGUAGE);
            `exemplars`, the split of few-shot examples, `scored` if they are the first rows of the
            scored split, or null; `holds`, column -> its type or its values.
        ask: the request.

    Raises:
        PipelineError: data is missing or broken.
    """
    shown, spoken, own_file = data["exemplars"], ask.language, own_task_file(name)
    if ask.num_fewshot and not shown:
        raise PipelineError(
            f"{name} has no few-shot examples, but num_fewshot={ask.num_fewshot}. Set"
            " num_fewshot=0."
        )
    if data.get("runs_code") and not ask.run_code:
        raise Missing(
            f"{name} runs the programs that a model writes. Allow it with eval.run_code=true, or"
            f" leave {name} out."
        )
    relative = files_of_splits(name, data, ask)
    hint = ""
    if "made_by" in data:
        data_root = ask.data_root or "DATA_ROOT"
        hint = " " + data["made_by"].format(data_root=data_root, code=spoken.code)
    on_the_hub = data.get("hub_languages", [spoken.code] if "hub" in data else [])
    if not ask.data_root and spoken.code not in on_the_hub:
        raise Missing(
            f"{ask.task} in {spoken.name} is not on the Hub. Set data_root to a folder with"
            f" {relative['test']}.{hint}"
        )
    body: Row = {"include": []}
    if "stock" in data:
        stock = [path.format(**codes(spoken)) for path in data["stock"]]
        body["include"].append(str(stock_file(ask, *stock)))
    if own_file.is_file():
        body["include"].append(str(own_file))
        if "generation_kwargs" in load_plain(own_file):
            body |= generation_kwargs(ask, own_file)
    if ask.options == "text":
        body["include"].append(str(own_task_file(f"{ask.task}_text")))
    if ask.data_root:
        if not ask.num_fewshot:  # the file of few-shot examples may be missing
            relative = {"test": relative["test"]}
            if shown not in (None, "scored"):
                body |= {"training_split": None, "fewshot_split": None}
        paths = {split: ask.data_root / path for split, path in relative.items()}
        wanted = data["holds"].items()
        holds = {column: TYPES.get(str(content), content) for column, content in wanted}
        try:
            for path in paths.values():
                rows_of(path, holds, ask.data_root)
        except Missing as error:
            raise Missing(f"{error}{hint}") from error
        read_from(body, **paths)
    first = ask.num_fewshot if shown == "scored" else 0
    return [write_task(ask, body, first=first)]


def files_of_splits(name: str, data: Row, ask: Ask) -> dict[str, str]:
    """Return the file of each split below data_root."""
    path = data.get("path", f"{name}/{ask.language.code}/{{split}}.jsonl")
    relative = {}
    for split, paths_of in data["files"].items():
        file = paths_of.get(ask.split, "").format(task=ask.task)
        if split == "test" and not file:
            raise PipelineError(
                f"{ask.task} has no development items. Leave eval.split={ask.split} out."
            )
        relative[split] = path.format(split=file)
    return relative
