"""The number of steps of a training, from the size of its set, before either has run.

Without `expected` numbers are certain, and decide where snapshots lie; with it they are for
estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.stages import DataStage, TrainStage
from pipeline.config.training import Sft
from pipeline.data.small_world import TRAINING
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, parent_runs
from pipeline.stages.lengths import is_here, rows_of
from pipeline.train.steps import available_steps


def training_rows(data: Run[DataStage], expected: bool = False) -> int | None:
    """Training rows of a data run: those it has, else those requested; None where no number is
    requested.

    A set with fewer rows than requested is an error when it is drawn, unless data.allow_fewer is
    set: then the number is unknown beforehand. expected: then, those in its files, at most the
    requested size; without files, that size.
    """
    manifest = read_manifest(data.folder)
    if manifest:
        return int(manifest.facts["counts"]["train"])
    config = data.config
    if config.expert.union:
        return sum_known([training_rows(parent, expected) for parent in parent_runs(data.parents)])
    size = config.data.size or config.expert.size
    if not expected or (size and not config.data.allow_fewer):
        if config.data.allow_fewer:
            return None
        return size
    available = available_rows(data)
    if available is None:
        return size
    return max(0, min(available - config.data.validation, size or available))


def available_rows(data: Run[DataStage]) -> int | None:
    """Rows of the sources of a data run, in their files below data_root (written or planned); None
    where a number is unknown, as on the Hub.
    """
    root, sources = data.parents.get("data_root"), data.config.expert.sources.values()
    if sources and all(map(is_here, sources)):
        counts = [rows_of(Path(source.url or ""), source) for source in sources]
    elif root is None or not sources:
        return None
    elif isinstance(root, Run) and not root.folder.is_dir():
        is_world = root.config.expert.world is not None
        counts = [TRAINING.get(source.file) if is_world else None for source in sources]
    else:
        counts = [rows_of(root.folder / source.file, source) for source in sources]
    return sum_known(counts)


def sum_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum of numbers; None if one is unknown."""
    if None in counts:
        return None
    return sum(count or 0 for count in counts)


def rows_of_sets(sft: Sft, data: Run[DataStage], expected: bool = False) -> dict[str, int]:
    """Rows of the sets on which a training takes turns, as `training_rows` counts them: side ->
    rows, or all -> rows of its one set; {} where those of one are unknown.
    """
    alternating = sft.method == "simultaneous"
    if alternating:
        sets = {part.config.expert.side: part for part in parent_runs(data.parents)}
    else:
        sets = {"all": data}
    rows = {}
    for side, part in sets.items():
        count = training_rows(part, expected)
        if count is not None:
            rows[side] = count
    if len(rows) == len(sets):
        return rows
    return {}


def training_steps(training: Run[TrainStage], expected: bool = False) -> int | None:
    """Optimizer steps, as training counts them: whole batches of all passes; None where the rows
    are unknown.

    Simultaneous training takes as many of each side as the shorter set allows, in whole turns. With
    packing the number is unknown beforehand, and expected as if each document filled a row.
    """
    sft, data = training.config.sft, training.parents["data"]
    if sft.steps is not None or not isinstance(data, Run) or (sft.packing and not expected):
        return sft.steps
    rows = rows_of_sets(sft, data, expected)
    if rows:
        return available_steps(sft, [*rows.values()])
    return None
