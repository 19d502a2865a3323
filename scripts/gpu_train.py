"""Measure tokens per second of training steps on a GPU at the shape of an 8B Llama.

    python scripts/gpu_train.py [--record FILE]
                                [--tiny]    # a quick check, which also runs on a CPU

Weights are random and made on the device. A step is a forward and a backward pass in bfloat16
autocast, with the loss over parts of the vocabulary's logits at a time and without an optimizer.
Each variant prints its loss and the sum of its gradients' sizes. Equal bits show that a variant
computes the same values.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_evaluate import DEVICE, LLAMA_8B, TINY, build, report, synchronize
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FULL = {"base": "bfloat16", "lora": False}
NARROW = {"base": "narrow", "casts": False}
DETERMINISTIC = {"deterministic": True}
SHORT_ROWS = {"rows": 23, "length": 350}
# Variants of a step of 8,192 tokens
VARIANTS: tuple[dict[str, Any], ...] = (
    {"what": "full, bfloat16 weights", **FULL},
    {"what": "LoRA, float32 base", "base": "float32"},
    {"what": "LoRA, frozen matrices in bfloat16", "base": "narrow"},
    {"what": "LoRA, frozen matrices in bfloat16, inputs not cast", **NARROW},
    {"what": "the same, deterministic", **NARROW, **DETERMINISTIC},
    {
        "what": "the same, deterministic, memory not filled",
        **NARROW,
        **DETERMINISTIC,
        "fill": False,
    },
    {"what": "LoRA, narrow, not cast, no checkpointing, 2 rows", **NARROW, "keep": True, "rows": 2},
    {"what": "LoRA, narrow, not cast, compiled", **NARROW, "compiled": True},
    {"what": "LoRA, narrow, not cast, rows of 350", **NARROW, **SHORT_ROWS},
    {"what": "full, bfloat16 weights, compiled", **FULL, "compiled": True},
    {"what": "full, bfloat16 weights, no checkpointing, 1 row", **FULL, "keep": True, "rows": 1},
    {"what": "full, bfloat16 weights, rows of 350", **FULL, **SHORT_ROWS},
)


def prepared(sizes: dict[str, int], variant: dict[str, Any]) -> Any:
    model = build(sizes, torch.bfloat16)
    if variant["base"] != "bfloat16":
        model = model.float()
    if variant.get("lora", True):
        torch.manual_seed(1)
        config = LoraConfig(r=64, target_modules=TARGETS, init_lora_weights=False)
        model = get_peft_model(model, config)
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = variant.get("casts", True)
    if variant["base"] == "narrow":
        head = model.get_output_embeddings()
        for module in model.modules():
            if module is head or not isinstance(module, torch.nn.Linear):
                continue
            if not module.weight.requires_grad:
                module.weight.data = module.weight.data.bfloat16()
    if not variant.get("keep"):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def loss_of(model: Any, body: Any, ids: torch.Tensor) -> torch.Tensor:
    head = model.get_output_embeddings()

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(states).float(), labels, reduction="sum")

    with torch.autocast(DEVICE.type, torch.bfloat16):
        output = body(input_ids=ids, use_cache=False)[0]
        states = output[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        pairs = zip(states.split(2048), labels.split(2048), strict=True)
        losses = [checkpoint(part, *pair, use_reentrant=False) for pair in pairs]
        return sum(losses) / len(states)


def gradient_size(model: Any) -> float:
    """Return the sum of the absolute values of all gradients."""
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return float(sum(gradient.double().abs().sum() for gradient in gradients))


def measured(sizes: dict[str, int], variant: dict[str, Any], small: bool) -> dict[str, Any]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(variant.get("deterministic", False), warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = variant.get("fill", fills)
    model = prepared(sizes, variant)
    if variant.get("lora", True):
        body = model.get_base_model().model
    else:
        body = model.model
    if variant.get("compiled"):
        body = torch.compile(body)
    rows, length = variant.get("rows", 4), variant.get("length", 2048)
    if small:
        length = 32
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(5, sizes["vocab_size"], (rows, length), generator=draw).to(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, facts = [], {}
    for number in range(4):
        begun = time.perf_counter()
        loss = loss_of(model, body, ids)
        loss.backward()
        synchronize()
        times.append(time.perf_counter() - begun)
        if not number:
            facts = {"loss": float(loss), "gradients": gradient_size(model)}
        model.zero_grad(set_to_none=True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    peak = 0.0
    if DEVICE.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1e9
    speed = rows * length / min(times[1:])
    return {
        "what": variant["what"],
        "tokens_a_second": round(speed),
        "peak_gb": round(peak, 1),
        **facts,
    }


def all_measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    begun = time.monotonic()
    sizes = LLAMA_8B
    if asked.tiny:
        sizes = TINY
    for variant in VARIANTS:
        if time.monotonic() - begun > asked.seconds:
            yield {"what": variant["what"], "left_out": f"after {asked.seconds:g} s"}
            continue
        try:
            yield measured(sizes, variant, asked.tiny)
        except Exception as error:  # The memory is full, or a compiler is missing.
            message = f"{type(error).__name__}: {str(error)[:200]}"
            yield {"what": variant["what"], "error": message}
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=200, help="start no variant after this time"
    )
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    rows = []
    for row in all_measured(asked):
        rows.append(row)
        report(rows, asked.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
