"""Saving a trained model with its digests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.models.checkpoint import Checkpoint, digest_tensors, digests_in, weights_root
from pipeline.models.files import ADAPTER_WEIGHTS


def save_model(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, full_weights: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Save weights (for adapters only theirs), tokenizer and configs; returns the root and digests of the weights.

    dtype None: as trained. A cast is reported with its relative error. full_weights: the weights by name, where the
    model holds shards of them. The model is not changed, so that it can be saved while it trains.
    """
    adapters, trained = hasattr(model, "peft_config"), model.dtype
    weights = full_weights or dict(model.named_parameters())
    saved = {name: p for name, p in weights.items() if not adapters or ".lora_" in name}
    with cast_parameters(saved, getattr(torch, dtype) if dtype and dtype not in _dtypes(saved) else None) as facts:
        if adapters:
            model.peft_config["default"].base_model_name_or_path = None  # the manifest names the base
            model.save_pretrained(folder, state_dict=full_weights)
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, unfilled
            model.generation_config.save_pretrained(folder)
        else:
            model.config.dtype = next(iter(saved.values())).dtype
            model.save_pretrained(folder, state_dict=full_weights)
            model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)  # shards are written for their owner alone, and clusters share folders
    digests = adapter_digests(folder) if adapters else digest_tensors(folder)
    return {"root": weights_root(digests), "digests": digests, **facts}


def _dtypes(parameters: dict[str, Any]) -> set[str]:
    return {str(p.dtype).removeprefix("torch.") for p in parameters.values()}


@contextmanager
def cast_parameters(parameters: dict[str, Any], dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
    """Cast the parameters inside the context, on the CPU; yields the dtype and the overall relative error."""
    if dtype is None:
        yield {}
        return
    error = size = 0.0
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = originals[name].to("cpu", dtype)
            was = originals[name].float().cpu()
            error += float(((parameter.data.float() - was) ** 2).sum())
            size += float((was**2).sum())
        yield {"cast": {"to": str(dtype).removeprefix("torch."), "relative_error": math.sqrt(error / size)}}
    finally:
        for name, parameter in parameters.items():
            parameter.data = originals[name]


def measure_cast(parameters: dict[str, Any], base: Path, dtype: torch.dtype) -> dict[str, float]:
    """How much of the task vector survives a cast: its projection on the trained one (1: all of it on average), and the
    share of entries that moved in training and are equal to the base's afterwards.

    parameters: the trained ones by name; base: the folder of the base's weights, cast likewise.
    """
    start = Checkpoint.open(base)
    dot = size = moved = same = 0.0
    for name, parameter in parameters.items():
        was, now = start.tensor(name).float(), parameter.detach().float().cpu()
        cast_back = now.to(dtype).float()
        dot += float(((cast_back - was) * (now - was)).sum(dtype=torch.float64))
        size += float(((now - was) ** 2).sum(dtype=torch.float64))
        moved += int((now != was).sum())
        same += int(((now != was) & (cast_back == was.to(dtype).float())).sum())
    return {"task_vector_projection": dot / size, "moved_entries_lost": same / moved} if moved else {}


def adapter_digests(folder: Path) -> dict[str, str]:
    """Name -> digest of every tensor of a LoRA adapter. Raises PipelineError for NaN and infinite values."""
    return digests_in(folder / ADAPTER_WEIGHTS)
