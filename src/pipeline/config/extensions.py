"""Stages, merge methods and backends outside of the core.

They are found by the entry points of installed packages, and of extras/ in this package. A package
is imported when one of its names is used.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pipeline.errors import PipelineError

MERGE_METHODS = "cross_lingual_merging.merge_methods"
STAGES = "cross_lingual_merging.stages"
EXPORTS = "cross_lingual_merging.exports"
BACKENDS = "cross_lingual_merging.backends"  # modules with versions() and backend(Eval, folder)
OURS = "cross-lingual-merging"


@cache
def extensions(group: str) -> dict[str, EntryPoint]:
    """Return name -> entry point, without importing any."""
    return {entry.name: entry for entry in entry_points(group=group)}


def outside_core(group: str, name: str) -> Any:
    """Return the object of the entry point with this name.

    Raises:
        PipelineError: no installed package has it.
    """
    entry = extensions(group).get(name)
    if entry is None:
        raise PipelineError(
            f"{name} of {group} is not declared by any installed package. Install {OURS} again."
        )
    return entry.load()


def package_of(group: str, name: str) -> str:
    """Return name and version of the package that declares an extension; empty for our own."""
    dist = extensions(group)[name].dist
    if dist is None or dist.name == OURS:
        return ""
    return f"{dist.name} {dist.version}"
