"""Saving a trained model with its digests, and its model card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.config.knob import format_value
from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.merge.write import make_readable
from pipeline.models.checkpoint import digest_tensors, read_header, torch_dtype, weights_root
from pipeline.models.skeleton import build_skeleton
from pipeline.runs.model_card import CARD, data_section, origin_from_config, render_card
from pipeline.runs.run import Run, flatten_dict
from pipeline.text import markdown_table

Tensors = dict[str, torch.Tensor]


def save_model(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, full_weights: Tensors | None = None
) -> dict[str, Any]:
    """Save weights (for adapters only theirs), tokenizer and configs; returns the root and digests of the weights.

    dtype None: as trained. full_weights: the weights by name, where the model holds shards of them. The model is not
    changed, so that it can be saved while it trains.
    """
    adapters = hasattr(model, "peft_config")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a tied head once
    weights = {
        name: tensor
        for name, tensor in (full_weights or model.state_dict()).items()
        if name in own and (not adapters or ".lora_" in name)
    }
    if torch.float32 in {p.dtype for p in model.parameters() if p.requires_grad}:  # frozen matrices, held narrow
        weights = {name: t.detach().cpu().float() if t.dtype == torch.bfloat16 else t for name, t in weights.items()}
    kind = getattr(torch, dtype) if dtype else None
    is_cast = kind is not None and kind not in {tensor.dtype for tensor in weights.values()}
    saved = {name: tensor.detach().to("cpu", kind) for name, tensor in weights.items()} if is_cast else weights
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
    return {"root": weights_root(digests), "digests": digests, **({"cast": {"to": dtype}} if is_cast else {})}


def check_headers(folder: Path, saved: Tensors) -> None:
    """Raise PipelineError where the files hold other dtypes than were saved, or other tensors than the model has, by
    their headers. Some types are stored in other parts than they are held in."""
    headers = {key: info for file in folder.glob("*.safetensors") for key, info in read_header(file).items()}
    stored, held = {torch_dtype(info.dtype) for info in headers.values()}, {one.dtype for one in saved.values()}
    if (folder / "config.json").is_file():
        build_skeleton(folder, "model")
    elif apart := headers.keys() ^ {name.replace(".default.", ".") for name in saved}:
        raise PipelineError(f"{folder} and the adapter in training differ in {min(apart)}: report this")
    if stored != held:
        raise PipelineError(f"{folder} holds {stored}, and the model in training {held}: report this")


def write_card(run: Run[TrainStage], folder: Path) -> None:
    """The model card: settings that differ from this program's defaults, parents by name, without paths, and sets."""
    config, decided = run.config, run.decided_by["config"]
    made_of = origin_from_config(run.name, asdict(config), run.parents, Path(config.runs_dir))
    base = run.parents["model"].name if "model" in run.parents else "random weights"
    chosen = [(key, format_value(value)) for key, value in sorted(flatten_dict(decided).items()) if key != "stage"]
    lines = [
        f"# {run.label}",
        "",
        f"Trained from {base} on `expert={config.expert.name}`, with `stage={config.stage} sft={config.sft.name}`. "
        "All other settings are at their defaults.",
        "",
        *markdown_table(("setting", "value"), chosen),
        "",
        data_section(made_of),
    ]
    tags = [config.stage, config.sft.name, *(["partition-" + config.partition.name] if config.partition else [])]
    relation = "finetune" if config.sft.adapter == "none" else "adapter"
    card = render_card(run.name, "\n".join(lines), made_of, tags=tags, relation=relation)
    (folder / CARD).write_text(card, encoding="utf-8")
