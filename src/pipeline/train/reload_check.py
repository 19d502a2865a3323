"""What training will save, looked at after its first step: minutes lost instead of the ten hours of a dead job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import read_header, torch_dtype
from pipeline.models.files import ADAPTER_CONFIG

SAME, ROUNDED = 1e-3, 0.1  # of the largest logit: by the same arithmetic on the same weights, or after rounding
TOKENS = 64


def check_saved(trainer: Any, folder: Path, base: Path | None) -> None:
    """Load what was saved into `folder` and compare it with the model in training, on the first row of the set.

    All processes come here together, as shards answer together; the first compares.

    Args:
        base: the folder of an adapter's base.

    Raises:
        PipelineError: other logits, other tokens, another chat template, or no generation config.
    """
    tokenizer, model = trainer.processing_class, trainer.model
    ids = list(trainer.train_dataset[0]["input_ids"])[:TOKENS]
    ours = logits(model, ids, trainer.args.bf16)
    if trainer.args.process_index or not torch.isfinite(ours).all():
        return  # a training that diverged is told of by its loss
    again, text = AutoTokenizer.from_pretrained(folder), tokenizer.decode(ids)
    if again(text).input_ids != tokenizer(text).input_ids or again.chat_template != tokenizer.chat_template:
        refuse("its tokenizer cuts text otherwise, or has another chat template")
    if not (folder / "generation_config.json").is_file():
        refuse("it has no generation_config.json")
    saved = load(folder, base, model)
    theirs = logits(saved, ids, trainer.args.bf16)
    error, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    elsewhere = saved.device != model.device or trainer.args.world_size > 1  # shards compute in an order of their own
    narrow = trainer.args.bf16 or model.dtype == torch.bfloat16
    rounded = was_cast(folder, model) or (narrow and elsewhere)
    if not error <= (ROUNDED if rounded else SAME) * largest:
        refuse(f"its logits differ by {error:.2g}, the largest is {largest:.2g}")


def refuse(what: str) -> None:
    raise PipelineError(
        f"the model saved after the first step is not the one in training: {what}; "
        "report it, or train all the same with sft.check_saved=false"
    )


def load(folder: Path, base: Path | None, model: Any) -> Any:
    """A whole model, or an adapter on its base, in the dtype and with the attention of `model`, the one in training;
    beside it where there is room, else on the CPU."""
    weights = folder
    if (folder / ADAPTER_CONFIG).is_file():
        assert base is not None
        weights = base
    device = model.device
    bytes_needed = 2 * sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < bytes_needed:
        device = torch.device("cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        weights, dtype=model.dtype, attn_implementation=model.config._attn_implementation, use_safetensors=True
    )
    if weights != folder:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, folder)
    return loaded.to(device)


def was_cast(folder: Path, model: Any) -> bool:
    """Whether the weights in `folder` have another dtype than those that are trained."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    stored = {info.dtype for file in folder.glob("*.safetensors") for info in read_header(file).values()}
    return {torch_dtype(dtype) for dtype in stored} != trained


def logits(model: Any, ids: list[int], bf16: bool) -> torch.Tensor:
    """(tokens, vocabulary) in fp32 on the CPU; the model is left in the mode it was in."""
    training, device = model.training, model.device
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return model(input_ids=torch.tensor([ids], device=device)).logits[0].float().cpu()
    finally:
        model.train(training)
