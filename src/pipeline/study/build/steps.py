"""How many steps a training will take, from the sizes of its set, before either is made."""

from __future__ import annotations

from pipeline.config.stages import DataStage, TrainStage
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run


def planned_rows(data: Run[DataStage]) -> int | None:
    """Training rows of a data run: those it has, else those it is asked for; None where nothing asks for a number.

    A set with fewer rows than it is asked for is refused when it is made, unless data.allow_fewer says otherwise: of
    such a one nothing is known before.
    """
    manifest = read_manifest(data.folder)
    if manifest is not None:
        return int(manifest.facts["counts"]["train"])
    if data.config.expert.union:
        rows = [planned_rows(one) for one in data.parents.values() if isinstance(one, Run)]
        return None if None in rows else sum(count or 0 for count in rows)
    config = data.config
    return None if config.data.allow_fewer else config.data.size or config.expert.size


def planned_steps(training: Run[TrainStage]) -> int | None:
    """Optimizer steps, as training counts them: whole batches of all passes; None where the rows are not known.

    Simultaneous training takes as many of each side as the shorter gives, in whole turns. Of rows that are packed the
    number is not known before.
    """
    sft, data = training.config.sft, training.parents["data"]
    if sft.steps is not None:
        return sft.steps
    rows = planned_rows(data) if isinstance(data, Run) else None
    if rows is None or sft.packing:
        return None
    if sft.method != "simultaneous":
        return rows * sft.epochs // sft.batch_size
    assert isinstance(data, Run)
    sides = [planned_rows(one) or 0 for one in data.parents.values() if isinstance(one, Run)]
    return 2 * (min(sides) * sft.epochs // sft.batch_size // sft.steps_per_switch) * sft.steps_per_switch
