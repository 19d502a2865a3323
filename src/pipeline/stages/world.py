"""The small world of a data_root, and the number of its items."""

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
SEED = 0  # the seed of the shipped world, which stage=data expert=sandbox writes
WORLD = "world.json"  # in a small world's data run, and next to the base that was trained on it


def check_items(expert: Expert) -> None:
    """Raise PipelineError if more items of the small world are requested than ship."""
    counts = {}
    if expert.world:
        counts = {"world.items": expert.world.items}
    if expert.items:
        counts |= {"items.dev": expert.items.dev, "items.test": expert.items.test}
    for name, items in counts.items():
        if items > LARGEST:
            raise PipelineError(
                f"expert.{name}={items}: {LARGEST} items per benchmark and language ship with the"
                f" program. Lower it, or set data_root=FOLDER, written by {SCRIPT} --items {items}"
                f" --dev-items {items}"
            )


def small_world(data_root: Parent | None) -> Parent:
    """Return the data run of the shipped small world.

    Raises:
        PipelineError: data_root is another folder or run.
    """
    if data_root is None or not holds_small_world(data_root):
        problem = "data_root is not set"
        if data_root:
            problem = f"data_root={data_root.name} is not a small world"
        raise PipelineError(
            f"Items come from a small world, and {problem}. Set data_root=RUN of stage=data"
            " expert=sandbox."
        )
    return data_root


def holds_small_world(data_root: Parent) -> bool:
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        return data_root.config.expert.world is not None and not data_root.config.expert.items
    return world_record(data_root.folder).get("seed") == SEED


def refuse_items(data_root: Parent | Path) -> None:
    """Raise PipelineError if training rows are read from a data_root with only evaluation items."""
    if isinstance(data_root, Run) and isinstance(data_root.config, DataStage):
        name, holds_items = data_root.name, data_root.config.expert.items is not None
    else:
        name, folder = str(data_root), data_root
        if not isinstance(data_root, Path):
            name, folder = data_root.name, data_root.folder
        assert isinstance(folder, Path)
        holds_items = world_record(folder).get("holds") == "items"
    if holds_items:
        raise PipelineError(
            f"data_root={name} has evaluation items and no training rows. Set it to the RUN of"
            " stage=data expert=sandbox that the items come from."
        )


def world_record(folder: Path) -> dict[str, Any]:
    """Return the content of a small world's world.json, or {} if the folder has none.

    A base that was trained on a small world has the file too.
    """
    file = folder / WORLD
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}
