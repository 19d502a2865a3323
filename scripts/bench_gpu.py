#!/usr/bin/env python
"""What estimate/flops.py predicts next to what one GPU does, with random weights at the shape of Llama 3.1 8B.

    python scripts/bench_gpu.py                        # at most 19 minutes; writes results/bench/gpu.json
    python scripts/bench_gpu.py --size tiny --out FILE # on a CPU, a minute or two: does it work
    python scripts/bench_gpu.py --parts card,sweep     # some parts alone, each less than 5 minutes, after card

Parts, each a process of its own with a time budget, so that one that fails or runs out of memory loses nothing else;
the record is written anew after each measurement, with what failed and why:

- card: rates of bf16 and fp32 matrix products, bandwidth of the card's memory and to it: the rest is held against them.
- launch: milliseconds that launching a layer costs in decoding, eager and as a CUDA graph, against flops.LAUNCH.
- decode: tokens a second and share of the bandwidth of decoding steps, with the prefix of 8 exemplars read by each row,
  read once with one softmax, and read once and merged by log-sum-exp; each eager and as a CUDA graph.
- sweep: live merges of 27 configurations of a layer swap (disk: 16 GB); all MGSM questions of sw te bn ja in two of
  them, with CUDA graphs; from these the minutes of 27 configurations x 4 languages (predicted: by the data sheet).
- ties: TIES of two experts of two layers, by the pipeline on the CPU and in torch on the device; entries that differ.
- full: steps of full training (sequence 1,024, checkpointing, bf16 products): seconds, tokens a second, share of the
  matrix rate (FLOPs without recomputation), peak memory, of each choice of weights and optimizer that fits,
  and of a bare SFTTrainer.
- sides: the same of LoRA, partial A, B, C and simultaneous B, in bf16 with 8-bit moments.
- loss: forward and backward pass of a vocabulary of 256,000 (Aya) with TRL's fused head and without.
- scoring: eight exemplars before each question, shared and by the harness' HFLM; prefill and decode apart, the decode
  step against what the memory's bandwidth allows; four letters weighed. In bf16 and in fp32, as tables score.

full, sides, loss need trl and torchao; scoring lm-eval. scripts/bench_train.py, bench_eval.py and bench_gpu_decode.py
do the work. Where a row cannot be measured, such as CUDA graphs on a CPU, `not_tried` has the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.training import Sft
from pipeline.estimate import flops
from pipeline.models.shape import LLAMA_8B, Shape
from pipeline.train.memory import WIDTH, full_model, one_side, trained_parameters, training_memory

TINY = Shape(layers=8, width=32, inner=112, heads=8, kv_heads=4, head_width=4, vocabulary=1024)
NARROW = Shape(layers=1, width=256, inner=512, heads=4, kv_heads=2, head_width=64, vocabulary=1024)
SIZES: dict[str, dict[str, Any]] = {  # questions and new tokens: of scoring; matrix: width of the products of card;
    # depths, launch_steps: of launch; rows, scale (of MGSM's lengths): of decode; bottom (bottom_layers from): of sweep
    "8b": {
        "shape": LLAMA_8B, "batch": 4, "length": 1024, "steps": 4, "questions": 64, "new": 64, "matrix": 8192,
        "narrow": NARROW, "depths": (8, 32), "launch_steps": 25, "rows": (1, 32, 250), "decode_steps": 20,
        "scale": 1.0, "sweep_questions": 250, "bottom": 4,
    },
    "tiny": {
        "shape": TINY, "batch": 2, "length": 16, "steps": 2, "questions": 6, "new": 8, "matrix": 256,
        "narrow": NARROW, "depths": (1, 3), "launch_steps": 3, "rows": (3,), "decode_steps": 2,
        "scale": 1 / 16, "sweep_questions": 6, "bottom": 1,
    },
}  # fmt: skip
CHOICES = (("bfloat16", "adamw_8bit"), ("bfloat16", "adamw_bf16"), ("float32", "adamw_8bit"), ("float32", "adamw"))
SIDES = ("lora", "partial A math", "partial B math", "partial C math", "simultaneous B")
EXEMPLARS, EXEMPLAR, QUESTION = 8, 120, 88  # tokens: MGSM's in Japanese, between English and Bengali
BUDGETS = {  # seconds, as far as minutes are left
    "card": 40, "launch": 60, "decode": 120, "sweep": 280, "ties": 50, "full": 200, "sides": 190, "loss": 50,
    "scoring": 150,
}  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", choices=list(SIZES), default="8b")
    words.add_argument("--parts", default=",".join(BUDGETS))
    words.add_argument("--minutes", type=float, default=19.0)
    words.add_argument("--out", type=Path, default=Path("results/bench/gpu.json"))
    words.add_argument("--part", choices=list(BUDGETS), help=argparse.SUPPRESS)
    words.add_argument("--card", default="{}", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.part:
        for row in PARTS[asked.part](asked.size, json.loads(asked.card)):
            print(json.dumps(row), flush=True)
        return
    if unknown := set(asked.parts.split(",")) - set(BUDGETS):
        words.error(f"--parts {unknown.pop()}: choose from {', '.join(BUDGETS)}")
    measure(asked)


# ---------------------------------------------------------------------------------------------------- the record


def measure(asked: argparse.Namespace) -> None:
    """The parts one after the other, the card first: others are compared with it. The record grows row by row."""
    end = time.monotonic() + 60 * asked.minutes
    record: dict[str, Any] = {"size": asked.size, "card": {}, "rows": [], "failed": {}}
    asked.out.parent.mkdir(parents=True, exist_ok=True)

    def take(row: dict[str, Any]) -> None:
        if row["part"] == "card":
            record["card"] |= row
        else:
            record["rows"].append(row)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(line(row), flush=True)

    for part in dict.fromkeys(["card", *asked.parts.split(",")]):
        budget = min(BUDGETS[part], end - time.monotonic())
        reason = "no time left" if budget < 5 else run(part, asked.size, record["card"], budget, take)
        if reason:
            record["failed"][part] = reason
            print(f"{part}: {reason}", flush=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(asked.out)


def run(part: str, size: str, card: dict[str, Any], budget: float, take: Callable[[dict[str, Any]], None]) -> str:
    """One part in its own process; gives why it did not end well, or ''."""
    command = [sys.executable, __file__, "--part", part, "--size", size, "--card", json.dumps(card)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        late = threading.Timer(budget, lambda: os.killpg(process.pid, signal.SIGKILL))
        late.start()
        assert process.stdout is not None
        for told in process.stdout:
            if told.startswith("{"):
                take(json.loads(told))
        status = process.wait()
        ended = not late.is_alive()
        late.cancel()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no word"])[-1]
    return "" if not status else f"ended after its {budget:.0f} s" if ended else f"exit status {status}: {last[:300]}"


def line(row: dict[str, Any]) -> str:
    """A row in words: predicted and measured side by side."""
    if row["part"] == "card":
        rates = ", ".join(f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float))
        return f"{row['device']}: {rates}"
    pairs = [f"{what} {found['predicted']:.3g} predicted" for what, found in row["compared"].items()]
    pairs = [
        f"{pair}, {found['measured']:.3g} measured" for pair, found in zip(pairs, row["compared"].values(), strict=True)
    ]
    more = [f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float | int)]
    return f"{row['part']}, {row['name']}: " + "; ".join(
        [*pairs, *more, *([row["not_tried"]] if "not_tried" in row else [])]
    )


def both(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured}


def gpu_of(card: dict[str, Any]) -> flops.Gpu:
    """The card by its data sheet where cost.py has one, else by what was measured of it."""
    for name, gpu in {"A100": "a100_80", "H200": "h200_141", "H100": "h100_80"}.items():
        if name in card.get("device", ""):
            return flops.GPUS[gpu]
    rates = {key: card.get(key, 1e10) for key in ("bf16", "fp32", "bandwidth")}
    return flops.Gpu(**rates, memory=card.get("memory", 2**33))


# ---------------------------------------------------------------------------------------------------- the card


def card(size: str, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import torch

    from pipeline.runs.provenance import machine_facts, package_versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = SIZES[size]["matrix"]
    found: dict[str, Any] = {"part": "card", "machine": machine_facts(), "versions": package_versions()}
    found["device"] = found["machine"]["device"]
    found["memory"] = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**33
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a = torch.randn(width, width, device=device, dtype=dtype)
        found[name] = 2.0 * width**3 / fastest(lambda a=a: a @ a)
    values = torch.zeros(2**16 * width, device=device)
    there = torch.empty_like(values)
    found["bandwidth"] = 2.0 * values.nbytes / fastest(lambda: there.copy_(values))
    host = values.cpu()
    found["from_host"] = values.nbytes / fastest(lambda: there.copy_(host))
    yield found


def fastest(work: Callable[[], Any]) -> float:
    """Seconds, the best of ten."""
    times = []
    for _ in range(10):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begun)
    return min(times)


def wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------- training


def full(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for weights, optimizer in CHOICES:
        yield one_way("full", weights, optimizer, size, card)
    yield one_way("bare", *CHOICES[0], size, card)


def sides(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in SIDES:
        yield one_way(name, "bfloat16", "adamw" if name == "lora" else "adamw_8bit", size, card)


def one_way(name: str, weights: str, optimizer: str, size: str, card: dict[str, Any]) -> dict[str, Any]:
    """Steps of one way to train. What does not fit by the formula is not tried; what does not after all, is said."""
    import torch

    bench = importlib.import_module("bench_train")
    given, gpu = SIZES[size], gpu_of(card)
    shape = given["shape"]
    tokens = given["batch"] * given["length"]
    knobs, partition = bench.all_ways(shape.layers).get(name, ({}, None))  # a bare SFTTrainer is none of them
    rank = 64 if "lora" in name else 0
    moved = [full_model(shape)]
    if partition:
        wanted = ("math", "language") if name.startswith("simultaneous") else (name.split()[-1],)
        moved = [one_side(shape, partition, side) for side in wanted]
    of_training = {"lora_rank": rank, "weights": weights, "optimizer": optimizer}
    rows = (given["batch"], given["length"], given["batch"])  # one step
    seconds = sum(flops.training_seconds(shape, one, *rows, gpu, **of_training) for one in moved) / len(moved)
    trained = sum(trained_parameters(shape, one, rank) for one in moved)
    recipe = Sft(
        name=name, batch_size=given["batch"], weights=weights, optimizer=optimizer, precision="bf16",
        gradient_checkpointing=True, adapter="lora" if rank else "none",
    )  # fmt: skip
    memory = training_memory(shape, moved, given["length"], recipe)
    row: dict[str, Any] = {
        "part": "training",
        "name": f"{name}, {weights}, {optimizer}",
        "compared": {},
        "memory": memory,
    }
    needed = sum(memory.values())
    if needed > card.get("memory", gpu.memory):
        return row | {"not_tried": f"{needed / 1e9:.0f} GB needed, {card.get('memory', gpu.memory) / 1e9:.0f} there"}
    options = argparse.Namespace(
        shape="8b" if size == "8b" else None, width=shape.width, layers=shape.layers, batch=given["batch"],
        length=given["length"], steps=given["steps"], weights=weights, optimizer=optimizer, precision="bf16",
        checkpointing=True,
    )  # fmt: skip
    try:
        times, facts = bench.one(name, (knobs, partition), bench.base_model(options), options)
    except torch.OutOfMemoryError as error:
        return row | {"not_tried": f"out of memory: {str(error)[:120]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    step = sum(times) / len(times)
    row["compared"] = {"seconds a step": both(seconds, step), "parameters trained": both(trained, facts["trained"])}
    if torch.cuda.is_available():
        row["compared"]["GB at most"] = both((needed - memory["context"]) / 1e9, facts["peak_gb"] * 2**30 / 1e9)
    row["tokens_a_second"] = tokens / step
    row["share_of_matrix_rate"] = facts["useful_flops"] / step / card.get("bf16", gpu.bf16)
    return row


def loss(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Loss and gradients of two layers at the width and vocabulary of Aya Expanse 8B, with and without the fused head.

    Predicted: weights and gradients, and without the fused head 8 bytes a logit (bf16 logits and their gradient, and a
    copy in float32 from which the loss is computed), a lower bound.
    """
    import torch

    from pipeline.train.trainer import weigh_only_labels

    given = SIZES[size]
    decoding = importlib.import_module("bench_gpu_decode")
    shape = replace(given["shape"], layers=2, vocabulary=256_000 if size == "8b" else 2_000)
    model = decoding.random_model(shape, torch.bfloat16).train()
    weigh_only_labels(model)
    ids = torch.randint(4, shape.vocabulary, (given["batch"], given["length"]), device=model.device)

    def step(fused: bool) -> None:
        model.zero_grad(set_to_none=True)
        found = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=fused)
        (-found.log_probs.mean() if fused else found.loss).backward()

    for name, fused in (("fused head", True), ("transformers", False)):
        row: dict[str, Any] = {"part": "loss", "name": f"loss, vocabulary {shape.vocabulary}, {name}", "compared": {}}
        try:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            row["seconds"] = decoding.seconds_a_step(lambda fused=fused: step(fused), given["steps"])
        except torch.OutOfMemoryError as error:
            yield row | {"not_tried": f"out of memory: {str(error)[:120]}"}
            continue
        row["tokens_a_second"] = ids.numel() / row["seconds"]
        if torch.cuda.is_available():
            least = 4 * shape.parameters + (0 if fused else 8 * ids.numel() * shape.vocabulary)
            row["compared"] = {"GB at most": both(least / 1e9, torch.cuda.max_memory_allocated() / 1e9)}
        else:
            row["peak_memory"] = "torch counts it on a GPU alone"
        yield row


# ---------------------------------------------------------------------------------------------------- scoring


def scoring(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import torch

    bench = importlib.import_module("bench_eval")
    from lm_eval.api.instance import Instance

    given, gpu = SIZES[size], gpu_of(card)
    batch = min(32, given["questions"])
    tokenizer = words_of_their_own()
    few = EXEMPLARS if size == "8b" else 1
    prompts = [" ".join(f"w{(7 * n) % 900}" for n in range(few * EXEMPLAR))] * given["questions"]
    prompts = [
        f"{prefix} " + " ".join(f"w{(number + 13 * n) % 900}" for n in range(QUESTION))
        for number, prefix in enumerate(prompts)
    ]
    settings = {"until": ["Question:"], "do_sample": False, "max_gen_toks": given["new"]}
    asked = {
        "generate_until": [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts],
        "loglikelihood": [Instance("loglikelihood", {}, (p, f" w{n}"), 0) for p in prompts for n in range(4)],
    }
    for dtype in ("bfloat16", "float32"):
        bench.SIZES[size] = (*bench.SIZES[size][:5], getattr(torch, dtype), *bench.SIZES[size][6:])
        model = bench.model_of(size, "cuda" if torch.cuda.is_available() else "cpu")
        ours = bench.Answering(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        ours.share_prefix = True
        ways = {"shared": ours}
        if dtype == "bfloat16":
            ways["HFLM"] = bench.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        bench.timed(ours, "generate_until", asked["generate_until"][:2])  # what is done once is not measured
        shape = replace(given["shape"], **sizes_of(model))
        for method, requests in asked.items():
            new = given["new"] if method == "generate_until" else 0
            for way, lm in ways.items():
                shared = (few * EXEMPLAR, QUESTION) if way == "shared" else (0, few * EXEMPLAR + QUESTION)
                kind = flops.QuestionSet(given["questions"], *shared, new / flops.LONGEST, room=new)
                prefill, decode = flops.scoring_seconds(shape, [kind], gpu, dtype, batch)
                _, spent = bench.timed(lm, method, requests)
                compared = {"prefill seconds": both(prefill, spent["prefill_seconds"])}
                row = {
                    "part": "scoring",
                    "name": f"{method}, {way}, {dtype}",
                    "compared": compared,
                    "seconds": spent["seconds"],
                }
                if new:
                    compared["decode seconds"] = both(decode, spent["decode_seconds"])
                    steps = max(spent["decode_steps"], 1)
                    tokens = few * EXEMPLAR + QUESTION + new / 2
                    weights = shape.layers * shape.layer + shape.embedding
                    moved = (weights + batch * tokens * shape.kv_values) * WIDTH[dtype]
                    row["decode_step_ms"] = 1e3 * spent["decode_seconds"] / steps
                    row["limit_of_bandwidth_ms"] = 1e3 * moved / card.get("bandwidth", gpu.bandwidth)
                yield row
        del model, ours, ways, lm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sizes_of(model: Any) -> dict[str, int]:
    """What bench_eval's small model has of a shape."""
    config = model.config
    return {
        "layers": config.num_hidden_layers, "width": config.hidden_size, "inner": config.intermediate_size,
        "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads,
        "head_width": config.hidden_size // config.num_attention_heads, "vocabulary": config.vocab_size,
    }  # fmt: skip


def words_of_their_own() -> Any:
    """A tokenizer of 1,000 words, so that tokens are counted by hand."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{n}": 4 + n for n in range(1000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


# ---------------------------------------------------------------------------------------------------- decoding


def launch(size: str, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return importlib.import_module("bench_gpu_decode").launch(SIZES[size])


def decode(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    bandwidth = card.get("bandwidth", gpu_of(card).bandwidth)
    return importlib.import_module("bench_gpu_decode").decode(SIZES[size], bandwidth)


def sweep(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return importlib.import_module("bench_gpu_decode").sweep(SIZES[size], gpu_of(card))


# ---------------------------------------------------------------------------------------------------- merging


def ties(size: str, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """TIES into a model in memory by the pipeline, which reads files and computes on the CPU, and on the device."""
    import torch
    from safetensors.torch import load_file

    from pipeline.merge.live import Live
    from pipeline.merge.merge import open_merge
    from pipeline.merge.methods.ties import Ties
    from pipeline.models.checkpoint import Checkpoint

    decoding = importlib.import_module("bench_gpu_decode")
    model = decoding.random_model(replace(SIZES[size]["shape"], layers=2, vocabulary=1024), torch.bfloat16)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / role for role in ("base", "0", "1")]
        for folder in folders:
            model.save_pretrained(folder)
            for parameter in parameters.values():
                parameter += 0.01 * torch.randn_like(parameter)
        given = [load_file(folder / "model.safetensors", str(model.device)) for folder in folders]
        base, *experts = (Checkpoint.open(folder) for folder in folders)
        config = Ties(experts=["0", "1"])
        merge = open_merge(config, {str(role): expert for role, expert in enumerate(experts)}, base)
        begun = time.perf_counter()
        Live(model, None).apply(merge)
        wait()
        spent = time.perf_counter() - begun
    for _ in range(2):  # what is done once is not measured
        wait()
        begun = time.perf_counter()
        merged = ties_on_device(given[0], given[1:], config.density)
        wait()
    row = {"seconds_of_pipeline": spent, "seconds_on_device": time.perf_counter() - begun}
    different = sum(int((parameters[name] != tensor).sum()) for name, tensor in merged.items())
    entries = sum(tensor.numel() for tensor in merged.values())
    yield {"part": "ties", "name": "TIES", "compared": {}, **row, "different_entries": different, "entries": entries}


def ties_on_device(base: dict[str, Any], experts: list[dict[str, Any]], density: float) -> dict[str, Any]:
    """TIES (Yadav et al. 2023, section 3) in float32 as merge=ties defines it: the density is the whole model's, where
    signs cancel the model's majority is elected, and the mean is over the experts that agree."""
    import torch

    from pipeline.merge.ties import kept_count

    def vector(expert: dict[str, Any], name: str) -> Any:
        return expert[name].float() - base[name].float()

    def limit(expert: dict[str, Any]) -> Any:
        magnitudes = torch.cat([vector(expert, name).abs().flatten() for name in base]).sort().values
        return magnitudes[-kept_count(density, len(magnitudes))].clone()

    limits = [limit(expert) for expert in experts]

    def trimmed(name: str) -> Any:
        vectors = torch.stack([vector(expert, name) for expert in experts])
        return vectors * (vectors.abs() >= torch.stack(limits).view(-1, *[1] * base[name].ndim))

    balance = sum(trimmed(name).sum(0).sign().sum(dtype=torch.float64) for name in base)
    merged = {}
    for name in base:
        vectors = trimmed(name)
        total = vectors.sum(0)
        positive = (total > 0) | ((total == 0) & (balance >= 0))
        agrees = torch.where(positive, vectors > 0, vectors < 0)
        mean = (vectors * agrees).sum(0) / agrees.sum(0).clamp(min=1)
        merged[name] = (base[name].float() + mean).to(base[name].dtype)
    return merged


PARTS = {
    "card": card, "launch": launch, "decode": decode, "sweep": sweep, "ties": ties, "full": full, "sides": sides,
    "loss": loss, "scoring": scoring,
}  # fmt: skip


if __name__ == "__main__":
    main()
