"""Stage data: an expert's training set, drawn from its sources, or the small world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import DataStage
from pipeline.data.mixture import build

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[DataStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """The data stage. Gives the counts that the card states."""
    config = run.config
    if config.expert.world is not None:
        from pipeline.data import sandbox

        counts = sandbox.write(work, config.expert.world)
    else:
        from pipeline.hub.lock import read_lock
        from pipeline.runs.manifest import read_manifest

        root = run.parents["data_root"].folder if "data_root" in run.parents else None
        # A data run that is a data_root wrote its benchmarks beside its training sets, and keeps them apart itself: the
        # sentences of a constructed world share their frames, so that n-grams say nothing about its items.
        vouched = root is not None and read_manifest(root) is not None and config.data.benchmarks is None
        counts = build(config, root, work, read_lock(run.runs_dir), vouched)
    tracker.summary(counts)
    return {"counts": counts}
