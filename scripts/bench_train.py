#!/usr/bin/env python
"""Steps of each way to train against full, and of full against a bare SFTTrainer, beside what a count of FLOPs allows.

    python scripts/bench_train.py                                   # a small Llama on this machine's CPU
    python scripts/bench_train.py --width 64 --layers 4 --rounds 2 --steps 4 --record ''     # to see that it works
    python scripts/bench_train.py --shape 8b --weights bfloat16 --optimizer adamw_8bit --checkpointing    # on a GPU

Paired and interleaved: in each round every way trains once, a few steps, from the same weights on the same rows, and
a ratio is taken within a round; medians over rounds with the smallest and largest. The first two steps of each are not
counted. Our own part of a step is the difference to the bare trainer on a model of four narrow layers, means over 60
steps. Columns: ms a step; speed against full; the FLOP model's
ceiling of it; their quotient (0.9 is aimed for); bytes of optimizer state a trained parameter; on a GPU the share of
the matrix rate (the model's FLOPs without recomputation / step time / rate of a bf16 product of two 8192 x 8192
matrices, measured here) and peak memory. Then the bytes a parameter of each choice of weights and optimizer, counted
after a step, and on a GPU the peak of each, or that it does not fit.

The FLOP model, a token: 2 P forward for each matrix of P weights and 4 s w for attention over s positions of width w;
the same again for the gradient of its input, wherever a trained parameter lies below, and of its weights, where they
are trained (attention: twice the forward, from the lowest trained layer up). Recomputation adds the forward of the
layers from the lowest trained one up. Adapters add their own products.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import SFTTrainer

from pipeline.config.data import Data, Expert
from pipeline.config.stages import TrainStage
from pipeline.config.training import Model, Partition, Sft
from pipeline.models.partition import scaled_count
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.train.memory import BYTES
from pipeline.train.optim import torchao_optimizer
from pipeline.train.recipe import plan_steps, trainer_arguments
from pipeline.train.stage import silence_warnings
from pipeline.train.trainable import choose_parameters
from pipeline.train.trainer import Trainer

SHAPES = {"8b": dict(width=4096, inner=14336, layers=32, heads=32, groups=8, vocabulary=128256)}
Way = tuple[dict[str, Any], Partition | None]  # knobs of sft
PARTITIONS = {"A": (6, 2, True), "B": (8, 4, False), "C": (6, 2, False)}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--shape", choices=list(SHAPES))
    asked.add_argument("--width", type=int, default=192)
    asked.add_argument("--layers", type=int, default=16)
    asked.add_argument("--batch", type=int, default=4)
    asked.add_argument("--length", type=int, default=128)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--steps", type=int, default=8, help="counted, a round and way")
    asked.add_argument("--ways", nargs="*", help="of those below; default: all")
    asked.add_argument("--weights", default="float32")
    asked.add_argument("--optimizer", default="adamw")
    asked.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    asked.add_argument("--checkpointing", action="store_true")
    asked.add_argument("--record", default="results/bench/train.json", help="where to; '' for nowhere")
    options = asked.parse_args()
    silence_warnings()

    ways = {name: way for name, way in all_ways(options.layers).items() if not options.ways or name in options.ways}
    base = base_model(options)
    ways = {"full": ways.get("full", ({}, None)), **ways}
    times: dict[str, list[float]] = {name: [] for name in ("bare", *ways)}
    facts: dict[str, dict[str, float]] = {name: {} for name in times}
    for number in range(options.rounds):
        for name in times if number % 2 else reversed(times):  # what comes first gains nothing by it
            steps, facts[name] = one(name, ways.get(name, ({}, None)), base, options)
            times[name].append(statistics.median(steps))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    del base  # what is measured from here on has the GPU to itself
    rows = show(times, facts)
    extra = overhead(options)
    told = f"{statistics.median(extra):.2f} ms ({min(extra):.2f} to {max(extra):.2f})"
    print(f"ours over the bare SFTTrainer, a step: {told}; speed against it {1 / rows[0]['speed']:.3f}", flush=True)
    record = {
        "settings": vars(options), "machine": machine_facts(), "versions": package_versions(),
        "matrix_rate": matrix_rate(),
        "rows": rows, "overhead_ms": extra, "choices": choices(options),
    }  # fmt: skip
    if options.record:
        Path(options.record).parent.mkdir(parents=True, exist_ok=True)
        Path(options.record).write_text(json.dumps(record, indent=1) + "\n")


def overhead(options: Any) -> list[float]:
    """Milliseconds a step of full over the bare trainer on a small model, a round each."""
    small = {"shape": None, "width": 64, "layers": 4, "batch": 2, "length": 32, "steps": 60, "checkpointing": False}
    options = argparse.Namespace(**{**vars(options), **small})
    base, found = base_model(options), []
    for _ in range(options.rounds):
        bare, full = (statistics.mean(one(name, ({}, None), base, options)[0]) for name in ("bare", "full"))
        found.append(1e3 * (full - bare))
    return found


def choices(options: Any) -> list[dict[str, Any]]:
    """Bytes a parameter of each choice of weights and optimizer under full, as they lie there; on a GPU the peak."""
    rows = []
    print(f"\n{'weights':9} {'optimizer':11} {'bytes':>6} {'measured':>9} {'peak GB':>8}")
    for (weights, optimizer), expected in BYTES.items():
        chosen = argparse.Namespace(**{**vars(options), "weights": weights, "optimizer": optimizer, "steps": 2})
        row: dict[str, Any] = {"weights": weights, "optimizer": optimizer, "bytes": expected}
        try:
            base = base_model(chosen)
            facts = one("full", ({}, None), base, chosen)[1]
            row["measured"] = 2 * base.dtype.itemsize + facts["state_bytes"] / facts["trained"]  # gradients as weights
            row["peak_gb"] = facts["peak_gb"]
            print(f"{weights:9} {optimizer:11} {expected:6} {row['measured']:9.2f} {row['peak_gb']:8.1f}", flush=True)
        except torch.OutOfMemoryError:
            print(f"{weights:9} {optimizer:11} {expected:6}  does not fit", flush=True)
        rows.append(row)
        base = None  # before the next takes its room
    return rows


def all_ways(layers: int) -> dict[str, Way]:
    """name -> (knobs of sft, partition), with the papers' counts scaled to this depth."""
    cuts = {
        name: Partition(name, scaled_count(bottom, layers), scaled_count(top, layers), all_attention)
        for name, (bottom, top, all_attention) in PARTITIONS.items()
    }
    ways: dict[str, Way] = {"full": ({}, None), "lora": ({"adapter": "lora"}, None)}
    for name, cut in cuts.items():
        for side in ("math", "language"):
            ways[f"partial {name} {side}"] = ({"method": "partial", "side": side}, cut)
        ways[f"simultaneous {name}"] = ({"method": "simultaneous"}, cut)
    ways["partial_lora B math"] = ({"method": "partial", "side": "math", "adapter": "lora"}, cuts["B"])
    return ways


def base_model(options: Any) -> Any:
    """A random Llama in the dtype it is trained in, on the device."""
    shape = SHAPES.get(options.shape) or dict(
        width=options.width, inner=options.width * 7 // 2, layers=options.layers, heads=8, groups=4, vocabulary=1024
    )
    options.layers = shape["layers"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["width"], intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["groups"],
        max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, options.weights))


class Clock(TrainerCallback):
    """The time of each step, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        """Without the first two."""
        return [end - begin for begin, end in zip(self.ends[1:], self.ends[2:], strict=False)]


def one(
    name: str, way: tuple[dict[str, Any], Partition | None], base: Any, options: Any
) -> tuple[list[float], dict[str, float]]:
    """Seconds of the steps, and what is constant: FLOPs a step, state bytes, trained parameters, peak memory."""
    knobs, partition = way
    steps = options.steps + 2 + options.steps % 2  # as many of each side
    sft = Sft(
        name=name, weights=options.weights, optimizer=options.optimizer, precision=options.precision,
        gradient_checkpointing=options.checkpointing, batch_size=options.batch, seq_length=options.length,
        learning_rate=1e-6, schedule="constant", steps=steps, **knobs,
    )  # fmt: skip
    if torch.cuda.is_available():
        gc.collect()  # trainers hold themselves in circles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base.requires_grad_(True)
    model, parts = choose_parameters(base, sft, partition)
    expert = Expert(name="e", side="math")
    stage = TrainStage(stage="sft", model=Model(name="m"), expert=expert, data=Data(), sft=sft, partition=partition)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_arguments(stage, text=False, validated=False, output=Path(folder))
        rows = examples(options, base.config.vocab_size, steps)
        shared: dict[str, Any] = {"model": model, "args": args, "processing_class": sandbox_tokenizer()}
        if options.optimizer != "adamw":
            shared["optimizer_cls_and_kwargs"] = torchao_optimizer(sft)
        trainer: Any
        if name == "bare":
            trainer = SFTTrainer(train_dataset=rows, **shared)
        else:
            trainer = Trainer(train_dataset=dict.fromkeys(parts, rows), sft=sft, parts=parts, **shared)
        plan_steps(args, sft, steps)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    trained = {name for names in parts.values() for name in names}
    facts = {
        "flops": statistics.mean(flops(model, set(names), options) for names in parts.values()),
        "useful_flops": statistics.mean(
            flops(model, set(names), options, recomputed=False) for names in parts.values()
        ),
        "trained": sum(p.numel() for name, p in model.named_parameters() if name in trained),
        "state_bytes": state_bytes(trainer.optimizer),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }
    if hasattr(model, "unload"):
        model.unload()
    return clock.steps, facts


def examples(options: Any, vocabulary: int, steps: int) -> Dataset:
    """Full rows of random tokens, as the trainer keeps them."""
    generator = torch.Generator().manual_seed(0)
    size = (steps * options.batch, options.length)
    ids = torch.randint(4, vocabulary, size, generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def flops(model: Any, trained: set[str], options: Any, recomputed: bool = True) -> float:
    """Of one step that moves `trained`, by the model of the docstring."""
    tokens, total = options.batch * options.length, 0.0
    layers = [int(name.split(".layers.")[1].split(".")[0]) for name in trained if ".layers." in name]
    outside = any(".embed_tokens." in name for name in trained)
    lowest = 0 if outside else min(layers, default=10**9)
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2 or ".embed_tokens." in name:
            continue
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 10**9
        first = layer == lowest and not outside and any(part in name for part in ("q_proj", "k_proj", "v_proj"))
        forward = 2.0 * parameter.numel() * tokens
        total += forward
        if layer >= lowest:
            total += 0.0 if first else forward
            total += forward if options.checkpointing and recomputed and layer < 10**9 else 0.0
        total += forward if name in trained else 0.0
    config = model.config
    attention = 4.0 * options.length * config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        again = 2 + (1 if options.checkpointing and recomputed else 0) if layer >= lowest else 0
        total += attention * tokens * (1 + again)
    return total


def state_bytes(optimizer: Any) -> int:
    tensors = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    return sum(
        t.codes.nbytes + t.scale.nbytes if hasattr(t, "codes") else t.numel() * t.element_size() for t in tensors
    )


def matrix_rate() -> float | None:
    """FLOP/s of a bf16 product on the GPU, the best of ten; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    best = 1e9
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return 2 * 8192**3 / best


def show(times: dict[str, list[float]], facts: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The table of ways, printed; its rows."""
    rate = matrix_rate()
    rows = []
    print(
        f"{'way':22} {'ms/step':>9} {'speed against full (range)':>28} {'ceiling':>8} {'of it':>6} {'bytes':>6}", end=""
    )
    print(f" {'of rate':>8} {'peak GB':>8}" if rate else "")
    for name, seconds in times.items():
        ratios = [full / mine for full, mine in zip(times["full"], seconds, strict=True)]
        ceiling = facts["full"]["flops"] / facts[name]["flops"]
        speed = statistics.median(ratios)
        row = {
            "way": name, "ms": 1e3 * statistics.median(seconds), "speed": speed, "least": min(ratios),
            "most": max(ratios), "ceiling": ceiling, "of_ceiling": speed / ceiling,
            "state_bytes_a_trained_parameter": facts[name]["state_bytes"] / facts[name]["trained"], **facts[name],
        }  # fmt: skip
        spread = f"{speed:.3f} ({row['least']:.3f} to {row['most']:.3f})"
        line = f"{name:22} {row['ms']:9.2f} {spread:>28} {ceiling:8.3f} {row['of_ceiling']:6.2f}"
        line += f" {row['state_bytes_a_trained_parameter']:6.2f}"
        if rate:
            row["of_rate"] = facts[name]["useful_flops"] / statistics.median(seconds) / rate
            line += f" {row['of_rate']:8.3f} {facts[name]['peak_gb']:8.1f}"
        rows.append(row)
        print(line)
    return rows


if __name__ == "__main__":
    main()
