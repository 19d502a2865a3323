"""The small world of a data_root: what it holds, and how many items may be asked of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config.data import Expert
from pipeline.config.stages import DataStage
from pipeline.data.small_world import LARGEST
from pipeline.errors import PipelineError
from pipeline.runs.run import Parent, Run

SCRIPT = "python scripts/make_small_world.py FOLDER"  # for data_root=FOLDER
SEED = 0  # of the world that ships, which stage=data expert=sandbox writes
WORLD = "world.json"  # in a small world's data run, and next to the base that was trained in it


def check_items(expert: Expert) -> None:
    """Raise PipelineError where more items of the small world are requested than ship."""
    counts = {}
    if expert.world:
        counts = {"world.items": expert.world.items}
    if expert.items:
        counts |= {"items.dev": expert.items.dev, "items.test": expert.items.test}
    for name, items in counts.items():
        if items > LARGEST:
            raise PipelineError(
                f"expert.{name}={items}: {LARGEST} items per benchmark and language ship with the"
                f" program: ask for at most {LARGEST}, or give data_root=FOLDER, from {SCRIPT}"
                f" --items {items} --dev-items {items}"
            )


def small_world(data_root: Parent | None) -> Parent:
    """Return the data run that holds the shipped small world.

    Raises PipelineError if data_root holds something else.
    """
    if data_root is None or not holds_small_world(data_root):
        problem = "no data run with one is given"
        if data_root:
            problem = f"data_root={data_root.name} is not one"
        raise PipelineError(
            f"items are of a small world, and {problem}: give data_root=RUN of stage=data"
            " expert=sandbox"
        )
    return data_root


def holds_small_world(data_root: Parent) -> bool:
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        return data_root.config.expert.world is not None and not data_root.config.expert.items
    return world_record(data_root.folder).get("seed") == SEED


def refuse_items(data_root: Parent | Path) -> None:
    """Raise PipelineError where a training set is read from a data_root that holds evaluation items
    only.
    """
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        holds_items = data_root.config.expert.items is not None
    else:
        if isinstance(data_root, Path):
            folder = data_root
        else:
            folder = data_root.folder
        holds_items = world_record(folder).get("holds") == "items"
    if holds_items:
        if isinstance(data_root, Path):
            name = str(data_root)
        else:
            name = data_root.name
        raise PipelineError(
            f"data_root={name} holds items to score on and nothing to train on: give the RUN of"
            " stage=data expert=sandbox that they are of"
        )


def world_record(folder: Path) -> dict[str, Any]:
    """Contents of world.json of a small world's data run, or of a base trained in it; else
    empty.
    """
    file = folder / WORLD
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}
