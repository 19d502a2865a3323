"""Which words of `every` are of the hashes of runs: with others, what was made is not found again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from pipeline.config.knob import is_hashed
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


def told_every(planning: Planning) -> list[str]:
    """The words of `every`, those that change hashes and those that do not; what the command line's do not reach."""
    runs = order_runs(planning.targets())
    settings = planning.plan.table.every
    of = {key: any(changes_hash(run, key) for run in runs) for key in settings}
    lines = [
        f"{label}: {', '.join(key for key in settings if of[key] is changes)}"
        for changes, label in ((True, "of the hashes"), (False, "not of the hashes"))
        if changes in of.values()
    ]
    recorded_only = [
        f"every.{key} does not reach: {', '.join(names)}, which say their own"
        for key, names in planning.plan.own.items()
    ]
    return [*([f"every: {'; '.join(lines)}"] if lines else []), *recorded_only]


def changes_hash(run: Run, key: str) -> bool:
    """Whether a knob enters the hash of a run; a group does, by what it sets, and so does a RUN, as a parent."""
    node: Any = run.config
    for name in key.split("."):
        if isinstance(node, dict):
            return True
        field = next((item for item in fields(node) if item.name == name), None) if is_dataclass(node) else None
        if field is None:
            return "." not in key  # an option, such as recipe=, that is no knob itself
        if not is_hashed(field, node):
            return bool(field.metadata.get("run"))
        node = getattr(node, name)
    return True
