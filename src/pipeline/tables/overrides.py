"""The keys of `every` that affect run hashes: with other values, finished runs are not reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config.knob import is_hashed
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


def describe_every_keys(planning: Planning, runs: Sequence[Run]) -> list[str]:
    """Return a line with the keys of `every` that affect run hashes, and the other keys."""
    hashed, others = [], []
    for key in planning.plan.table.every:
        if any(changes_hash(run, key) for run in runs):
            hashed.append(key)
        else:
            others.append(key)
    parts = []
    if hashed:
        parts.append(f"in run hashes: {', '.join(hashed)}")
    if others:
        parts.append(f"not in run hashes: {', '.join(others)}")
    if parts:
        return [f"every: {'; '.join(parts)}"]
    return []


def changes_hash(run: Run, key: str) -> bool:
    """Return True if a key affects the hash of a run.

    A group does, because its values are hashed. A RUN does, because it is a parent.
    """
    node: Any = run.config
    for name in key.split("."):
        if isinstance(node, dict):
            return True
        field = getattr(node, "__dataclass_fields__", {}).get(name)
        if field is None:
            return "." not in key  # a group without a field, such as recipe=
        if not is_hashed(field, node):
            return bool(field.metadata.get("run"))
        node = getattr(node, name)
    return True
