"""JSON as typed values: the inverse of `dataclasses.asdict`, checked all the way down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def from_json(kind: Any, value: Any, choose: Callable[[Any, Any], Any] = lambda kind, _: kind) -> Any:
    """JSON as a value of type `kind`; keys that are not fields of a dataclass are ignored.

    choose: (dataclass, its JSON) -> the class to make, where a base class stands for several.
    Raises TypeError, KeyError or ValueError for JSON of another form.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any or origin is Literal:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inside:
            return None
        return from_json(next(member for member in inside if member is not NoneType), value, choose)
    if is_dataclass(kind):
        chosen = choose(kind, value)
        hints = type_hints(chosen)
        return chosen(**{key: from_json(hints[key], item, choose) for key, item in value.items() if key in hints})
    if origin is not None and issubclass(origin, Mapping):
        return {str(key): from_json(inside[1], item, choose) for key, item in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        items = [from_json(inside[0], item, choose) for item in value]
        return items if origin is list else tuple(items)
    expected: Any = {float: (int, float), Path: str}.get(kind, kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return Path(value) if kind is Path else value


@lru_cache(maxsize=128)
def type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
