"""The small world that a data_root holds, and the one that a model was made in: the same words, or nothing is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config.stages import DataStage, RunStage
from pipeline.errors import PipelineError
from pipeline.runs.folders import folder_of
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot

WORLD = "world.json"  # in a small world's data run, and beside the base that was made in it


def refuse_another_world(model: Parent, data_root: Parent | None, config: RunStage) -> None:
    """PipelineError where data_root is a small world of another seed than the model's base knows."""
    given = seed_of_data(data_root) if data_root else None
    known = seed_of_model(model, config) if given is not None else None
    if data_root and known is not None and known != given:
        raise PipelineError(
            f"data_root={data_root.name} is the small world of seed {given}, and {model.name} knows the words of seed "
            f"{known}: make the data with stage=data expert=sandbox expert.world.seed={known}"
        )


def small_world(data_root: Parent | None) -> Parent:
    """The data run that holds a small world. PipelineError where it holds anything else."""
    if data_root is None or seed_of_data(data_root) is None:
        given = f"data_root={data_root.name} is none" if data_root else "no data run of one is given"
        raise PipelineError(f"items are of a small world, and {given}: give data_root=RUN of stage=data expert=sandbox")
    return data_root


def refuse_items(data_root: Parent | Path) -> None:
    """PipelineError where a data_root holds what is scored on alone, and a training set is asked of it."""
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        alone = data_root.config.expert.items is not None
    else:
        folder = data_root if isinstance(data_root, Path) else data_root.folder
        alone = told_of(folder).get("holds") == "items"
    if alone:
        name = str(data_root) if isinstance(data_root, Path) else data_root.name
        raise PipelineError(
            f"data_root={name} holds items to score on and nothing to train on: give the RUN of stage=data "
            "expert=sandbox that they are of"
        )


def seed_of_data(data_root: Parent) -> int | None:
    """The seed of a small world, made or not; None for any other data."""
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        expert = data_root.config.expert
        if expert.items:
            return seed_of_data(data_root.parents["data_root"])
        return expert.world.seed if expert.world else None
    return written_seed(data_root.folder)


def seed_of_model(model: Parent, config: RunStage) -> int | None:
    """The seed of the small world that a model, or the base that it was trained from, was made in."""
    model = model.run if isinstance(model, Snapshot) else model
    if isinstance(model, Run):
        if "data_root" in model.parents:
            return seed_of_data(model.parents["data_root"])
        return next((seed_of_model(one, config) for role, one in model.parents.items() if role != "data"), None)
    manifest = read_manifest(model.folder)
    if manifest is None or (model.folder / WORLD).is_file():
        return written_seed(model.folder)
    if "data_root" in manifest.parents:  # a base from nothing
        made_in = folder_of(manifest.parents["data_root"].hash, Path(config.runs_dir))
        return written_seed(made_in) if made_in else None
    return seed_of_model(base_of(model, config, "checkpoint"), config) if manifest.base else None


def written_seed(folder: Path) -> int | None:
    return told_of(folder).get("seed")


def told_of(folder: Path) -> dict[str, Any]:
    """What a small world's data run, or the folder of the base made in it, says of itself; else nothing."""
    file = folder / WORLD
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
