"""Runs in order: parents are the graph, what is finished is skipped, and history says how long the rest takes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from graphlib import TopologicalSorter

from pipeline.runs.make import why_not_finished
from pipeline.runs.manifest import Manifest
from pipeline.runs.run import Run, runs_behind
from pipeline.study.stages import RUN_STAGES


def ordered(targets: list[Run]) -> list[Run]:
    """All runs that the targets need, parents first, each once, otherwise in the order asked for."""
    graph: dict[str, list[str]] = {}
    runs: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.hash not in runs:
            runs[run.hash] = run
            ours = runs_behind(run.parents)
            graph[run.hash] = [parent.hash for parent in ours]
            for one in ours:
                add(one)

    for target in targets:
        add(target)
    return [runs[key] for key in TopologicalSorter(graph).static_order()]


class History:
    """What finished runs took: seconds by stage, and by stage and the first two words of their names."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self.seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self.medians: dict[tuple[str, ...], float] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        for kind in ((manifest.stage,), (manifest.stage, *manifest.name.split("-")[:2])):
            self.seconds[kind].append(manifest.seconds)
            self.medians.pop(kind, None)

    def predict(self, run: Run) -> float:
        """Seconds: the median of finished runs like it, else of its stage, else a first guess."""
        stage = run.config.stage
        kinds = ((stage, *run.label.split("-")[:2]), (stage,))
        kind = next((kind for kind in kinds if kind in self.seconds), None)
        if kind is None:
            return RUN_STAGES[stage].seconds
        if kind not in self.medians:
            self.medians[kind] = statistics.median(self.seconds[kind])
        return self.medians[kind]


def unfinished(runs: list[Run]) -> dict[str, str]:
    """run hash -> why it has to be made, of runs in order: a run is as unfinished as its parents are."""
    reasons: dict[str, str] = {}
    for run in runs:
        waiting = [one.name for one in runs_behind(run.parents) if one.hash in reasons]
        if reason := why_not_finished(run):
            reasons[run.hash] = reason
        elif waiting or run.config.redo:
            reasons[run.hash] = f"its parent {waiting[0]} is made first" if waiting else "redo=true"
    return reasons
