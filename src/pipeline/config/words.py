"""Many stages from mappings of overrides: each choice of options is composed once per process, then values are set.

Composing takes tens of milliseconds, and a table's thousand runs differ in seeds and RUNs far more than in options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import conf
from pipeline.config.compose import compose_words, format_word
from pipeline.config.defaults import HARDWARE, left_open
from pipeline.config.explain import wrong_type_message
from pipeline.config.harness_tasks import spell_out_tasks
from pipeline.config.knob import check, field_of_key, refuse_number
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError

T = TypeVar("T")
_composed: dict[Any, tuple[dict[str, Any], Stage]] = {}  # stage, groups, keys of values -> values, and the stage
_parts: dict[Any, Any] = {}  # stage, option, keys of values below its group -> the part of the stage
_converted: dict[Any, Any] = {}


def stage_of(words: Mapping[str, Any]) -> Stage:
    """The stage that `compose` returns for these overrides, key -> value; values are those of YAML.

    Raises:
        PipelineError: as compose does.
    """
    words = {key: value for key, value in {**words, **left_open(words)}.items() if key != HARDWARE}
    groups, words = conf.groups(), spell_out_tasks(words, conf.options("eval"))
    if conf.is_checkpoint(str(words.get("model", ""))):
        words = {**words, "model": "trained", "model.path": words["model"]}
    options = {key: value for key, value in words.items() if key == "stage" or key in groups}
    mappings = {key: value for key, value in words.items() if isinstance(value, dict) and key not in options}
    values = {key: value for key, value in words.items() if key not in options and key not in mappings}
    listed = {group: conf.values_of(str(words.get("stage")), group, str(option)) for group, option in options.items()}
    inlined = tuple(group for group, knobs in listed.items() if knobs is not None)
    later = {key: value for group in inlined for key, value in (listed[group] or {}).items() if key not in values}
    options = {group: option for group, option in options.items() if group not in inlined}
    composed_options = [
        f"{group}={option}" for group, option in options.items() if not conf.sets_one_part(group, str(option))
    ]
    place = (str(conf.folders()), *composed_options, *options, inlined, tuple(values))
    parts = {
        group: (
            str(conf.folders()),
            words.get("stage"),
            group,
            option,
            *(key for key in values if key.startswith(f"{group}.")),
        )
        for group, option in options.items()
        if f"{group}={option}" not in composed_options
    }
    for group, part in parts.items() if place in _composed else ():
        if part not in _parts and (
            loaded := load_option(getattr(_composed[place][1], group), str(words.get("stage")), part)
        ):
            _parts[part] = loaded
    if place not in _composed or not _parts.keys() >= set(parts.values()):
        stage = compose_words(as_words({**options, **values}), inlined)
        _composed[place] = values, stage
        _parts.update({part: getattr(stage, group) for group, part in parts.items()})
    composed_values, stage = _composed[place]
    changed = {
        key: value for key, value in values.items() if value != composed_values[key] or key.partition(".")[0] in parts
    }
    changed = later | {key.lstrip("+"): value for key, value in changed.items()}
    if any(field_of_key(stage, key) is None for key in changed):  # below a dict, such as expert.sources.own.file
        return compose_words(as_words(words))
    if any(
        field_of_key(stage, key) is None or reduce(getattr, key.split("."), stage) not in ({}, None) for key in mappings
    ):
        return compose_words(as_words(words))  # a mapping is merged into the existing one
    changed |= mappings
    return with_values(replace(stage, **{group: _parts[part] for group, part in parts.items()}), changed)


def load_option(sample: Any, stage: str, part: tuple[Any, ...]) -> Any:
    """The part of a stage that an option defines, read from its file without Hydra, ten times as fast; None where it
    has to be composed. `sample`: the part of another option, for its type."""
    _, _, group, option, *_ = part
    path = conf.standalone_file(stage, group, str(option))
    if path is None or not is_dataclass(sample):
        return None
    try:
        node = OmegaConf.merge(OmegaConf.structured(type(sample)), OmegaConf.load(path))
        part_config = None if OmegaConf.missing_keys(node) else OmegaConf.to_object(node)
    except OmegaConfBaseException:
        return None
    if part_config is not None:
        check(part_config, f"{group}.")
    return part_config


def as_words(words: Mapping[str, Any]) -> list[str]:
    return [f"{key}={format_word(value)}" for key, value in words.items()]


def with_values(config: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """A copy with dotted keys set, their types and bounds checked as on the command line.

    prefix: of the keys, for errors.

    Raises:
        PipelineError: an unknown key, or a value of another type or out of its bounds.
    """
    for key, value in values.items():
        config = _set_value(config, key.split("."), value, prefix + key)
    if values:
        check(config, prefix)
    return config


def _set_value(config: Any, path: list[str], value: Any, key: str) -> Any:
    name, *inner_path = path
    inner = getattr(config, name, None)
    if inner_path and is_dataclass(inner):
        return replace(config, **{name: _set_value(inner, inner_path, value, key)})
    if inner_path or name not in getattr(config, "__dataclass_fields__", {}):
        raise PipelineError(f"{key} is not a knob: leave it out")
    place = (type(config), name, repr(value))
    if place not in _converted:
        _converted[place] = convert_value(type(config), name, value, key)
    return replace(config, **{name: _converted[place]})


def convert_value(kind: type, name: str, value: Any, key: str) -> Any:
    """A value converted to the type of a dataclass' field: an integer to a float, and so on."""
    hint = next(item.type for item in fields(kind) if item.name == name)
    if is_plain(hint, value):
        return value
    refuse_number(key, hint, value)
    conf.refuse_interpolation(key, str(value))
    node = OmegaConf.structured(kind)
    try:
        OmegaConf.update(node, name, value)
    except OmegaConfBaseException as error:
        raise PipelineError(wrong_type_message(key, str(error)) or f"{key}: {str(error).splitlines()[0]}") from error
    child = node._get_node(name)
    return OmegaConf.to_object(child) if OmegaConf.is_config(child) else child._value()


def is_plain(hint: Any, value: Any) -> bool:
    """Whether a value has the type of the field and needs no conversion, as most RUNs of a table."""
    if type(value) is list:
        return hint == "list[str]" and all(is_plain("str", item) for item in value)
    special = type(value) is str and ("${" in value or value == "???")
    return not special and hint in (type(value).__name__, f"{type(value).__name__} | None")
