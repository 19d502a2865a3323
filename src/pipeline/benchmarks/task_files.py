"""Task files of the harness: prompts, rows and few-shot examples of a task.

Each task includes the harness' stock file by its path. Only the place of the data, the order of
few-shot examples and the length of answers change, so prompts equal the stock task's byte for byte.
This module imports no heavy library.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from pipeline.benchmarks.benchmark import Ask, TaskSpec
from pipeline.benchmarks.local_files import Row
from pipeline.config.task_yaml import load_plain, shipped_folder
from pipeline.errors import PipelineError

OURS = Path(__file__).parent / "tasks"


def stock_file(ask: Ask, name: str, wordless: str | None = None) -> Path:
    """Return a task file of the harness, without importing the harness, which takes seconds.

    Args:
        ask: the request.
        name: the file.
        wordless: the English file of a benchmark whose prompts differ only in the rows. With rows
            of data_root it serves each language without a file.
    """
    if has_stock_file(name):
        return shipped_folder() / name
    if wordless and ask.data_root:
        return shipped_folder() / wordless
    code = ask.language.code
    remedy = f"Leave {code} out of languages"
    if wordless:
        remedy += f", or give data_root with {name.partition('/')[0]}/{code}/test.jsonl"
    raise PipelineError(f"The harness has no {ask.task} in {ask.language.name}. {remedy}.")


def has_stock_file(name: str) -> bool:
    return (shipped_folder() / name).is_file()


def own_task_file(name: str) -> Path:
    return OURS / f"{name}.yaml"


def generation_kwargs(ask: Ask, *files: Path) -> Row:
    """Join the generation settings of files, and set eval.max_gen_toks.

    They are complete, because the harness replaces nested keys.
    """
    kwargs: Row = {}
    for file in files:
        kwargs |= load_plain(file)["generation_kwargs"]
    if ask.max_gen_toks:
        kwargs["max_gen_toks"] = ask.max_gen_toks
    return {"generation_kwargs": kwargs}


def read_from(body: Row, **files: Path) -> None:
    """Point a task at local files, one for each split."""
    body["include"].append(str(own_task_file("local")))
    data_files = {split: str(file.resolve()) for split, file in files.items()}
    body["dataset_kwargs"] = {"data_files": data_files}


def write_task(
    ask: Ask,
    body: Row,
    pair: str | None = None,
    first: int = 0,
    part: str = "",
) -> TaskSpec:
    """Write the YAML file of a task, and return the task.

    Args:
        ask: the request.
        body: the content of the file.
        pair: the translation pair.
        first: the first scored row.
        part: the task in a group that is scored as one task.
    """
    code = pair or ask.language.code
    name, file_name = ask.task, ask.task
    if part:
        name, file_name = f"{name}_{part}", f"{file_name}.{part}"
    name = f"{name}_{code}_{ask.num_fewshot}shot"
    file = ask.folder / f"{file_name}.{code}.yaml"
    body = {"task": name, "num_fewshot": ask.num_fewshot, **body}
    file.write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return TaskSpec(
        name,
        file,
        ask.task,
        ask.language.code,
        pair,
        ask.num_fewshot,
        ask.benchmark,
        first,
        part,
    )
