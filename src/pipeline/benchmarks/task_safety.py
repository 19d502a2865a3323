"""Checks that a task file of eval.include_path runs no code, and names no files outside its folder.

eval.run_code=true allows Python. Templates may never use Python's internals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.task_yaml import READERS, TaskFile, names_of_rows
from pipeline.errors import PipelineError
from pipeline.files import readable_yaml
from pipeline.text import strings_in

# owner/name on the Hub, or an old name without an owner
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
# A chain of addresses may end in a local file
REMOTE = re.compile(r"(https?|hf|s3|gs)://(?!.*(::|file:)).*")
# Generation settings that a task file may have. generate() also takes settings that name code.
GENERATION = (
    "until do_sample temperature top_p top_k min_p typical_p num_beams max_gen_toks max_new_tokens"
    " max_tokens max_completion_tokens max_length min_length min_new_tokens repetition_penalty"
    " no_repeat_ngram_size length_penalty early_stopping seed think_end_token"
).split()


def why_unsafe(task_file: TaskFile) -> str | None:
    """Return which keys of a user-defined task could run code, or None."""
    if task_file.python:
        return f"{task_file.python} has !function or class"
    unknown = (task_file.body.get("generation_kwargs") or {}).keys() - GENERATION
    if unknown:
        return f"generation_kwargs sets {', '.join(unknown)}"
    if any({"custom_dataset", "use_prompt"} & body.keys() for _, body in task_file.parts):
        own_keys = set(chain.from_iterable(body for _, body in task_file.own))
        given = own_keys & {"metadata", "dataset_kwargs", "use_prompt"}
        if given:
            return f"{', '.join(given)} can name what a function of the harness loads"
    return None


def runs_model_programs(task_file: TaskFile) -> bool:
    """Return True if a task, or a file that it includes, runs programs that a model writes.

    Such a file is marked as unsafe_code, or its functions evaluate answers as Python, as sympy's
    parse_expr does.
    """
    if any(body.get("unsafe_code") for _, body in task_file.parts):
        return True
    for folder in {path.parent for path, _ in task_file.parts}:
        for module in folder.glob("*.py"):
            if "parse_expr" in module.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def folder_of_rows(stock: Mapping[str, Any]) -> str | None:
    """Return a local folder that a user-defined task reads its rows from, or None."""
    kwargs, source = stock.get("dataset_kwargs") or {}, str(stock.get("dataset_path"))
    for key in ("data_dir", "cache_dir"):
        if kwargs.get(key):
            return str(kwargs[key])
    is_local = Path(source).expanduser().exists() or not REPOSITORY.fullmatch(source)
    if source not in READERS and is_local:
        return source
    return None


def outside_paths(stock: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the files outside its folder that a user-defined task reads its rows from.

    The folder's content identifies a run.
    """
    for name in names_of_rows(stock):
        if REMOTE.fullmatch(name):
            continue
        places = [Path(name).expanduser(), *map(Path, glob(name, recursive=True))]
        if "://" in name or any(folder not in place.resolve().parents for place in places):
            yield name


def refuse_card(folder: Path) -> None:
    """Raise PipelineError if the card of a local copy of a data set names files outside of it.

    `datasets` would read them.
    """
    for card in (folder / "README.md", folder / ".huggingface.yaml"):
        if not card.is_file():
            continue
        head = card.read_text(encoding="utf-8", errors="replace")
        if card.suffix != ".yaml":
            head = head.partition("---")[2].partition("\n---")[0]
        with readable_yaml(card):
            settings = yaml.safe_load(head)
        configs = settings.get("configs") if isinstance(settings, dict) else None
        for name in strings_in(configs):
            is_outside = name.startswith(("/", "~")) or ".." in Path(name).parts
            if is_outside or "://" in name:
                raise PipelineError(
                    f"{card} names rows outside of its folder ({name}). Correct its configs."
                )
