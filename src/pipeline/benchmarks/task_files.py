"""Task files of the harness: what is asked, of which rows, with which exemplars.

Each task is the harness' stock file, included by its path, with only the place of the data, the
order of the exemplars and the length of answers changed, so that a prompt equals the stock task's
byte for byte. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from pipeline.benchmarks.benchmark import Ask, TaskSpec
from pipeline.benchmarks.local_files import Row, path_of_split
from pipeline.config.task_yaml import load_plain, shipped_folder
from pipeline.errors import PipelineError

OURS = Path(__file__).parent / "tasks"


def stock_file(ask: Ask, name: str, wordless: str | None = None) -> Path:
    """Return the harness' own file, without importing the harness, which takes seconds.

    Args: wordless: English's file of a benchmark whose prompts differ only in the rows. With own
    rows it serves each language that the harness has no file for.
    """
    tasks = shipped_folder()
    if tasks is None:
        raise PipelineError("lm_eval is not installed: install the package with its requirements")
    file = tasks / name
    if file.is_file():
        return file
    code = ask.language.code
    remedy = f"leave {code} out of languages"
    if wordless and ask.data_root:
        return tasks / wordless
    if wordless:
        remedy += f", or give data_root with {name.partition('/')[0]}/{code}/test.jsonl"
    raise PipelineError(f"the harness has no {ask.task} in {ask.language.name}: {remedy}")


def has_stock_file(name: str) -> bool:
    tasks = shipped_folder()
    return tasks is not None and (tasks / name).is_file()


def own_task_file(name: str) -> Path:
    return OURS / f"{name}.yaml"


def by_text(ask: Ask) -> list[str]:
    """Return what turns a question that is answered by a letter into one that is answered by the
    text of its options.

    eval.options=text requests it.
    """
    if ask.options == "text":
        return [str(own_task_file(f"{ask.task}_text"))]
    return []


def generation_kwargs(ask: Ask, *files: Path) -> Row:
    """Join the files' settings, with eval.max_gen_toks over them; whole, since the harness replaces
    nested keys.
    """
    kwargs: Row = {}
    for file in files:
        kwargs |= load_plain(file)["generation_kwargs"]
    return {
        "generation_kwargs": (
            kwargs | ({"max_gen_toks": ask.max_gen_toks} if ask.max_gen_toks else {})
        )
    }


def local_files(ask: Ask, folder: str, *splits: str) -> list[Path]:
    assert ask.data_root
    return [path_of_split(ask.data_root, folder, ask.language, split) for split in splits]


def check_exemplars(ask: Ask, label: str, available: int, file: Path) -> None:
    if ask.num_fewshot > available:
        raise PipelineError(
            f"{label}: num_fewshot={ask.num_fewshot}, but {file} has {available} exemplars: ask for"
            f" at most {available}"
        )


def read_from(body: Row, **files: Path) -> None:
    """Point a task at local files, a split each."""
    body["include"].append(str(own_task_file("local")))
    body["dataset_kwargs"] = {
        "data_files": {split: str(file.resolve()) for split, file in files.items()}
    }


def write_task(
    ask: Ask,
    body: Row,
    pair: str | None = None,
    first: int = 0,
    group: str = "",
    part: str = "",
    aggregates: Sequence[Row] = (),
) -> TaskSpec:
    """Write the YAML file of a task, and return what is known of the task."""
    code = pair or ask.language.code
    name = "_".join([ask.task, *([part] if part else []), code, f"{ask.num_fewshot}shot"])
    file = ask.folder / f"{ask.task}{f'.{part}' if part else ''}.{code}.yaml"
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
        group,
        part,
        tuple(aggregates),
    )
