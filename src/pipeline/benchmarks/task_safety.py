"""Checks that a task file of eval.include_path neither runs code nor names files outside of its
folder.

eval.run_code=true allows Python. Templates are never allowed to reach Python's internals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.task_yaml import READERS, FunctionName, TaskFile, names_of_rows
from pipeline.errors import PipelineError
from pipeline.files import readable_yaml
from pipeline.text import strings_in

REPOSITORY = re.compile(
    r"[\w.-]+(/[\w.-]+)?"
)  # owner/name on the Hub, or an old name without an owner
REMOTE = re.compile(
    r"(https?|hf|s3|gs)://(?!.*(::|file:)).*"
)  # a chain of addresses may end in a local file
# What a task file may set of an answer. generate() also takes settings that name code.
GENERATION = (
    "until do_sample temperature top_p top_k min_p typical_p num_beams max_gen_toks max_new_tokens"
    " max_tokens max_completion_tokens max_length min_length min_new_tokens repetition_penalty"
    " no_repeat_ngram_size length_penalty early_stopping seed think_end_token"
).split()
# In a template, not in the text around it. A search from one opening bracket ends at the next: it
# takes linear time.
INTERNAL = re.compile(r"\{[{%](?:(?!\{[{%])[^}])*?(__[a-z]\w*__)")


def texts_of(body: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Return the texts of a task file that may be templates, with their keys."""
    for key, value in body.items():
        if isinstance(value, str) and not isinstance(value, FunctionName):
            yield f"{before}{key}", value
        elif key == "fewshot_config" and isinstance(value, dict):
            yield from texts_of(value, f"{key}.")


def refuse_internals(task_file: TaskFile) -> None:
    """Raise PipelineError for a template that names one of Python's internals, such as __globals__.

    This finds most of what Jinja's sandbox refuses later, before any data is read.
    """
    for path, body in task_file.own:
        for key, text in texts_of(body):
            found = INTERNAL.search(text)
            if found:
                raise PipelineError(
                    f"{path}: {key} reaches Python's internals ({found[1]}), which could run any"
                    " code: remove that from the template"
                )


def why_unsafe(task_file: TaskFile) -> str | None:
    """Return the key of a user-defined task that could run code although no file of it has
    !function.
    """
    unknown = (task_file.body.get("generation_kwargs") or {}).keys() - GENERATION
    if unknown:
        return f"generation_kwargs sets {', '.join(unknown)}"
    if any({"custom_dataset", "use_prompt"} & body.keys() for _, body in task_file.parts):
        own_keys = set()
        for _, body in task_file.own:
            for key in body:
                own_keys.add(key)
        given = own_keys & {"metadata", "dataset_kwargs", "use_prompt"}
        if given:
            return f"{', '.join(given)} can name what a function of the harness loads"
    return None


def runs_model_programs(task_file: TaskFile) -> bool:
    """Return True if a task, or a file that it includes, runs programs that a model writes: it is
    marked so, or its functions evaluate answers as Python, as sympy's parse_expr does.
    """
    modules = set()
    for path, _ in task_file.parts:
        for module in path.parent.glob("*.py"):
            modules.add(module)
    evaluates = any(
        "parse_expr" in module.read_text(encoding="utf-8", errors="replace") for module in modules
    )
    return evaluates or any(body.get("unsafe_code") for _, body in task_file.parts)


def outside_paths(stock: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Return the paths outside of its folder that a user-defined task reads its rows from.

    A folder's content identifies a run.
    """
    kwargs, source = stock.get("dataset_kwargs") or {}, str(stock.get("dataset_path"))
    paths = [kwargs.get("cache_dir"), kwargs.get("data_dir")]
    if source not in READERS and (
        Path(source).expanduser().exists() or not REPOSITORY.fullmatch(source)
    ):
        paths.append(source)
    paths += names_of_rows(stock)
    for path in map(str, filter(None, paths)):
        place = Path(path).expanduser().resolve()
        if not REMOTE.fullmatch(path) and ("://" in path or folder not in (place / "x").parents):
            yield path


def refuse_card(folder: Path) -> None:
    """Raise PipelineError for a local folder of rows whose card names files outside of it:
    `datasets` reads them.
    """
    for card in (folder / name for name in ("README.md", ".huggingface.yaml")):
        if not card.is_file():
            continue
        text = card.read_text(encoding="utf-8", errors="replace")
        if card.suffix == ".yaml":
            head = text
        else:
            head = text.partition("---")[2].partition("\n---")[0]
        with readable_yaml(card):
            settings = yaml.safe_load(head)
        for name in strings_in(settings.get("configs") if isinstance(settings, dict) else None):
            if name.startswith(("/", "~")) or ".." in Path(name).parts or "://" in name:
                raise PipelineError(
                    f"{card} names rows outside of its folder ({name}): correct its configs"
                )
