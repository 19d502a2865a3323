"""The models that a run is made of: their shape and their tokenizer."""

from __future__ import annotations

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
    """Return the shape of the model that a run trains or scores, from a folder on this disk or a
    known model.
    """
    shape = shape_of_model(run)
    if shape:
        return shape
    raise PipelineError(
        f"the size of the model of {run.label} is unknown, as it is not here: run stage=prefetch"
        " first, or name a folder with its config.json"
    )


def shape_of_model(run: Parent) -> Shape | None:
    """Return a model's shape from its config.json, its parents or its name; None if it is
    unknown.
    """
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
    roles = run.parents.items() if isinstance(run, Run) else ()
    return [
        parent
        for role, parent in roles
        if role not in ("data", "data_root", "benchmarks", "spm_model")
    ]


FINE_TUNED = {
    "lightonai/Qwen3-8B-": "qwen3_8b"
}  # beginning of names on the Hub -> the model of their shape


@lru_cache(maxsize=64)
def by_hub(hub: str) -> str:
    """Return the option of conf/model that names a model on the Hub, or whose shape it has."""
    for beginning, model in FINE_TUNED.items():
        if hub.startswith(beginning):
            return model
    paths = {
        conf.option("model", name)["model"].get("path"): name for name in conf.options("model")
    }
    return paths.get(f"hub:{hub.partition('@')[0]}", "")


def tokenizer_of(run: Parent) -> Path | None:
    """Return the tokenizer.json of the model that a run trains or scores, or of its parents, if it
    is on this disk.
    """
    file = run.folder / "tokenizer.json"
    if file.is_file():
        return file
    return next(filter(None, map(tokenizer_of, models_of(run))), None)
