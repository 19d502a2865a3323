"""Bytes that a training will write, from the headers of its base, before anything is loaded."""

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
    """Purpose -> bytes: the weights, two resume points while one replaces the other, and snapshots."""
    sft = run.config.sft
    points = 1 if sft.resume_minutes is None else 2
    return written_bytes(sft, *parameter_counts(run), snapshots_on_disk(run), points)


def written_bytes(sft: Sft, total: int, trained: int, snapshots: int, points: int) -> dict[str, int]:
    """Purpose -> bytes that a training writes.

    total, trained: numbers of parameters; with adapters the trained ones are theirs. snapshots, points: snapshots and
    resume points on the disk at once.
    """
    bytes_per_weight = 2 if sft.weights == "bfloat16" and sft.adapter == "none" else 4  # bytes of a trained weight
    saved = trained if sft.adapter == "lora" else total  # an adapter is saved without its base
    weights = saved * (2 if sft.save_dtype == "bfloat16" else bytes_per_weight)
    states = trained * (bytes_per_parameter(sft) - 2 * bytes_per_weight)  # neither weight nor gradient
    point = saved * bytes_per_weight + states
    return {"weights": weights, "resume points": points * point, "snapshots": weights * snapshots}


def parameter_counts(run: Run[TrainStage]) -> tuple[int, int]:
    """(all, trained) parameters, by the headers of the model's files; 0 where it is not on this disk yet."""
    config = run.config
    if "model" not in run.parents or not (run.parents["model"].folder / "config.json").is_file():
        return 0, 0
    infos = Checkpoint.open(run.parents["model"].folder).infos
    sizes = {name: math.prod(info.shape) for name, info in infos.items()}
    sft, trained = config.sft, set(sizes)
    if config.partition is not None:
        side_of = sides_of_all(config.partition, anatomy(sizes))
        trained_sides = (sft.side,) if sft.method == "partial" else ("math", "language")
        trained = {name for name, side in side_of.items() if side in trained_sides}
    if sft.adapter == "none":
        return sum(sizes.values()), sum(sizes[name] for name in trained)
    modules = [name for name in trained if name.endswith(tuple(f".{target}.weight" for target in sft.lora_targets))]
    return sum(sizes.values()), sum(sft.lora_rank * sum(infos[name].shape) for name in modules)


def snapshots_on_disk(run: Run[TrainStage]) -> int:
    """Number of snapshots on the disk at once, by the rows of a finished data set, else by the requested size."""
    config = run.config
    manifest = read_manifest(run.parents["data"].folder) if "data" in run.parents else None
    rows = (manifest.facts if manifest else {}).get("counts", {}).get("train", config.data.size or 0)
    return snapshots_at_once(config.sft, config.sft.steps or whole_batches(config.sft, rows))
