"""Runs in topological order, parents first, and the reasons why runs have to be computed."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import TopologicalSorter

from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run, parent_runs


def order_runs(targets: list[Run]) -> list[Run]:
    """Return all runs that the targets need, parents first, otherwise in the given order."""
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


def reasons_unfinished(runs: list[Run], targets: Iterable[Run] = ()) -> dict[str, str]:
    """Return, by run hash, why runs have to be computed.

    A run is unfinished if a parent is. If a model was deleted after it was scored, its run is
    computed again only if another run needs it, or if it is a target.

    In `runs`, parents come first.
    """
    reasons: dict[str, str] = {}
    deleted: set[str] = set()  # runs without files, and whose unfinished parents have no files
    children: dict[str, list[str]] = {}
    for run in runs:
        unfinished, remade = [], []
        for parent in parent_runs(run.parents):
            children.setdefault(parent.hash, []).append(run.hash)
            if parent.hash in reasons:
                unfinished.append(parent)
                if parent.hash not in deleted:
                    remade.append(parent)
        needed = unfinished if run.config.stage in ("sft", "cpt") else remade
        reason = why_not_finished(run)
        if reason:
            reasons[run.hash] = reason
            if not remade and not run.config.redo and not run.folder.exists():
                deleted.add(run.hash)
        elif needed:
            reasons[run.hash] = f"its parent {needed[0].name} is made first"
        elif run.config.redo:
            reasons[run.hash] = "redo=true"
    may_stay_deleted = deleted - {run.hash for run in targets}
    for run in reversed(runs):
        below = children.get(run.hash, [])
        if run.hash in may_stay_deleted and below and not any(child in reasons for child in below):
            del reasons[run.hash]
    return reasons
