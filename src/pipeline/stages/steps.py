"""The number of steps of a training, from the size of its set, before either has run.

Without `expected` the numbers are certain, and decide the steps of snapshots. With `expected` they
are estimates.
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
    """Return the training rows of a data run, finished or requested, or None if they are unknown.

    A set with fewer rows than requested is an error when it is drawn, unless data.allow_fewer is
    set. In that case the number is unknown beforehand.

    Args:
        data: The data run.
        expected: Estimate an unknown number by the rows of its files, at most the requested size.
            Without files, it is that size.
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
    """Return the rows in the files of a data run's sources, or None if a number is unknown.

    The files are below data_root, written or planned. On the Hub the number is unknown.
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
    """Return the sum of numbers, or None if one of them is unknown."""
    if None in counts:
        return None
    return sum(count or 0 for count in counts)


def rows_of_sets(sft: Sft, data: Run[DataStage], expected: bool = False) -> dict[str, int]:
    """Return the rows of the sets that a training alternates between, by side.

    A training with one set has its rows under `all`. The result is empty if a number is unknown.
    See `training_rows`.
    """
    sets = {"all": data}
    if sft.method == "simultaneous":
        sets = {part.config.expert.side: part for part in parent_runs(data.parents)}
    rows = {}
    for side, part in sets.items():
        count = training_rows(part, expected)
        if count is None:
            return {}
        rows[side] = count
    return rows


def training_steps(training: Run[TrainStage], expected: bool = False) -> int | None:
    """Return the optimizer steps of a training, or None if its rows are unknown.

    The steps are whole batches of all passes. Simultaneous training takes as many of each side as
    the shorter set allows, in whole turns. With packing the number is unknown beforehand; the
    expected number assumes that each document fills a row.
    """
    sft, data = training.config.sft, training.parents["data"]
    if sft.steps is not None or not isinstance(data, Run) or (sft.packing and not expected):
        return sft.steps
    rows = rows_of_sets(sft, data, expected)
    if rows:
        return available_steps(sft, [*rows.values()])
    return None
