"""Write docs/table.schema.json, with which editors complete and check tables and studies.

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
from pipeline.tables import schema, study, table_yaml

FILE = Path(__file__).parent.parent / "docs/table.schema.json"
FREE = {"type": "string", "pattern": r"\{"}  # a placeholder, {axis}
TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
NAMES = {"type": "object"}
WORDS = {"$ref": "#/$defs/words"}
LIST_OR_ONE = {"type": ["string", "array"], "items": {"type": "string"}}
ONE_FOR_ALL = (
    "stage",
    "launcher",
    "tracking",
    "runs_dir",
    "redo",
    "group",
)  # not of a run in a table


def knob(kind: type, item: Any) -> dict[str, Any]:
    """Return the schema of a key: its type and bounds, or a placeholder, and its meaning."""
    found, meta = type_inside(kind, item.name), item.metadata
    said: dict[str, Any] = {}
    if found in TYPES:
        said = {"type": TYPES[found]}
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    said |= {
        name: meta[bound] for bound, name in bounds.items() if meta.get(bound) is not None and said
    }
    if meta.get("options") and found is str:
        said |= {"enum": list(meta["options"])}
    choices = []
    if said:
        choices = [said, FREE, {"type": "null"}, {"type": ["array", "object"]}]
    text = f"{knob_comment(kind, item)} (default: {default_of(item)})".strip()
    return {"description": text, **({"anyOf": choices} if choices else {})}


def words() -> dict[str, Any]:
    """Return the schema of a run's keys: groups with their options, and dotted keys."""
    found: dict[str, Any] = {}
    for stage in RUN_STAGES:
        for group in CONFIGS[stage].groups:
            known = {"enum": conf.options(group)}
            found[group] = {
                "anyOf": [known, {"type": ["string", "null", "object"]}],
                "description": f"{group}=OPTION",
            }
        for item in fields(CONFIGS[stage]):
            inside = type_inside(CONFIGS[stage], item.name)
            methods = filter(None, dict.fromkeys(map(conf.method_of, conf.options("merge"))))
            if item.name == "merge":
                kinds = [*methods]
            else:
                kinds = [inside] if is_dataclass(inside) else []
            for kind in kinds:
                for one in fields(kind):
                    if one.name != "name":
                        found[f"{item.name}.{one.name}"] = knob(kind, one)
            if not kinds and item.name not in ONE_FOR_ALL:
                found[item.name] = knob(CONFIGS[stage], item)
    return dict(sorted(found.items()))


def table() -> dict[str, Any]:
    """Return the schema of a table. Its runs may have further keys, from mappings of axes."""
    side = {"type": ["object", "string", "null"], "properties": {key: {} for key in schema.CELL}}
    sides = {"type": "object", "additionalProperties": side}
    run = {**WORDS, "type": ["object", "null"], "properties": {"stage": {"enum": list(RUN_STAGES)}}}
    return {
        "name": {"type": "string"},
        "title": {"type": "string"},
        "note": {"type": "string"},
        "published": {},
        "axes": NAMES,
        "every": WORDS,
        "runs": {"type": "object", "additionalProperties": run},
        "score": side,
        "columns": sides,
        "rows": sides,
        "beside": LIST_OR_ONE,
        "compare": NAMES,
        "primary": {"type": "array"},
        "family": LIST_OR_ONE,
        "baselines": {"type": "object"},
        "controls": {"type": ["boolean", "array"]},
        "defaults": LIST_OR_ONE,
        "free_snapshots": {"type": "boolean"},
    }


def study_form() -> dict[str, Any]:
    """Return the schema of a study."""
    of_side = {"run": {"type": "string"}, "side": {"enum": list(study.SIDES)}}
    made = {
        "type": "string",
        "description": "a folder, whole or an adapter, a run, or hub:org/name",
    }
    experts = {"anyOf": [made, {**WORDS, "type": "object", "properties": of_side}]}
    benchmark = {"eval": {"type": "string"}, "data_root": {"type": ["string", "null"]}}
    own_items = {
        "type": "object",
        "properties": benchmark,
        "required": [*benchmark],
        "additionalProperties": False,
    }
    by_language = {
        "type": "object",
        "maxProperties": 1,
        "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    benchmarks = [{"enum": conf.options("eval")}, {"type": "string"}, own_items, by_language]
    methods = {name: {"type": ["object", "null"]} for name in conf.options("merge")}
    return {
        "name": {"type": "string"},
        "title": {"type": "string"},
        "note": {"type": "string"},
        "base": {"type": "string", "description": "a folder, hub:org/name, or an option of model="},
        "experts": {"type": "object", "additionalProperties": experts},
        "languages": LIST_OR_ONE,
        "methods": {"anyOf": [LIST_OR_ONE, {"type": "object", "properties": methods}]},
        "benchmarks": {"anyOf": [{"items": {"anyOf": benchmarks}, "type": "array"}, *benchmarks]},
        "controls": {"type": "boolean"},
        "every": WORDS,
    }


def document() -> dict[str, Any]:
    """Return the schema of a file.

    A file with experts or benchmarks is a study, as in `parsed_yaml`. Any other file is a table.
    """
    tables, studies = table(), study_form()
    assert (tables.keys(), studies.keys()) == (set(table_yaml.KEYS), set(study.KEYS))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A table or a study",
        "type": "object",
        "if": {"anyOf": [{"required": ["experts"]}, {"required": ["benchmarks"]}]},
        "then": {
            "required": ["experts", *study.EXAMPLES],
            "properties": studies,
            "additionalProperties": False,
        },
        "else": {"properties": tables, "additionalProperties": False},
        "$defs": {"words": {"properties": words()}},
    }


if __name__ == "__main__":
    FILE.write_text(
        json.dumps(document(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(FILE)
