"""What training leaves, saved with its digests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.models.checkpoint import Checkpoint, digest_tensors, digests_in, weights_root
from pipeline.models.files import ADAPTER_WEIGHTS


def save(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, whole: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Weights (of adapters: theirs alone), tokenizer and configs, and the digests of the weights.

    dtype None keeps what was trained. A cast is stated with its relative error. `whole`: the weights by name, where
    the model holds shards of them. The model stays as it is, so that it can be saved while it trains.
    """
    adapters, trained = hasattr(model, "peft_config"), model.dtype
    there = whole or dict(model.named_parameters())
    kept = {name: p for name, p in there.items() if not adapters or ".lora_" in name}
    with cast(kept, getattr(torch, dtype) if dtype and dtype not in _dtypes(kept) else None) as facts:
        if adapters:
            model.peft_config["default"].base_model_name_or_path = None  # the manifest names the base
            model.save_pretrained(folder, state_dict=whole)
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, unfilled
            model.generation_config.save_pretrained(folder)
        else:
            model.config.dtype = next(iter(kept.values())).dtype
            model.save_pretrained(folder, state_dict=whole)
            model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)  # shards are written for their owner alone, and clusters share folders
    digests = adapter_digests(folder) if adapters else digest_tensors(folder)
    return {"root": weights_root(digests), "digests": digests, **facts}


def _dtypes(named: dict[str, Any]) -> set[str]:
    return {str(p.dtype).removeprefix("torch.") for p in named.values()}


@contextmanager
def cast(named: dict[str, Any], dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
    """Inside, the parameters are cast, on the CPU. Gives the dtype and the relative error of the whole."""
    if dtype is None:
        yield {}
        return
    error = size = 0.0
    before = {name: parameter.data for name, parameter in named.items()}
    try:
        for name, parameter in named.items():
            parameter.data = before[name].to("cpu", dtype)
            was = before[name].float().cpu()
            error += float(((parameter.data.float() - was) ** 2).sum())
            size += float((was**2).sum())
        yield {"cast": {"to": str(dtype).removeprefix("torch."), "relative_error": math.sqrt(error / size)}}
    finally:
        for name, parameter in named.items():
            parameter.data = before[name]


def left_of_training(named: dict[str, Any], base: Path, dtype: torch.dtype) -> dict[str, float]:
    """What of the task vector outlives a cast: its projection on what was trained (1: all of it in the mean), and the
    share of entries that moved in training and would not be told from the base's any more.

    `named`: trained parameters, `base`: the folder of the base's weights, cast alike.
    """
    start = Checkpoint.open(base)
    dot = size = moved = same = 0.0
    for name, parameter in named.items():
        was, now = start.tensor(name).float(), parameter.detach().float().cpu()
        kept = now.to(dtype).float()
        dot += float(((kept - was) * (now - was)).sum(dtype=torch.float64))
        size += float(((now - was) ** 2).sum(dtype=torch.float64))
        moved += int((now != was).sum())
        same += int(((now != was) & (kept == was.to(dtype).float())).sum())
    return {"task_vector_projection": dot / size, "moved_entries_lost": same / moved} if moved else {}


def adapter_digests(folder: Path) -> dict[str, str]:
    """The digest of every tensor of a LoRA adapter, by name. Refuses NaN and infinite values."""
    return digests_in(folder / ADAPTER_WEIGHTS)
