"""The small world of a data_root, and the one that a model was trained in: their words must be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config.data import Expert
from pipeline.config.stages import DataStage, RunStage
from pipeline.data.small_world import LARGEST
from pipeline.errors import PipelineError
from pipeline.runs.folders import folder_of
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot

SCRIPT = "python scripts/make_small_world.py FOLDER"  # for data_root=FOLDER
SEED = 0  # of the world that ships, which stage=data expert=sandbox writes
WORLD = "world.json"  # in a small world's data run, and next to the base that was trained in it
_seeds: dict[str, int] = {}  # hash of a model -> seed: each score of a table asks for it


def refuse_another_world(model: Parent, data_root: Parent | None, config: RunStage) -> None:
    """Raise PipelineError where data_root is a small world with another seed than that of the model's base."""
    data_seed = seed_of_data(data_root) if data_root else None
    model_seed = seed_of_model(model, config) if data_seed is not None else None
    if data_root and model_seed is not None and model_seed != data_seed:
        raise PipelineError(
            f"data_root={data_root.name} is the small world of seed {data_seed}, and {model.name} was trained on seed "
            f"{model_seed}: give the world of seed {model_seed}, which "
            + ("stage=data expert=sandbox" if model_seed == SEED else f"{SCRIPT} --seed {model_seed}")
            + " writes"
        )


def check_items(expert: Expert) -> None:
    """Raise PipelineError where more items of the small world are requested than ship."""
    asked = {"world.items": expert.world.items} if expert.world else {}
    asked |= {"items.dev": expert.items.dev, "items.test": expert.items.test} if expert.items else {}
    for name, items in asked.items():
        if items > LARGEST:
            raise PipelineError(
                f"expert.{name}={items}: {LARGEST} items per benchmark and language ship with the program: ask "
                f"for at most {LARGEST}, or give data_root=FOLDER, from {SCRIPT} --items {items} --dev-items {items}"
            )


def small_world(data_root: Parent | None) -> Parent:
    """The data run that holds the small world. Raises PipelineError where it holds anything else."""
    if data_root is None or seed_of_data(data_root) != SEED:
        problem = f"data_root={data_root.name} is not one" if data_root else "no data run with one is given"
        raise PipelineError(
            f"items are of a small world, and {problem}: give data_root=RUN of stage=data expert=sandbox"
        )
    return data_root


def refuse_items(data_root: Parent | Path) -> None:
    """Raise PipelineError where a training set is read from a data_root that holds evaluation items only."""
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        holds_items = data_root.config.expert.items is not None
    else:
        folder = data_root if isinstance(data_root, Path) else data_root.folder
        holds_items = world_record(folder).get("holds") == "items"
    if holds_items:
        name = str(data_root) if isinstance(data_root, Path) else data_root.name
        raise PipelineError(
            f"data_root={name} holds items to score on and nothing to train on: give the RUN of stage=data "
            "expert=sandbox that they are of"
        )


def seed_of_data(data_root: Parent) -> int | None:
    """The seed of a small world, finished or planned; None for any other data."""
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        expert = data_root.config.expert
        if expert.items:
            return seed_of_data(data_root.parents["data_root"])
        return SEED if expert.world else None
    return written_seed(data_root.folder)


def seed_of_model(model: Parent, config: RunStage) -> int | None:
    """The seed of the small world in which a model, or the base that it was trained from, was trained."""
    seed = _seeds.get(model.hash)
    if seed is None and (seed := find_seed(model, config)) is not None:
        _seeds[model.hash] = seed
    return seed


def find_seed(model: Parent, config: RunStage) -> int | None:
    model = model.run if isinstance(model, Snapshot) else model
    if isinstance(model, Run):
        if "data_root" in model.parents:
            return seed_of_data(model.parents["data_root"])
        return next((seed_of_model(parent, config) for role, parent in model.parents.items() if role != "data"), None)
    manifest = read_manifest(model.folder)
    if manifest is None or (model.folder / WORLD).is_file():
        return written_seed(model.folder)
    if "data_root" in manifest.parents:  # a base from random weights
        made_in = folder_of(manifest.parents["data_root"].hash, Path(config.runs_dir))
        return written_seed(made_in) if made_in else None
    return seed_of_model(base_of(model, config, "checkpoint"), config) if manifest.base else None


def written_seed(folder: Path) -> int | None:
    return world_record(folder).get("seed")


def world_record(folder: Path) -> dict[str, Any]:
    """Contents of world.json of a small world's data run, or of a base trained in it; else empty."""
    file = folder / WORLD
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
