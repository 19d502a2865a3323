"""The number of steps of a training, from the size of its set, before either has run.

`planned_` numbers are certain and decide where snapshots lie; `expected_` ones are for estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.config.stages import DataStage, TrainStage
from pipeline.data.small_world import TRAINING
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.lengths import rows_of
from pipeline.train.steps import available_steps


def planned_rows(data: Run[DataStage]) -> int | None:
    """Training rows of a data run: those it has, else those requested; None where no number is requested.

    A set with fewer rows than requested is an error when it is drawn, unless data.allow_fewer is set: then the number
    is unknown beforehand.
    """
    manifest = read_manifest(data.folder)
    if manifest is not None:
        return int(manifest.facts["counts"]["train"])
    if data.config.expert.union:
        rows = [planned_rows(parent) for parent in data.parents.values() if isinstance(parent, Run)]
        return None if None in rows else sum(count or 0 for count in rows)
    config = data.config
    return None if config.data.allow_fewer else config.data.size or config.expert.size


def planned_steps(training: Run[TrainStage]) -> int | None:
    """Optimizer steps, as training counts them: whole batches of all passes; None where the rows are unknown.

    Simultaneous training takes as many of each side as the shorter set allows, in whole turns. With packing the number
    is unknown beforehand.
    """
    sft, data = training.config.sft, training.parents["data"]
    if sft.steps is not None:
        return sft.steps
    return None if sft.packing or not isinstance(data, Run) else steps_over(training, data, planned_rows)


def steps_over(training: Run[TrainStage], data: Run[DataStage], count: Callable[[Run], int | None]) -> int | None:
    """Steps over as many rows as `count` returns for a data run."""
    sft, rows = training.config.sft, count(data)
    if rows is None:
        return None
    sides = [parent for parent in data.parents.values() if isinstance(parent, Run)]
    return available_steps(sft, [count(side) or 0 for side in sides] if sft.method == "simultaneous" else [rows])


# ---------------------------------------------------------------------------------------------------- expected


def expected_rows(data: Run[DataStage]) -> int | None:
    """Training rows of a data run: those planned, else those in its files, at most the requested size; where no
    file is here, that size. None where none of these is known."""
    if (planned := planned_rows(data)) is not None:
        return planned
    if data.config.expert.union:
        rows = [expected_rows(parent) for parent in data.parents.values() if isinstance(parent, Run)]
        return None if None in rows else sum(count or 0 for count in rows)
    size, available = data.config.data.size or data.config.expert.size, available_rows(data)
    if available is None:
        return size
    return max(0, min(available - data.config.data.validation, size or available))


def available_rows(data: Run[DataStage]) -> int | None:
    """Rows of the sources of a data run, in their files below data_root (written or planned); None where a number is
    unknown, as on the Hub."""
    root, sources = data.parents.get("data_root"), data.config.expert.sources.values()
    if root is None or not sources:
        return None
    if isinstance(root, Run) and not root.folder.is_dir():
        is_world = root.config.expert.world is not None
        counts = [TRAINING.get(source.file) if is_world else None for source in sources]
    else:
        counts = [rows_of(root.folder / source.file, source) for source in sources]
    return None if None in counts else sum(count or 0 for count in counts)


def expected_steps(training: Run[TrainStage]) -> int | None:
    """Optimizer steps; with packing as if each document filled a row."""
    data = training.parents["data"]
    if training.config.sft.steps is not None:
        return training.config.sft.steps
    return steps_over(training, data, expected_rows) if isinstance(data, Run) else None
