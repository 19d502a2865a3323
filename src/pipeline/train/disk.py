"""What a training will write, from the headers of its base, before anything is loaded."""

from __future__ import annotations

import math

from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.models.anatomy import anatomy
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.partition import sides_of_all
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.train.memory import bytes_per_parameter
from pipeline.train.steps import snapshots_at_once, whole_batches


def bytes_of_training(run: Run[TrainStage]) -> dict[str, int]:
    """What for -> bytes: the weights, one resume point beside the one before it, and snapshots."""
    sft = run.config.sft
    return written(sft, *parameters(run), snapshots(run), points=1 if sft.resume_minutes is None else 2)


def written(sft: Sft, whole: int, trained: int, snapshots: int, points: int) -> dict[str, int]:
    """What for -> bytes that a training writes. whole, trained: parameters; of adapters what is trained is theirs.

    points: resume points on the disk at once; snapshots: these too.
    """
    held = 2 if sft.weights == "bfloat16" and sft.adapter == "none" else 4  # bytes of a trained weight
    kept = trained if sft.adapter == "lora" else whole  # an expert of adapters is them alone
    weights = kept * (2 if sft.save_dtype == "bfloat16" else held)
    states = trained * (bytes_per_parameter(sft) - 2 * held)  # what is neither weight nor gradient
    return {"weights": weights, "resume points": points * (kept * held + states), "snapshots": weights * snapshots}


def parameters(run: Run[TrainStage]) -> tuple[int, int]:
    """(of the whole model, of what is trained), by the headers of its files; 0 where it is not on this disk yet."""
    config = run.config
    if "model" not in run.parents or not (run.parents["model"].folder / "config.json").is_file():
        return 0, 0
    infos = Checkpoint.open(run.parents["model"].folder).infos
    sizes = {name: math.prod(info.shape) for name, info in infos.items()}
    sft, trained = config.sft, set(sizes)
    if config.partition is not None:
        side_of = sides_of_all(config.partition, anatomy(sizes))
        wanted = (sft.side,) if sft.method == "partial" else ("math", "language")
        trained = {name for name, side in side_of.items() if side in wanted}
    if sft.adapter == "none":
        return sum(sizes.values()), sum(sizes[name] for name in trained)
    modules = [name for name in trained if name.endswith(tuple(f".{target}.weight" for target in sft.lora_targets))]
    return sum(sizes.values()), sum(sft.lora_rank * sum(infos[name].shape) for name in modules)


def snapshots(run: Run[TrainStage]) -> int:
    """How many lie on the disk at once, by the rows of a data set that is made, else by the size that is asked for."""
    config = run.config
    manifest = read_manifest(run.parents["data"].folder) if "data" in run.parents else None
    rows = (manifest.facts if manifest else {}).get("counts", {}).get("train", config.data.size or 0)
    return snapshots_at_once(config.sft, config.sft.steps or whole_batches(config.sft, rows))
