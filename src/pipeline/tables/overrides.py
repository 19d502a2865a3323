"""Which keys of `every` affect the hashes of runs: with other values, finished runs are not
reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config.knob import is_hashed
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


def describe_every_keys(planning: Planning, runs: Sequence[Run]) -> list[str]:
    """Describe in a line the keys of `every` that affect hashes, and those that do not."""
    settings = planning.plan.table.every
    hashed = {key: any(changes_hash(run, key) for run in runs) for key in settings}
    lines = []
    for changes, label in ((True, "in run hashes"), (False, "not in run hashes")):
        if changes in hashed.values():
            lines.append(f"{label}: {', '.join(key for key in settings if hashed[key] is changes)}")
    if lines:
        return [f"every: {'; '.join(lines)}"]
    return []


def changes_hash(run: Run, key: str) -> bool:
    """Whether a knob affects the hash of a run; a group does, by its values, and so does a RUN, as
    a parent.
    """
    node: Any = run.config
    for name in key.split("."):
        if isinstance(node, dict):
            return True
        field = getattr(node, "__dataclass_fields__", {}).get(name)
        if field is None:
            return "." not in key  # an option, such as recipe=, which is not a knob itself
        if not is_hashed(field, node):
            return bool(field.metadata.get("run"))
        node = getattr(node, name)
    return True
