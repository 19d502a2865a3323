"""Check after the first step that the saved model can be loaded: minutes are lost instead of a job of ten hours.

The saved model is evaluated module by module, each read from the files when needed and dropped afterwards: only the
largest module is held in addition to the model in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.models.anatomy import name_in_memory, plain_name
from pipeline.models.checkpoint import EMBEDDING, HEAD, Checkpoint, read_header, torch_dtype
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.models.load import load_config, load_tokenizer

SAME, ROUNDED = 1e-3, 0.1  # tolerances relative to the largest logit: same arithmetic and weights, or rounded
TOKENS = 64


def check_saved(trainer: Any, folder: Path, base: Path | None) -> None:
    """Load what was saved into `folder` and compare it with the model in training, on the first row of the set.

    Called by all processes together, as shards compute together; the first compares.

    Args:
        base: the folder of an adapter's base.

    Raises:
        PipelineError: other logits, other tokens, another chat template, or no generation config.
    """
    tokenizer, model = trainer.processing_class, trainer.model
    ids = list(trainer.train_dataset[0]["input_ids"])[:TOKENS]
    trained_logits = compute_logits(model, ids, trainer.args.bf16, model.device)
    if trainer.args.process_index or not torch.isfinite(trained_logits).all():
        return  # a diverged training is reported by its loss
    saved_tokenizer, text = load_tokenizer(folder), tokenizer.decode(ids)
    same_ids = saved_tokenizer(text).input_ids == tokenizer(text).input_ids
    if not same_ids or saved_tokenizer.chat_template != tokenizer.chat_template:
        raise_mismatch("its tokenizer splits text differently, or has another chat template")
    if not (folder / "generation_config.json").is_file():
        raise_mismatch("it has no generation_config.json")
    saved_logits = compute_logits(load_saved(folder, base, model), ids, trainer.args.bf16, model.device)
    error, largest = float((trained_logits - saved_logits).abs().max()), float(trained_logits.abs().max())
    in_shards = trainer.args.world_size > 1  # shards compute in an order of their own
    narrow = trainer.args.bf16 or model.dtype == torch.bfloat16
    rounded = was_cast(folder, model) or (narrow and in_shards)
    if not error <= (ROUNDED if rounded else SAME) * largest:
        raise_mismatch(f"its logits differ by {error:.2g}, the largest is {largest:.2g}")


def raise_mismatch(problem: str) -> None:
    raise PipelineError(
        f"the model saved after the first step is not the one in training: {problem}; "
        "report this, or train anyway with sft.check_saved=false"
    )


class Stored(Mapping[str, torch.Tensor]):
    """Parameter name -> weights of a model, read from the files at each access. adapter: LoRA weights, in memory."""

    def __init__(self, model: Any, folder: Path, adapter: Mapping[str, torch.Tensor]) -> None:
        self.checkpoint, self.adapter = Checkpoint.open(folder), adapter
        self.names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def __getitem__(self, name: str) -> torch.Tensor:
        if ".lora_" in name:
            return self.adapter[name.replace(".default.", ".")]
        tied = plain_name(name) == HEAD and self.checkpoint.tied_head
        wanted = name_in_memory(EMBEDDING if tied else plain_name(name))
        return self.checkpoint.tensor(next(one for one in self.checkpoint.infos if name_in_memory(one) == wanted))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def load_saved(folder: Path, base: Path | None, model: Any) -> Any:
    """The saved model, or adapter on its base, with the dtype, attention and device of `model`, the one in training;
    its weights stay in their files until a module is used."""
    weights = folder
    if (folder / ADAPTER_CONFIG).is_file():
        assert base is not None
        weights = base
    with init_empty_weights(include_buffers=False):
        loaded: Any = AutoModelForCausalLM.from_config(
            load_config(weights),
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
        )
    adapter: dict[str, torch.Tensor] = {}
    if weights != folder:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, folder, low_cpu_mem_usage=True)
        adapter = load_file(folder / ADAPTER_WEIGHTS)
    stored = Stored(loaded, weights, adapter)
    attach_align_device_hook(loaded, execution_device=model.device, offload=True, weights_map=stored)
    return loaded


def was_cast(folder: Path, model: Any) -> bool:
    """Whether the weights in `folder` have another dtype than the trained parameters."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    stored = {info.dtype for file in folder.glob("*.safetensors") for info in read_header(file).values()}
    return {torch_dtype(dtype) for dtype in stored} != trained


def compute_logits(model: Any, ids: list[int], bf16: bool, device: torch.device) -> torch.Tensor:
    """Logits (tokens, vocabulary) in fp32 on the CPU, computed on `device`; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return model(input_ids=torch.tensor([ids], device=device)).logits[0].float().cpu()
    finally:
        model.train(training)
