#!/usr/bin/env python
"""What estimate/flops.py predicts beside what one GPU does, with random weights at the shape of Llama 3.1 8B.

    python scripts/bench_gpu.py                        # at most 9 minutes; writes results/bench/gpu.json
    python scripts/bench_gpu.py --size tiny --out FILE # on a CPU, a minute or less: does it work
    python scripts/bench_gpu.py --parts card,full      # some parts alone

Parts, each a process of its own with a time budget, so that one that fails or runs out of memory loses nothing else;
the record is written anew after each measurement, with what failed and why:

- card: rates of bf16 and fp32 matrix products, bandwidth of the card's memory and to it: the rest is held against them.
- full: steps of full training (sequence 1,024, checkpointing, bf16 products): seconds, tokens a second, share of the
  matrix rate (FLOPs without recomputation), peak memory, of each choice of weights and optimizer that fits.
- sides: the same of LoRA, partial A, B, C and simultaneous B, in bf16 with 8-bit moments.
- scoring: eight exemplars before each question, shared and by the harness' HFLM; prefill and decode apart, the decode
  step against what the memory's bandwidth allows; four letters weighed. In bf16 and in fp32, as tables score.
- live: from one configuration of a layer swap to the next on a model in memory (an eighth of the depth: disk).

full, sides need trl and torchao; scoring lm-eval. scripts/bench_train.py and bench_eval.py do the work.
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
SIZES: dict[str, dict[str, Any]] = {  # questions and new tokens: of scoring; matrix: width of the products of card
    "8b": {"shape": LLAMA_8B, "batch": 4, "length": 1024, "steps": 4, "questions": 64, "new": 64, "matrix": 8192},
    "tiny": {"shape": TINY, "batch": 2, "length": 16, "steps": 2, "questions": 6, "new": 8, "matrix": 256},
}
CHOICES = (("bfloat16", "adamw_8bit"), ("bfloat16", "adamw_bf16"), ("float32", "adamw_8bit"), ("float32", "adamw"))
SIDES = ("lora", "partial A math", "partial B math", "partial C math", "simultaneous B")
EXEMPLARS, EXEMPLAR, QUESTION = 8, 120, 88  # tokens: MGSM's in Japanese, between English and Bengali
BUDGETS = {"card": 60, "full": 200, "sides": 200, "scoring": 150, "live": 90}  # seconds, as far as minutes are left


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", choices=list(SIZES), default="8b")
    words.add_argument("--parts", default=",".join(BUDGETS))
    words.add_argument("--minutes", type=float, default=9.0)
    words.add_argument("--out", type=Path, default=Path("results/bench/gpu.json"))
    words.add_argument("--part", choices=list(BUDGETS), help=argparse.SUPPRESS)
    words.add_argument("--card", default="{}", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.part:
        for row in PARTS[asked.part](asked.size, json.loads(asked.card)):
            print(json.dumps(row), flush=True)
        return
    measure(asked)


# ---------------------------------------------------------------------------------------------------- the record


def measure(asked: argparse.Namespace) -> None:
    """All parts, one after the other; the record grows row by row."""
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

    for part in asked.parts.split(","):
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
    more = [f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float)]
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
    knobs, partition = bench.all_ways(shape.layers)[name]
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
    memory = training_memory(shape, trained, given["length"], recipe)
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


# ---------------------------------------------------------------------------------------------------- a live merge


def live(size: str, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two checkpoints in bf16, one model in memory: bottom_layers from 1 to 2 and back, five times."""
    import torch

    from pipeline.merge.live import Live
    from pipeline.merge.merge import open_merge
    from pipeline.merge.methods.layer_swap import LayerSwap
    from pipeline.models.checkpoint import Checkpoint

    bench = importlib.import_module("bench_eval")
    layers = 4
    bench.SIZES[size] = (layers, *bench.SIZES[size][1:5], torch.bfloat16, *bench.SIZES[size][6:])
    with tempfile.TemporaryDirectory() as folder:
        for side in ("math", "language"):
            model = bench.model_of(size, "cuda" if torch.cuda.is_available() else "cpu")
            model.save_pretrained(Path(folder) / side)
        sources = {side: Checkpoint.open(Path(folder) / side) for side in ("math", "language")}
        owners = dict.fromkeys(("embeddings", "final_norm", "head"), "math")

        def configured(bottom: int) -> Any:
            swap = LayerSwap(math="m", language="l", bottom_layers=bottom, top_layers=1, **owners)
            return open_merge(swap, sources)

        held, named = Live(model, None), dict(model.named_parameters())
        held.apply(configured(1))
        times = []
        for bottom in (2, 1) * 5:
            merge = configured(bottom)
            wait()
            begun = time.perf_counter()
            changed = held.apply(merge)
            wait()
            times.append(time.perf_counter() - begun)
        size_of_it = sum(named[name].nbytes for name in changed)
    median = sorted(times)[len(times) // 2]
    compared = {"seconds": both(flops.merge_seconds(size_of_it, 0), median)}
    rate = {"gigabytes": size_of_it / 1e9, "gigabytes_a_second": size_of_it / 1e9 / median}
    yield {"part": "live", "name": "one layer swapped", "compared": compared, **rate}


PARTS = {"card": card, "full": full, "sides": sides, "scoring": scoring, "live": live}


if __name__ == "__main__":
    main()
