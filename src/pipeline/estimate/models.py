"""The shape and the tokenizer of the model that a run trains or scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from pipeline.config import conf
from pipeline.config.stages import EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.models.shape import SHAPES, Shape, shape_in, shape_of
from pipeline.runs.run import External, Parent, Run, Snapshot

Training = Run[TrainStage]
Evaluation = Run[EvalStage]


def shape_for(run: Run) -> Shape:
    """Return the shape of the model that a run trains or scores.

    Raises:
        PipelineError: The model is neither on this disk nor a known model.
    """
    shape = shape_of_model(run)
    if shape:
        return shape
    raise PipelineError(
        f"The size of the model of {run.label} is unknown, because the model is not on this disk."
        " Run stage=prefetch first, or name a folder with its config.json."
    )


def shape_of_model(run: Parent) -> Shape | None:
    """Return a model's shape from its config.json, its parents or its name, or None."""
    if (run.folder / "config.json").is_file():
        return shape_in(run.folder)
    inherited = map(shape_of_model, models_of(run))
    return next(filter(None, inherited), None) or named_shape(run)


def named_shape(run: Parent) -> Shape | None:
    if isinstance(run, External) and run.hub:
        return SHAPES.get(by_hub(run.hub))
    if not isinstance(run, Run) or not isinstance(run.config, TrainStage):
        return None
    model = run.config.model
    if model.init == "random":
        return shape_of({"vocab_size": model.vocab_size, **model.architecture})
    return SHAPES.get(model.name)


def models_of(run: Parent) -> list[Parent]:
    """Return the parents of a run except data."""
    if isinstance(run, Snapshot):
        return [run.run]
    if not isinstance(run, Run):
        return []
    data = ("data", "data_root", "benchmarks", "spm_model")
    return [parent for role, parent in run.parents.items() if role not in data]


FINE_TUNED = {"lightonai/Qwen3-8B-": "qwen3_8b"}  # prefix of names on the Hub -> model of its shape


@lru_cache(maxsize=64)
def by_hub(hub: str) -> str:
    """Return the option of conf/model for a model on the Hub, or for a model of the same shape."""
    for prefix, model in FINE_TUNED.items():
        if hub.startswith(prefix):
            return model
    repository, _, _ = hub.partition("@")
    by_path = {
        conf.option("model", name)["model"].get("path"): name for name in conf.options("model")
    }
    return by_path.get(f"hub:{repository}", "")


def nearest_folder(
    run: Parent, is_wanted: Callable[[Path], bool], known: dict[str, Path | None]
) -> Path | None:
    """Return the first wanted folder, from a run back to its base, or None.

    `known` keeps the folder of each run, because the runs of a table share their bases.
    """
    if run.hash not in known:
        folder = run.folder if is_wanted(run.folder) else None
        for parent in models_of(run):
            folder = folder or nearest_folder(parent, is_wanted, known)
        known[run.hash] = folder
    return known[run.hash]


def tokenizer_of(run: Parent) -> Path | None:
    """Return the tokenizer.json of the model that a run trains or scores, if it is on this disk."""
    name = "tokenizer.json"
    folder = nearest_folder(run, lambda folder: (folder / name).is_file(), {})
    return folder / name if folder else None
