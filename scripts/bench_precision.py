#!/usr/bin/env python
"""What each choice of dtype and optimizer keeps of a task vector: trained once each, same batches, against fp32.

    python scripts/bench_precision.py                       # 30M parameters, rate 1e-7, 200 steps of 1,024 tokens
    python scripts/bench_precision.py --layers 2 --width 64 --steps 20 --record ''     # to see that it works
    python scripts/bench_precision.py --moments             # the second part alone, into the record that is there

A random Llama reads text drawn from a fixed table of word pairs, so that there is something to learn. With d the task
vector of a choice and r that of fp32: projection = <d, r> / <r, r>, cosine, L1 ratio = |d|_1 / |r|_1, L2 ratio, and the
share of entries that never moved. A choice is sound where the projection is within 10 % of 1. Stochastic rounding adds
noise of one bfloat16 step to entries that move less: its L1 and L2 are large and its cosine small at a rate of 1e-7,
which is what it pays for being right in the mean.

The second part: moments rounded to nearest cannot follow gradients that shrink where beta2 is near 1. A matrix of 4,096
learns from noise with a bias for 300 steps, then from a tenth of it for 1,200: the projection of these, against fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.training import Sft
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.train.memory import BYTES
from pipeline.train.optim import torchao_optimizer

CHOICES = [  # (weights, optimizer, autocast)
    ("float32", "adamw", False), ("float32", "adamw", True), ("float32", "adamw_8bit", True),
    ("bfloat16", "adamw", False), ("bfloat16", "adamw_bf16", False), ("bfloat16", "adamw_8bit", False),
]  # fmt: skip
BETAS = (0.95, 0.99, 0.995, 0.997, 0.999)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--width", type=int, default=512)
    asked.add_argument("--layers", type=int, default=8)
    asked.add_argument("--vocabulary", type=int, default=8192)
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--tokens", type=int, default=1024, help="a step, in rows of 256")
    asked.add_argument("--rate", type=float, default=1e-7)
    asked.add_argument("--moments", action="store_true")
    asked.add_argument("--record", default="results/bench/precision.json", help="where to; '' for nowhere")
    options = asked.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    found = {"moments": moments()}
    if not options.moments:
        found |= trained(options, device)
    if options.record:
        path = Path(options.record)
        path.parent.mkdir(parents=True, exist_ok=True)
        was = json.loads(path.read_text()) if options.moments and path.is_file() else {}
        made = {"machine": machine_facts(), "versions": package_versions()}
        path.write_text(json.dumps(was | made | found, indent=1) + "\n")


def trained(options: Any, device: str) -> dict[str, Any]:
    """The first part: settings, the number of parameters, and a row a choice."""
    rows: list[dict[str, Any]] = []
    reference = None
    for weights, optimizer, autocast in CHOICES:
        moved, loss, count = train(weights, optimizer, autocast, options, device)
        reference = moved if reference is None else reference
        row = {
            "weights": weights, "optimizer": optimizer, "autocast": autocast, "bytes": BYTES[weights, optimizer],
            **compare(moved, reference), "loss": loss,
        }  # fmt: skip
        rows.append(row)
        if len(rows) == 1:
            print(f"{count / 1e6:.1f}M parameters, {options.steps} x {options.tokens} tokens, rate {options.rate:g}")
            print(f"{'weights':9} {'optimizer':11} autocast " + " ".join(f"{key:>10}" for key in list(row)[3:]))
        cells = " ".join(f"{value:10.4g}" for value in list(row.values())[3:])
        print(f"{weights:9} {optimizer:11} {autocast!s:8} {cells}", flush=True)
    return {"settings": vars(options), "parameters": count, "rows": rows}


def moments() -> list[dict[str, Any]]:
    rows = []
    for beta2 in BETAS:
        reference = shrinking("float32", "adamw", beta2)
        row = {
            optimizer: compare(shrinking("bfloat16", optimizer, beta2), reference)["projection"]
            for optimizer in ("adamw_bf16", "adamw_8bit")
        }
        rows.append({"beta2": beta2, **row})
        print(f"beta2 {beta2}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    return rows


def shrinking(weights: str, optimizer: str, beta2: float) -> torch.Tensor:
    """How far a matrix moves once its gradients have become a tenth."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(64, 64, generator=generator)
    weight = torch.nn.Parameter(
        torch.randn(64, 64, generator=generator).mul(0.02).bfloat16().to(getattr(torch, weights))
    )
    made = optimizer_of([weight], weights, optimizer, 1e-4, beta2, weight_decay=0.0)
    for step in range(1500):
        if step == 300:
            before = weight.detach().float().clone()
        gradient = (torch.randn(64, 64, generator=generator) + 0.5 * bias) * (1.0 if step < 300 else 0.1)
        weight.grad = gradient.to(weight.dtype)
        made.step()
    return (weight.detach().float() - before).reshape(-1)


def optimizer_of(parameters: Any, weights: str, optimizer: str, rate: float, beta2: float, weight_decay: float) -> Any:
    """As a training has it."""
    sft = Sft(name="bench", weights=weights, optimizer=optimizer, learning_rate=rate, adam_beta2=beta2)
    if optimizer == "adamw":
        betas = (sft.adam_beta1, sft.adam_beta2)
        return torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=True)
    kind, settings = torchao_optimizer(sft)
    return kind(parameters, weight_decay=weight_decay, **settings)


def train(weights: str, optimizer: str, autocast: bool, options: Any, device: str) -> tuple[torch.Tensor, float, int]:
    """The task vector in float32 on the CPU, the last loss, and the number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.width, intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    # one start for all: values that bfloat16 holds
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).to(getattr(torch, weights))
    start = flat(model)
    made = optimizer_of(model.parameters(), weights, optimizer, options.rate, 0.99, weight_decay=0.1)
    loss = torch.zeros(())
    for ids in batches(options):
        ids = ids.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        made.zero_grad()
    return flat(model) - start, loss.item(), start.numel()


def flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).cpu()


def batches(options: Any) -> Any:
    """Rows of 256 ids in which each word has eight followers, of a table drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    followers = torch.randint(options.vocabulary, (options.vocabulary, 8), generator=generator)
    for _ in range(options.steps):
        columns = [torch.randint(options.vocabulary, (options.tokens // 256,), generator=generator)]
        for _ in range(255):
            pick = torch.randint(8, columns[-1].shape, generator=generator)
            columns.append(followers[columns[-1], pick])
        yield torch.stack(columns, dim=1)


def compare(moved: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    dot, size = (moved.double() @ reference.double()).item(), reference.double().norm().item()
    own = moved.double().norm().item()
    return {
        "projection": dot / size**2, "cosine": dot / (own * size) if own else 0.0,
        "L1_ratio": (moved.abs().sum() / reference.abs().sum()).item(), "L2_ratio": own / size,
        "unmoved": (moved == 0).float().mean().item(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
