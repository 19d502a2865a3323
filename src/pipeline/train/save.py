"""Saving a trained model with its digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.merge.write import make_readable
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.models.skeleton import build_skeleton

Tensors = dict[str, torch.Tensor]


def save_model(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, full_weights: Tensors | None = None
) -> dict[str, Any]:
    """Save weights, tokenizer and configs, and return the root and digests of the weights.

    The model does not change, so it can be saved while it trains.

    Args:
        model: the model. With adapters, only their weights are saved.
        tokenizer: the tokenizer.
        folder: where to write.
        dtype: torch's name, or None to save weights as trained.
        full_weights: the weights by name, if the model has shards of them.
    """
    is_adapter = hasattr(model, "peft_config")
    weights = weights_to_save(model, full_weights or model.state_dict())
    kind = getattr(torch, dtype) if dtype else None
    is_cast = kind is not None and kind not in {tensor.dtype for tensor in weights.values()}
    if is_cast:
        weights = {name: tensor.detach().to("cpu", kind) for name, tensor in weights.items()}
    if is_adapter:
        model.peft_config["default"].base_model_name_or_path = None  # the manifest names the base
    model.save_pretrained(folder, state_dict=dict(weights))
    if is_adapter:
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        model.generation_config.save_pretrained(folder)
    elif is_cast:
        trained, model.config.dtype = model.config.dtype, dtype
        model.config.save_pretrained(folder)
        model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    if not is_adapter:
        build_skeleton(folder, "model")  # some types are stored in other parts than in memory
    make_readable(folder)
    digests = digest_tensors(folder)
    facts: dict[str, Any] = {"root": weights_root(digests), "digests": digests}
    if is_cast:
        facts["cast"] = {"to": dtype}
    return facts


def weights_to_save(model: Any, all_weights: Tensors) -> Tensors:
    """Return the model's or the adapters' own tensors, a tied head only once.

    Frozen matrices that training stores in bfloat16 become float32 again.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_adapter = hasattr(model, "peft_config")
    trained_dtypes = set()
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained_dtypes.add(parameter.dtype)
    weights = {}
    for name, tensor in all_weights.items():
        if name not in own or (is_adapter and ".lora_" not in name):
            continue
        if torch.float32 in trained_dtypes and tensor.dtype == torch.bfloat16:
            tensor = tensor.detach().cpu().float()
        weights[name] = tensor
    return weights
