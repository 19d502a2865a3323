"""The words of a table's YAML: values that may be single or in a list, and mappings by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.config.knob import Tree
from pipeline.errors import PipelineError

Words = Tree
Axes = tuple[str, ...]  # the names of axes
Refuse = Callable[[str, str], PipelineError]  # (key, problem)


def table_error(file: str, where: str, problem: str) -> PipelineError:
    place = f"{file}, {where}" if where else file
    return PipelineError(f"{place}: {problem}")


def as_mapping(file: str, where: str, value: Any) -> Words:
    """Return a mapping of names; empty for null.

    YAML may have read the names as numbers or truth values.
    """
    if value is not None and not isinstance(value, dict):
        raise table_error(file, where, f"expected a mapping of names to values, got {value!r}")
    return {str(name): item for name, item in (value or {}).items()}


def as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]
