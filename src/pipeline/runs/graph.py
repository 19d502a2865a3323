"""Runs in order: parents are the graph, and what is finished is skipped."""

from __future__ import annotations

from graphlib import TopologicalSorter

from pipeline.runs.adopt import STAGES, equal_run
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run, runs_behind


def ordered(targets: list[Run]) -> list[Run]:
    """All runs that the targets need, parents first, each once, otherwise in the order asked for."""
    graph: dict[str, list[str]] = {}
    runs: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.hash not in runs:
            runs[run.hash] = run
            needed_runs = runs_behind(run.parents)
            graph[run.hash] = [parent.hash for parent in needed_runs]
            for one in needed_runs:
                add(one)

    for target in targets:
        add(target)
    return [runs[key] for key in TopologicalSorter(graph).static_order()]


def unfinished(runs: list[Run]) -> dict[str, str]:
    """run hash -> why it has to be made, of runs in order: a run is as unfinished as its parents are.

    Where a finished run may turn out to be equal, the reason says so: it is adopted when it is, not computed.
    """
    reasons: dict[str, str] = {}
    maybe: set[str] = set()
    for run in runs:
        waiting = [one.name for one in runs_behind(run.parents) if one.hash in reasons]
        if reason := why_not_finished(run):
            reasons[run.hash] = reason
            if not run.config.redo and (equal := equal_run(run, maybe)):
                maybe.add(run.hash)
                if run.config.stage in STAGES:
                    when = ", known after its data run" if waiting else f" from {equal.name}"
                    reasons[run.hash] = f"{reason}; may be adopted{when}"
        elif waiting or run.config.redo:
            reasons[run.hash] = f"its parent {waiting[0]} is made first" if waiting else "redo=true"
    return reasons
