"""Write docs/table.schema.json. Editors complete and check tables and studies with it.

    python scripts/make_schema.py     # a test compares the file with this output

Options, keys, bounds and meanings come from conf/ and pipeline/config. The schema leaves open what
only the program can know, such as axes and names of runs.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.explain import type_inside
from pipeline.config.manual import default_of, knob_comment
from pipeline.stages.rows import CONFIGS, RUN_STAGES
from pipeline.tables import schema, study, study_benchmarks, table_yaml

FILE = Path(__file__).parent.parent / "docs/table.schema.json"
FREE = {"type": "string", "pattern": r"\{"}  # a placeholder, {axis}
TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
STRING = {"type": "string"}
BOOLEAN = {"type": "boolean"}
OBJECT = {"type": "object"}
WORDS = {"$ref": "#/$defs/words"}
LIST_OR_ONE = {"type": ["string", "array"], "items": {"type": "string"}}
# All runs of a table share these keys, so a run cannot have its own.
SHARED_KEYS = ("stage", "launcher", "tracking", "runs_dir", "redo", "group")
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def knob(kind: type, item: Any) -> dict[str, Any]:
    """Return the schema of a key: its type and bounds, or a placeholder, and its meaning."""
    text = f"{knob_comment(kind, item)} (default: {default_of(item)})".strip()
    form: dict[str, Any] = {"description": text}
    value_type = type_inside(kind, item.name)
    if value_type in TYPES:
        value: dict[str, Any] = {"type": TYPES[value_type]}
        for bound, name in BOUNDS.items():
            if item.metadata.get(bound) is not None:
                value[name] = item.metadata[bound]
        if value_type is str and item.metadata.get("options"):
            value["enum"] = list(item.metadata["options"])
        form["anyOf"] = [value, FREE, {"type": "null"}, {"type": ["array", "object"]}]
    return form


def words() -> dict[str, Any]:
    """Return the schema of a run's keys: groups with their options, and dotted keys."""
    found: dict[str, Any] = {}
    for stage in RUN_STAGES:
        config = CONFIGS[stage]
        for group in config.groups:
            found[group] = group_form(group)
        for item in fields(config):
            kinds = kinds_inside(config, item.name)
            for kind in kinds:
                for inner in fields(kind):
                    if inner.name != "name":
                        found[f"{item.name}.{inner.name}"] = knob(kind, inner)
            if not kinds and item.name not in SHARED_KEYS:
                found[item.name] = knob(config, item)
    return dict(sorted(found.items()))


def group_form(group: str) -> dict[str, Any]:
    known = {"enum": conf.options(group)}
    other = {"type": ["string", "null", "object"]}
    return {"anyOf": [known, other], "description": f"{group}=OPTION"}


def kinds_inside(config: type, key: str) -> list[Any]:
    """Return the dataclasses whose fields are dotted keys below `key`."""
    if key == "merge":
        methods = dict.fromkeys(map(conf.method_of, conf.options("merge")))
        return [method for method in methods if method]
    inside = type_inside(config, key)
    if is_dataclass(inside):
        return [inside]
    return []


def table() -> dict[str, Any]:
    """Return the schema of a table. Its runs may have further keys, from mappings of axes."""
    cell_keys: dict[str, Any] = {key: {} for key in schema.CELL}
    side = {"type": ["object", "string", "null"], "properties": cell_keys}
    sides = mapping_to(side)
    stages = {"stage": {"enum": list(RUN_STAGES)}}
    run = {**WORDS, "type": ["object", "null"], "properties": stages}
    keys: dict[str, Any] = {"name": STRING, "title": STRING, "note": STRING, "published": {}}
    keys |= {"axes": OBJECT, "every": WORDS, "runs": mapping_to(run)}
    keys |= {"score": side, "columns": sides, "rows": sides}
    keys |= {"beside": LIST_OR_ONE, "compare": OBJECT, "primary": {"type": "array"}}
    keys |= {"family": LIST_OR_ONE, "baselines": OBJECT}
    keys |= {"controls": {"type": ["boolean", "array"]}, "defaults": LIST_OR_ONE}
    keys |= {"free_snapshots": BOOLEAN}
    return keys


def mapping_to(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


def study_form() -> dict[str, Any]:
    """Return the schema of a study."""
    base = {**STRING, "description": "a folder, hub:org/name, or an option of model="}
    made = {**STRING, "description": "a folder, whole or an adapter, a run, or hub:org/name"}
    trained_keys = {"run": STRING, "side": {"enum": list(study.SIDES)}}
    trained = {**WORDS, "type": "object", "properties": trained_keys}
    method_keys = {name: {"type": ["object", "null"]} for name in conf.options("merge")}
    methods = {"type": "object", "properties": method_keys}
    benchmarks = benchmark_forms()
    several = {"items": {"anyOf": benchmarks}, "type": "array"}
    keys: dict[str, Any] = {"name": STRING, "title": STRING, "note": STRING, "base": base}
    keys["experts"] = mapping_to({"anyOf": [made, trained]})
    keys["languages"] = LIST_OR_ONE
    keys["methods"] = {"anyOf": [LIST_OR_ONE, methods]}
    keys["benchmarks"] = {"anyOf": [several, *benchmarks]}
    keys |= {"controls": BOOLEAN, "every": WORDS}
    return keys


def benchmark_forms() -> list[dict[str, Any]]:
    """Return the forms of a benchmark: a name, own items, or a mapping by language."""
    keys = {"eval": STRING, "data_root": {"type": ["string", "null"]}}
    own_items = {"type": "object", "properties": keys, "required": [*keys]}
    own_items["additionalProperties"] = False
    by_language = {"type": "object", "maxProperties": 1}
    by_language["additionalProperties"] = mapping_to(STRING)
    return [{"enum": conf.options("eval")}, STRING, own_items, by_language]


def document() -> dict[str, Any]:
    """Return the schema of a file.

    A file with experts or benchmarks is a study, as in `parsed_yaml`. Any other file is a table.
    """
    tables, studies = table(), study_form()
    assert tables.keys() == set(table_yaml.KEYS)
    assert studies.keys() == set(study.KEYS)
    has_experts, has_benchmarks = {"required": ["experts"]}, {"required": ["benchmarks"]}
    study_rule = {"required": ["experts", *study_benchmarks.EXAMPLES], "properties": studies}
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= {"title": "A table or a study", "type": "object"}
    schema["if"] = {"anyOf": [has_experts, has_benchmarks]}
    schema["then"] = {**study_rule, "additionalProperties": False}
    schema["else"] = {"properties": tables, "additionalProperties": False}
    schema["$defs"] = {"words": {"properties": words()}}
    return schema


if __name__ == "__main__":
    compact = json.dumps(document(), ensure_ascii=False, separators=(",", ":"))
    FILE.write_text(compact + "\n", encoding="utf-8")
    print(FILE)
