"""Whether the tensors of two models can be combined by name, decided from their headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import PipelineError
from pipeline.models.arithmetic import arithmetic_settings
from pipeline.models.checkpoint import TensorInfo


class Headers(Protocol):
    """What is known of a model before its weights are read, also for an adapter on its base."""

    folder: Path

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def infos(self) -> dict[str, TensorInfo]: ...
    @property
    def tied_head(self) -> bool: ...


def same_architecture(
    first: Headers,
    second: Headers,
    keys: tuple[str, str] = ("the first", "the second"),
    dtypes: bool = True,
) -> None:
    """Raise PipelineError, naming what differs first, unless the tensors of both can be combined by name.

    That is: the same arithmetic by config.json (`models/arithmetic.py`), and tensors of the same names and shapes.
    `keys` are the knobs to name in the sentence. `dtypes=False` accepts tensors of other precision (a base
    in bfloat16 under experts in float32).
    """
    for a, b in find_differences(first, second, dtypes):
        raise PipelineError(
            f"{keys[1]}: {second.folder} has {b}, {keys[0]}: {first.folder} has {a}; they must be alike"
        )


def find_differences(first: Headers, second: Headers, dtypes: bool) -> Iterator[tuple[str, str]]:
    """For each difference, a description of the first model's value and of the second's."""
    headers = (first, second)
    depths = [header.config.get("num_hidden_layers") for header in headers]
    if depths[0] != depths[1]:
        yield f"{depths[0]} layers", f"{depths[1]} layers"
    first_settings, second_settings = arithmetic_settings(first.config), arithmetic_settings(second.config)
    for key in ("model_type", *sorted(first_settings.keys() | second_settings.keys())):
        a, b = first_settings.get(key), second_settings.get(key)
        if key == "architectures" and (a is None or b is None):
            continue  # no class is named: model_type decides
        if a != b:
            yield describe_setting(key, a, b), describe_setting(key, b, a)
    if first.tied_head != second.tied_head:
        a_text, b_text = ("a tied head" if header.tied_head else "a head of its own" for header in headers)
        yield a_text, b_text
    for name in sorted(first.infos.keys() | second.infos.keys()):
        if name not in first.infos or name not in second.infos:
            a_text, b_text = (f"{'a' if name in header.infos else 'no'} {name}" for header in headers)
            yield a_text, b_text
            continue
        x, y = first.infos[name], second.infos[name]
        if x.shape != y.shape:
            yield f"{name} of shape {list(x.shape)}", f"{name} of shape {list(y.shape)}"
        if dtypes and x.dtype != y.dtype:
            yield f"{name} as {x.dtype}", f"{name} as {y.dtype}"


def describe_setting(key: str, value: Any, compared: Any) -> str:
    """A setting and its value; as JSON where the other value prints the same: the string "1e-06" and the number
    1e-06."""
    if value is None:
        return f"no {key}"
    return f"{key} {json.dumps(value) if str(value) == str(compared) else value}"
