"""The YAML files of a task, with the files that they include and the rows that they name.

Files are read without the harness, which takes seconds to import. No function that they name is
run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.knob import Tree
from pipeline.errors import PipelineError
from pipeline.files import read_yaml

MOST_BYTES = 1_000_000  # maximum size of a task file
# keys of a task file whose values are read here -> their types. A list may also have mappings.
TYPES: dict[str, tuple[type, ...]] = {
    "task": (str, list),
    "include": (str, list),
    "dataset_path": (str,),
    "num_fewshot": (int,),
    "repeats": (int,),
    "metric_list": (list,),
    "filter_list": (list,),
    "aggregate_metric_list": (dict, list),
    "generation_kwargs": (dict,),
    "dataset_kwargs": (dict,),
}
READERS = ("json", "csv", "parquet", "text", "arrow")  # names of `datasets` that are not folders


@cache
def shipped_folder() -> Path:
    """Return the harness' folder of tasks, without importing the harness."""
    spec: Any = importlib.util.find_spec("lm_eval")
    return Path(spec.origin).with_name("tasks").resolve()


class FunctionName(str):
    """The name of a function from !function in a task file.

    It has no module, because the module may move.
    """


class _Plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that reads !function as a FunctionName."""


_Plain.add_constructor(
    "!function", lambda loader, node: FunctionName(loader.construct_scalar(node).rpartition(".")[2])
)


def load_plain(file: Path) -> Tree:
    """Load a task file without the files that it includes.

    Raises:
        PipelineError: the file cannot be read.
    """
    try:
        body: Tree = read_yaml(file, loader=_Plain, most_bytes=MOST_BYTES)
    except OSError as error:
        raise PipelineError(
            f"{file} cannot be read ({error.strerror}). Correct the file."
        ) from error
    if not isinstance(body, dict):
        raise PipelineError(
            f"{file} is not a task file. Write keys and values, such as task: NAME."
        )
    return body


@dataclass(frozen=True)
class TaskFile:
    """The YAML file of a task or group with all files that it includes, each read once.

    `parts` has each file with its own content. Later files have priority, and the task's own file
    is the last.
    """

    parts: tuple[tuple[Path, Tree], ...]

    @cached_property
    def body(self) -> Tree:
        """Return the content of all files together. A !function is the name of the function."""
        body: Tree = {}
        for _, content in self.parts:
            body |= content
        body.pop("include", None)
        return body

    @cached_property
    def own(self) -> list[tuple[Path, Tree]]:
        """Return the files that the harness does not ship, with the task's own file first.

        The harness' files are trusted.
        """
        own_parts = []
        for path, content in reversed(self.parts):
            if shipped_folder() not in path.resolve().parents:
                own_parts.append((path, content))
        return own_parts

    @cached_property
    def python(self) -> str | None:
        """Return the name of a file that runs its own Python, or None."""
        for path, content in self.own:
            events = yaml.parse(path.read_bytes(), _Plain)
            names_function = any(getattr(event, "tag", None) == "!function" for event in events)
            if "class" in content or names_function:
                return path.name
        return None


def read_task(file: Path) -> TaskFile:
    """Read a task's file and the files that it includes.

    Raises:
        PipelineError: a file cannot be read, or is included twice, which the harness refuses too.
    """
    return TaskFile(tuple(_parts_of_task(file, [])))


def _parts_of_task(file: Path, seen: list[Path]) -> Iterator[tuple[Path, Tree]]:
    path = file.resolve()
    if path in seen:
        raise PipelineError(f"{file} includes itself or is included twice. Remove an include line.")
    seen.append(path)
    content = load_plain(file)
    for key, kinds in TYPES.items():
        value = content.get(key)
        if value is None:
            continue
        is_right = isinstance(value, kinds)
        if isinstance(value, list):
            is_right &= all(isinstance(entry, (dict, *kinds)) for entry in value)
        if not is_right:
            raise PipelineError(
                f"{file}: {key}={value!r} is not what the harness reads. Correct it."
            )
    names = content.get("include") or []
    for name in [names] if isinstance(names, str) else names:
        yield from _parts_of_task(path.parent / name, seen)  # the harness also follows links
    yield file, content


def outside_metric(body: Mapping[str, Any]) -> str | None:
    """Return a metric that the harness does not have, or None.

    The harness would download such a metric as a program from the Hub.
    """
    metrics = shipped_folder().with_name("api") / "metrics.py"
    metric_names = re.findall(r'metric="([^"]+)"', metrics.read_text(encoding="utf-8"))
    if isinstance(body.get("process_results"), FunctionName):
        return None  # the harness loads no metric
    for entry in body.get("metric_list") or []:
        if isinstance(entry["metric"], str) and (
            entry["metric"] not in metric_names or entry.get("hf_evaluate")
        ):
            return str(entry["metric"])
    return None


# --- its rows ---


def data_files(body: Mapping[str, Any]) -> Any:
    """Return the data files that a task names.

    `datasets` takes one file, a list, or a dictionary by split.
    """
    return (body.get("dataset_kwargs") or {}).get("data_files") or []


def names_of_rows(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files of rows that a task names, which may be patterns."""
    named = data_files(body)
    for value in named.values() if isinstance(named, dict) else [named]:
        yield from [value] if isinstance(value, str) else value


def local_rows(body: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the local files with the rows of a task file."""
    for name in names_of_rows(body):
        yield from (Path(match) for match in glob(name, recursive=True))
