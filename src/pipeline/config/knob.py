"""Settings: dataclass fields with bounds, their checks, and their effect on a run's hash.

No heavy package is imported, so that a wrong key is an error before torch is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import MISSING
from pydantic import ConfigDict, TypeAdapter

from pipeline.errors import PipelineError

BOUNDS = {
    "ge": ("at least", ">="),
    "gt": ("above", ">"),
    "le": ("at most", "<="),
    "lt": ("below", "<"),
}
Words = Mapping[
    str, Any
]  # key -> value, from YAML or the command line; a new key begins with a plus
Tree = dict[str, Any]  # a mapping of YAML: settings by name, with a nested mapping for each part
# A function that returns True if a dataclass reads a field of it, and the setting that makes it
# read the field, such as sft=lora.
Condition = tuple[Callable[[Any], bool], str]


class Knobs:
    """The base of all dataclasses of settings. It configures how pydantic reads them."""

    __pydantic_config__ = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )


def knob(
    default: Any = MISSING,
    *,
    options: tuple[str, ...] | None = None,
    hashed: bool | Callable[[Any], bool] = True,
    read: Condition | None = None,
    form: tuple[str, str] | None = None,
    run: bool = False,
    hash_default: Any = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field. Pydantic reads its metadata as arguments of Field.

    Args:
        default: the default.
        options: the only values of a text.
        hashed: whether the field affects the run hash, or a function that decides it from the
            dataclass.
        read: the condition under which the field has an effect. Otherwise it is not hashed. None:
            always.
        form: a regular expression and examples of a text.
        run: whether the value names a RUN.
        hash_default: the value that adds nothing to a hash, if it is not the default.
        **bounds: ge, gt, le, lt of a number.
    """
    if read and hashed is True:
        hashed = read[0]
    pattern = None
    if options:
        pattern = "|".join(map(re.escape, options))
    elif form:
        pattern = form[0]
    if run and hashed is True:
        hashed = False
    meta: Tree = {
        "options": options,
        "hashed": hashed,
        "read": read,
        "form": form,
        "run": run,
        "hash_default": hash_default,
        **bounds,
    }
    if pattern:
        meta |= {"pattern": f"^(?:{pattern})$"}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


def part(kind: type, *, hashed: bool = True) -> Any:
    """Return a field for a nested dataclass with its defaults."""
    return field(default_factory=kind, metadata={"hashed": hashed})


def refuse_empty_lists(config: Any) -> None:
    """Raise PipelineError for the first setting that is an empty list."""
    for name, value, _ in knobs_of(config):
        if value == []:
            raise PipelineError(f"{name} is empty. Name at least one: {name}=[...]")


fields_of: Any = cache(fields)  # the fields of a dataclass


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def names_of(kind: Any) -> list[str]:
    """Return the sorted field names of a dataclass, or an empty list for another type."""
    if is_dataclass(kind):
        return sorted(item.name for item in fields_of(kind))
    return []


def knobs_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, field) of each field of a dataclass, and of the dataclasses inside it."""
    for item in fields_of(type(config)):
        key, value = prefix + item.name, getattr(config, item.name)
        yield key, value, item
        if value is None or isinstance(value, str | int | float):
            continue
        inside: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            inside = value.items()
        elif isinstance(value, list):
            inside = enumerate(value)
        if is_dataclass(value):
            yield from knobs_of(value, f"{key}.")
        for name, part_value in inside:
            if is_dataclass(part_value):
                yield from knobs_of(part_value, f"{key}.{name}.")


def field_of_key(config: Any, key: str) -> tuple[Any, Any] | None:
    """Return (dataclass, field) of a dotted key, or None if it leaves the dataclasses."""
    *path, last = key.split(".")
    for name in path:
        config = getattr(config, name, None)
    item = None
    if is_dataclass(config):
        item = config.__dataclass_fields__.get(last)
    if item:
        return (config, item)
    return None


def unread_knobs(config: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> remedy for the keys that have no effect in this configuration."""
    field_owners = {key: owner for key in keys if (owner := field_of_key(config, key))}
    unread = {}
    for key, (holder, item) in field_owners.items():
        read = item.metadata.get("read")
        if read:
            has_effect, remedy = read
            if not has_effect(holder):
                unread[key] = remedy
    return unread


def is_hashed(item: Any, config: Any) -> bool:
    """Return True if a field of the dataclass `config` affects the run hash."""
    hashed = item.metadata.get("hashed", True)
    return bool(hashed(config) if callable(hashed) else hashed)


def identity(config: Any) -> Tree:
    """Return the part of a configuration that decides results.

    These are the hashed fields that differ from their declared defaults. A nested dataclass whose
    default is None counts even with default fields, for example an expert's world.
    """
    hashed_fields: Tree = {}
    for item in fields_of(type(config)):
        value = getattr(config, item.name)
        if not is_hashed(item, config):
            continue
        if is_dataclass(value):
            part_value = identity(value)
            if part_value or item.default is None:
                hashed_fields[item.name] = part_value
            continue
        default = item.metadata.get("hash_default")
        if default is None:
            default = default_of(item)
        if isinstance(value, dict) and any(map(is_dataclass, value.values())):
            value = {key: identity(part_value) for key, part_value in value.items()}
        elif isinstance(value, list) and any(map(is_dataclass, value)):
            value = list(map(identity, value))
        if value != default or item.name in ("method", "stage"):
            hashed_fields[item.name] = value
    return hashed_fields


def default_of(item: Any) -> Any:
    """Return the declared default of a field."""
    if item.default_factory is not NO_DEFAULT:
        return item.default_factory()
    return item.default


def format_value(value: Any) -> str:
    """Print a value: text with escaped line breaks and separators, other values as JSON."""
    plain = isinstance(value, str) and value.isprintable() and value.strip()
    if plain:
        return str(value)
    return json.dumps(value, ensure_ascii=False)
