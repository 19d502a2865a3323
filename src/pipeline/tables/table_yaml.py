"""The YAML of a table as settings.

The tables in its `defaults` are merged in. Nested keys become dotted keys.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import suggest
from pipeline.files import check_aliases, readable_yaml
from pipeline.tables.study import expand_study
from pipeline.tables.words import Words, as_list, as_mapping, table_error

KEYS = (
    "name",
    "title",
    "note",
    "published",
    "axes",
    "every",
    "runs",
    "score",
    "columns",
    "rows",
    "beside",
    "compare",
    "primary",
    "family",
    "baselines",
    "controls",
    "defaults",
    "free_snapshots",
)
SECTIONS = ("axes", "every", "runs", "score", "columns", "rows", "compare")
OWN = ("primary", "family", "baselines")  # not inherited
INHERITED = ("axes", "every", "runs")  # entry by entry; other keys as a whole
RUN_KEYS = frozenset(
    {
        "checkpoint",
        "checkpoints",
        "model.path",
        "merge.math",
        "merge.language",
        "merge.experts",
        "merge.expert",
        "merge.base",
        "base",
        "eval.base",
        "data_root",
        "data.benchmarks",
    }
)

Find = Callable[[str], tuple[str, str]]  # name of a table -> its text and its file


def merge_inherited(text: str, file: str, find: Find, above: tuple[str, ...]) -> Words:
    """Merge the table's settings over the settings of the tables in its `defaults`.

    Args:
        text: The table's YAML.
        file: The name of its file, for errors.
        find: Finds a table by its name.
        above: The tables whose `defaults` lead to this one.
    """
    settings = parsed_yaml(text, file)
    for key in settings:
        if key not in KEYS:
            raise table_error(file, "", f"unknown key {key}: {suggest(key, KEYS)}")
    merged: Words = {}
    for name in as_list(settings.pop("defaults", None) or []):
        if name == "_self_":
            continue
        if name in above:
            raise table_error(file, "", f"defaults: {name} starts from itself")
        merge_words(merged, merge_inherited(*find(str(name)), find, (*above, name)), file)
    for key in OWN:
        merged.pop(key, None)
    merge_words(merged, settings, file)
    return merged


def merge_words(under: Words, over: Words, file: str) -> None:
    """Override one table's settings by another's, in place."""
    for key, value in over.items():
        if key not in INHERITED:
            under[key] = value
            continue
        merged = as_mapping(file, key, under.get(key))
        for name, entry in as_mapping(file, key, value).items():
            if entry is None and name in merged:
                del merged[name]
            else:
                merged[name] = entry
        under[key] = merged


def parsed_yaml(text: str, file: str) -> Words:
    """Return the mapping at the root of YAML text.

    Raises:
        PipelineError: For other content, or a repeated key.
    """
    try:
        with readable_yaml(file):
            content = deepcopy(cached_yaml(text))
    except OmegaConfBaseException as error:
        raise table_error(file, "", " ".join(str(error).split())) from error
    if not isinstance(content, dict):
        raise table_error(file, "", f"a table is a mapping with {', '.join(KEYS[:9])}, not a list")
    settings = {str(key): value for key, value in content.items()}
    if {"experts", "benchmarks"} & settings.keys():
        settings = expand_study(settings, file)
    for key in ("every", "score"):
        if key in settings:
            settings[key] = dotted(settings[key], file, key)
    for key in ("runs", "columns", "rows"):
        if isinstance(settings.get(key), dict):
            entries = {}
            for name, value in settings[key].items():
                entries[name] = dotted(value, file, f"{key}: {name}")
            settings[key] = entries
    return settings


def dotted(settings: Any, file: str, where: str) -> Any:
    """Return settings with dotted keys instead of nested ones.

    sft: {steps: 8} is sft.steps: 8, and merge: {name: ties, density: 0.2} is merge: ties,
    merge.density: 0.2. A RUN may be a mapping, and so may the value of a key with a dot.

    Raises:
        PipelineError: For a key in both forms.
    """
    if not isinstance(settings, dict):
        return settings
    flat: Words = {}
    for key, value in as_mapping(file, where, settings).items():
        nested: Words = {key: value}
        if key == "by":
            nested = {key: dotted(value, file, f"{where}, by")}
        elif is_nested(key, value):
            nested = {}
            for name, item in value.items():
                nested[key if name == "name" else f"{key}.{name}"] = item
        for name, item in nested.items():
            if name in flat:
                raise table_error(
                    file, where, f"{name} is given twice, nested and with a dot. Give it once."
                )
            flat[name] = item
    return flat


def is_nested(key: str, value: Any) -> bool:
    """Return True if a mapping is a group of keys, and not a value."""
    if not isinstance(value, dict) or "." in key or key in RUN_KEYS:
        return False
    return [*value.values()] != [None]


@lru_cache
def cached_yaml(text: str) -> Any:
    """Parse YAML text once. For some tables, a plan reads the same text dozens of times."""
    return OmegaConf.to_container(OmegaConf.create(check_aliases(text)))
