"""Many stages from mappings of words: each choice of options is composed once a process, the values are set after.

A compose takes tens of milliseconds, and a table's thousand runs differ in seeds and RUNs far more than in options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import conf
from pipeline.config.compose import compose
from pipeline.config.explain import of_another_type
from pipeline.config.knob import check
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError

T = TypeVar("T")
_composed: dict[Any, tuple[dict[str, Any], Stage]] = {}  # stage, groups, keys of values -> values, and the stage
_parts: dict[Any, Any] = {}  # stage, option, keys of values below its group -> the part of the stage
_converted: dict[Any, Any] = {}


def stage_of(words: Mapping[str, Any]) -> Stage:
    """The stage that `compose` gives for these words, a key=value each; values are those of YAML.

    Raises:
        PipelineError: as compose does.
    """
    groups = conf.groups()
    if conf.is_checkpoint(str(words.get("model", ""))):
        words = {**words, "model": "trained", "model.path": words["model"]}
    chosen = {key: value for key, value in words.items() if key == "stage" or key in groups}
    mappings = {key: value for key, value in words.items() if isinstance(value, dict) and key not in chosen}
    values = {key: value for key, value in words.items() if key not in chosen and key not in mappings}
    listed = {group: conf.values_of(str(words.get("stage")), group, str(option)) for group, option in chosen.items()}
    without = tuple(group for group, found in listed.items() if found is not None)
    later = {key: value for group in without for key, value in (listed[group] or {}).items() if key not in values}
    chosen = {group: option for group, option in chosen.items() if group not in without}
    whole = [f"{group}={option}" for group, option in chosen.items() if not conf.alone(group, str(option))]
    place = (str(conf.folders()), *whole, *chosen, without, tuple(values))
    parts = {
        group: (
            str(conf.folders()),
            words.get("stage"),
            group,
            option,
            *(key for key in values if key.startswith(f"{group}.")),
        )
        for group, option in chosen.items()
        if f"{group}={option}" not in whole
    }
    for group, part in parts.items() if place in _composed else ():
        if part not in _parts and (
            alone := of_option(getattr(_composed[place][1], group), str(words.get("stage")), part)
        ):
            _parts[part] = alone
    if place not in _composed or not _parts.keys() >= set(parts.values()):
        stage = compose(as_words({**chosen, **values}), without)
        _composed[place] = values, stage
        _parts.update({part: getattr(stage, group) for group, part in parts.items()})
    before, stage = _composed[place]
    changed = {key: value for key, value in values.items() if value != before[key] or key.partition(".")[0] in parts}
    changed = later | {key.lstrip("+"): value for key, value in changed.items()}
    if any(not settable(stage, key) for key in changed):  # below a dict, such as expert.sources.own.file
        return compose(as_words(words))
    if any(not settable(stage, key) or reduce(getattr, key.split("."), stage) != {} for key in mappings):
        return compose(as_words(words))  # a mapping is laid over the one that is there
    changed |= mappings
    return with_values(replace(stage, **{group: _parts[part] for group, part in parts.items()}), changed)


def of_option(like: Any, stage: str, part: tuple[Any, ...]) -> Any:
    """The part of a stage that an option brings, read from its file alone, `like` being that of another option; None
    where only composing tells. A tenth of the time."""
    _, _, group, option, *_ = part
    path = conf.plain(stage, group, str(option))
    if path is None or not is_dataclass(like):
        return None
    try:
        node = OmegaConf.merge(OmegaConf.structured(type(like)), OmegaConf.load(path))
        found = None if OmegaConf.missing_keys(node) else OmegaConf.to_object(node)
    except OmegaConfBaseException:
        return None
    if found is not None:
        check(found, f"{group}.")
    return found


def as_words(words: Mapping[str, Any]) -> list[str]:
    return [f"{key}={word(value)}" for key, value in words.items()]


def settable(config: Any, key: str) -> bool:
    """Whether a dotted key leads through dataclasses alone."""
    *path, last = key.split(".")
    for name in path:
        config = getattr(config, name, None)
    return is_dataclass(config) and last in config.__dataclass_fields__


def with_values(config: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """A copy with dotted keys set, their types and bounds checked as on the command line.

    prefix: of the keys as they were typed.

    Raises:
        PipelineError: a key that is not there, or a value of another type or out of its bounds.
    """
    for key, value in values.items():
        config = _put(config, key.split("."), value, prefix + key)
    if values:
        check(config, prefix)
    return config


def _put(config: Any, path: list[str], value: Any, key: str) -> Any:
    name, *rest = path
    inner = getattr(config, name, None)
    if rest and is_dataclass(inner):
        return replace(config, **{name: _put(inner, rest, value, key)})
    if rest or name not in getattr(config, "__dataclass_fields__", {}):
        raise PipelineError(f"{key} is no knob: leave it out")
    place = (type(config), name, repr(value))
    if place not in _converted:
        _converted[place] = converted(type(config), name, value, key)
    return replace(config, **{name: _converted[place]})


def converted(kind: type, name: str, value: Any, key: str) -> Any:
    """A value as this field of a dataclass holds it: an integer as a float where one is wanted, and so on."""
    if is_plain(next(one.type for one in fields(kind) if one.name == name), value):
        return value
    node = OmegaConf.structured(kind)
    try:
        OmegaConf.update(node, name, value)
    except OmegaConfBaseException as error:
        raise PipelineError(of_another_type(key, str(error)) or f"{key}: {str(error).splitlines()[0]}") from error
    child = node._get_node(name)
    return OmegaConf.to_object(child) if OmegaConf.is_config(child) else child._value()


def is_plain(told: Any, value: Any) -> bool:
    """Whether a value is of the field's own type, which nothing converts: most of a table's are RUNs."""
    if type(value) is list:
        return told == "list[str]" and all(is_plain("str", one) for one in value)
    special = type(value) is str and ("${" in value or value == "???")
    return not special and told in (type(value).__name__, f"{type(value).__name__} | None")


def word(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if isinstance(value, list):
        return "[" + ",".join(map(word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]*", value):
        return "'" + value.replace("'", r"\'") + "'"
    return "null" if value is None else str(value)
