"""Runs in topological order, parents first, and why each unfinished one has to be computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from pipeline.runs.adopt import STAGES, equal_run
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run, parent_runs


def order_runs(targets: list[Run]) -> list[Run]:
    """All runs that the targets need, parents first, each once, otherwise in the given order."""
    graph: dict[str, list[str]] = {}
    runs: dict[str, Run] = {}

    def add_run(run: Run) -> None:
        if run.hash not in runs:
            runs[run.hash] = run
            parents = parent_runs(run.parents)
            graph[run.hash] = [parent.hash for parent in parents]
            for parent in parents:
                add_run(parent)

    for target in targets:
        add_run(target)
    return [runs[key] for key in TopologicalSorter(graph).static_order()]


def longest_paths(runs: Sequence[Run], seconds: Mapping[str, float]) -> dict[str, float]:
    """Run hash -> seconds on the longest path from the start of a run to the end; runs are given parents first."""
    paths: dict[str, float] = {}
    for run in reversed(runs):
        paths[run.hash] = paths.get(run.hash, 0.0) + seconds.get(run.hash, 0.0)
        for parent in parent_runs(run.parents):
            paths[parent.hash] = max(paths.get(parent.hash, 0.0), paths[run.hash])
    return paths


def reasons_unfinished(runs: list[Run]) -> dict[str, str]:
    """Run hash -> why it has to be computed, for runs given parents first: a run is unfinished if a parent is.

    Where a finished run may turn out to be equal, the reason says so: the run is then adopted, not computed.
    """
    reasons: dict[str, str] = {}
    maybe_equal: set[str] = set()
    for run in runs:
        unfinished_parents = [parent.name for parent in parent_runs(run.parents) if parent.hash in reasons]
        if reason := why_not_finished(run):
            reasons[run.hash] = reason
            if not run.config.redo and (equal := equal_run(run, maybe_equal)):
                maybe_equal.add(run.hash)
                if run.config.stage in STAGES:
                    when = ", known after its data run" if unfinished_parents else f" from {equal.name}"
                    reasons[run.hash] = f"{reason}; may be adopted{when}"
        elif unfinished_parents or run.config.redo:
            parent_reason = f"its parent {unfinished_parents[0]} is made first" if unfinished_parents else ""
            reasons[run.hash] = parent_reason or "redo=true"
    return reasons
