"""Saving a trained model with its digests, and its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.errors import PipelineError
from pipeline.merge.write import make_readable
from pipeline.models.checkpoint import digest_tensors, read_header, torch_dtype, weights_root
from pipeline.models.skeleton import build_skeleton

Tensors = dict[str, torch.Tensor]


def save_model(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, full_weights: Tensors | None = None
) -> dict[str, Any]:
    """Save weights (for adapters only theirs), tokenizer and configs; returns the root and digests
    of the weights.

    dtype None: as trained. full_weights: the weights by name, where the model holds shards of them.
    The model is not changed, so that it can be saved while it trains.
    """
    adapters = hasattr(model, "peft_config")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a tied head once
    weights = {}
    for name, tensor in (full_weights or model.state_dict()).items():
        if name in own and (not adapters or ".lora_" in name):
            weights[name] = tensor
    if torch.float32 in {
        p.dtype for p in model.parameters() if p.requires_grad
    }:  # frozen matrices, held narrow
        weights = {
            name: t.detach().cpu().float() if t.dtype == torch.bfloat16 else t
            for name, t in weights.items()
        }
    kind = getattr(torch, dtype) if dtype else None
    is_cast = kind is not None and kind not in {tensor.dtype for tensor in weights.values()}
    if is_cast:
        saved = {name: tensor.detach().to("cpu", kind) for name, tensor in weights.items()}
    else:
        saved = weights
    if adapters:
        model.peft_config["default"].base_model_name_or_path = None  # the manifest names the base
    model.save_pretrained(folder, state_dict=dict(saved))
    if adapters:
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, unfilled
        model.generation_config.save_pretrained(folder)
    elif is_cast:
        trained, model.config.dtype = model.config.dtype, dtype
        model.config.save_pretrained(folder)
        model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    check_headers(folder, saved)
    make_readable(folder)
    digests = digest_tensors(folder)
    return {
        "root": weights_root(digests),
        "digests": digests,
        **({"cast": {"to": dtype}} if is_cast else {}),
    }


def check_headers(folder: Path, saved: Tensors) -> None:
    """Raise PipelineError where the files hold other dtypes than were saved, or other tensors than
    the model has, by their headers. Some types are stored in other parts than they are held in.
    """
    headers = {}
    for file in folder.glob("*.safetensors"):
        for key, info in read_header(file).items():
            headers[key] = info
    stored, held = (
        {torch_dtype(info.dtype) for info in headers.values()},
        {one.dtype for one in saved.values()},
    )
    if (folder / "config.json").is_file():
        build_skeleton(folder, "model")
    elif apart := headers.keys() ^ {name.replace(".default.", ".") for name in saved}:
        raise PipelineError(
            f"{folder} and the adapter in training differ in {min(apart)}: report this"
        )
    if stored != held:
        raise PipelineError(
            f"{folder} holds {stored}, and the model in training {held}: report this"
        )
