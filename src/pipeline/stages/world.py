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
_seeds: dict[str, int] = {}  # hash of a model or its data -> seed: each score of a table asks for it


def refuse_another_world(model: Parent, data_root: Parent | None, config: RunStage) -> None:
    """Raise PipelineError where data_root is a small world with another seed than that of the model's base."""
    runs_dir = Path(config.runs_dir)
    data_seed = seed_of(data_root, runs_dir) if data_root else None
    model_seed = seed_of(model, runs_dir) if data_seed is not None else None
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


def small_world(data_root: Parent | None, runs_dir: Path) -> Parent:
    """The data run that holds the small world. Raises PipelineError where it holds anything else."""
    if data_root is None or seed_of(data_root, runs_dir) != SEED:
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


def seed_of(parent: Parent, runs_dir: Path) -> int | None:
    """The seed of a small world, or of that in which a model, or the base that it was trained from, was trained;
    planned or finished. None for any other data or model."""
    parent = parent.run if isinstance(parent, Snapshot) else parent
    if parent.hash not in _seeds:
        seed = find_seed(parent, runs_dir)
        if seed is None or not parent.hash:
            return seed
        _seeds[parent.hash] = seed
    return _seeds[parent.hash]


def find_seed(parent: Parent, runs_dir: Path) -> int | None:
    if isinstance(parent, Run):
        if isinstance(parent.config, DataStage) and not parent.config.expert.items:
            return SEED if parent.config.expert.world else None
        models = [model for role, model in parent.parents.items() if role != "data"]
        return seed_of(parent.parents.get("data_root") or models[0], runs_dir) if models else None
    manifest = read_manifest(parent.folder)
    if manifest is None or manifest.stage == "data" or (parent.folder / WORLD).is_file():
        return world_record(parent.folder).get("seed")
    if "data_root" in manifest.parents:  # a base from random weights
        made_in = folder_of(manifest.parents["data_root"].hash, runs_dir)
        return world_record(made_in).get("seed") if made_in else None
    return seed_of(base_of(parent, runs_dir, "checkpoint"), runs_dir) if manifest.base else None


def world_record(folder: Path) -> dict[str, Any]:
    """Contents of world.json of a small world's data run, or of a base trained in it; else empty."""
    file = folder / WORLD
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
