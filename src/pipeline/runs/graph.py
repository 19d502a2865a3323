"""Runs in topological order, parents first, and why each unfinished one has to be computed."""

from __future__ import annotations

from graphlib import TopologicalSorter

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


def reasons_unfinished(runs: list[Run]) -> dict[str, str]:
    """Run hash -> why it has to be computed, for runs given parents first: a run is unfinished if a parent is."""
    reasons: dict[str, str] = {}
    for run in runs:
        unfinished_parents = [parent.name for parent in parent_runs(run.parents) if parent.hash in reasons]
        if reason := why_not_finished(run):
            reasons[run.hash] = reason
        elif unfinished_parents or run.config.redo:
            parent_reason = f"its parent {unfinished_parents[0]} is made first" if unfinished_parents else ""
            reasons[run.hash] = parent_reason or "redo=true"
    return reasons
