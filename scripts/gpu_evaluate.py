"""Compare the speed of scoring with HFLM on a GPU, at the shape of an 8B Llama.

    python scripts/gpu_evaluate.py [--record FILE]
                                   [--tiny]    # a quick check, which also runs on a CPU

Weights are random and made on the device. Prompts are random tokens: an 8-shot prefix, questions
below it, and answers of 128 tokens without an end token.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
import pipeline
from pipeline.evaluate.decode import Ending
from pipeline.evaluate.shared_cache import SharedCache, attending, drop_cache
from pipeline.evaluate.steps import Steps, rows_for
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.models.products import split_products
from pipeline.runs.provenance import git_state, package_versions

DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda")
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 8192,
}
SANDBOX = Path(pipeline.__file__).parent / "data/sandbox_base"  # has a tokenizer
Row = dict[str, Any]


def build(sizes: dict[str, int], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def seconds(work: Callable[[], Any]) -> float:
    synchronize()
    begun = time.perf_counter()
    work()
    synchronize()
    return round(time.perf_counter() - begun, 3)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def prompts_of(questions: int, prefix: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(5, vocabulary) for _ in range(prefix)]
    prompts = []
    for _ in range(questions):
        length = draw.randint(40, 100)
        question = [draw.randrange(5, vocabulary) for _ in range(length)]
        prompts.append(shared + question)
    return prompts


def answers(model: Any, rows: int, prompts: list[list[int]], room: int) -> float:
    backend = TorchBackend(rows, model=model)
    ending = Ending({-1}, ["Question:"], room, lambda tokens: "a" * len(tokens))
    return seconds(lambda: backend.generate(prompts, ending, True, lambda place, tokens: None))


def step_times(model: Any, rows: int, prefix: list[int]) -> Iterator[Row]:
    """Yield the time of a step and of filling all rows, and print the kernels of a step."""
    filled = min(rows, 64)
    questions = [prefix[:60]] * filled
    with torch.no_grad():
        cache = SharedCache.of(model, rows_for(DEVICE, rows), 256)
        with attending(cache):
            fill = seconds(lambda: cache.share(prefix))
            rest = seconds(lambda: cache.fill(range(filled), questions))
            steps = Steps(cache)
            for _ in range(3):
                steps.next(rows, 200)()
            cache.places.clamp_(max=100)
            steps.next(rows, 200)()
            times = [seconds(lambda: steps.next(rows, 200)()) for _ in range(20)]
            host = statistics.median(times) * 1000
            begun = time.perf_counter()
            waits = [steps.next(rows, 200) for _ in range(20)]
            launched = (time.perf_counter() - begun) / 20 * 1000
            waits[-1]()
            synchronize()
            ahead = (time.perf_counter() - begun) / 20 * 1000
            row: Row = {"what": f"a step of {rows} rows", "ms": round(ahead, 2)}
            row["ms_waited_for"] = round(host, 2)
            row["ms_of_the_host"] = round(launched, 2)
            yield {**row, "prefix_s": fill, "fill_of_64_s": rest}
            if DEVICE.type == "cuda":
                print_kernels(steps, rows)


def print_kernels(steps: Steps, rows: int) -> None:
    """Profile one step, and print its kernels with the most time."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        steps.next(rows, 200)()
        synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events():
        name = event.name[:70]
        times[name] += event.device_time
        counts[name] += 1
    print(f"{rows} rows: kernels {counts.total()} us {times.total()}", flush=True)
    for name, spent in times.most_common(14):
        print(f"   {spent:9.0f} us {counts[name]:5d} {name}", flush=True)


def scoring(sizes: dict[str, int], small: bool) -> Iterator[Row]:
    room, prefix = 128, 960
    if small:
        room, prefix = 8, 40
    tokenizer = AutoTokenizer.from_pretrained(SANDBOX)
    model = build(sizes, torch.bfloat16)
    prompts = prompts_of(64, prefix, sizes["vocab_size"])
    many = prompts_of(250, prefix, sizes["vocab_size"])
    for rows in (32, 64, 256):
        yield from step_times(model, rows, prompts[0][:prefix])
    for rows, asked in ((32, prompts), (64, prompts), (256, many)):
        first, again = (answers(model, rows, asked, room) for _ in range(2))
        yield {
            "what": f"{len(asked)} answers of {room} tokens, bfloat16",
            "rows": rows,
            "seconds": again,
            "first_time": first,
        }
    drop_cache(model)
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=32)
    model.generation_config.eos_token_id = None
    spent = seconds(lambda: answer_by_hflm(stock, prompts, room))
    yield {"what": f"64 answers of {room} tokens, bfloat16, HFLM", "rows": 32, "seconds": spent}
    yield letters_row(model, stock, sizes["vocab_size"])
    yield from float32(model, prompts, many, room, small)


def answer_by_hflm(stock: HFLM, prompts: list[list[int]], room: int) -> None:
    """Answer prompts in batches of 32 with padding on the left."""
    for first in range(0, len(prompts), 32):
        batch = prompts[first : first + 32]
        width = max(map(len, batch))
        ids, mask = [], []
        for prompt in batch:
            padding = [0] * (width - len(prompt))
            ids.append(padding + prompt)
            mask.append(padding + [1] * len(prompt))
        stock._model_generate(
            torch.tensor(ids, device=DEVICE),
            width + room,
            ["Question:"],
            attention_mask=torch.tensor(mask, device=DEVICE),
            do_sample=False,
        )


def letters_row(model: Any, stock: HFLM, vocabulary: int) -> Row:
    """Return the times of 64 questions with four letters each."""
    letters = []
    for prompt in prompts_of(64, 620, vocabulary):
        for token in (6, 7, 8, 9):
            letters.append((prompt, [token]))
    backend = TorchBackend(64, model=model)
    for _ in range(2):
        mine = seconds(lambda: backend.loglikelihood(letters, True, lambda *_: None))
    asks = [((str(at), "A"), context, tokens) for at, (context, tokens) in enumerate(letters)]
    peer = seconds(lambda: stock._loglikelihood_tokens(asks, disable_tqdm=True))
    row = {"what": "64 questions by letters, bfloat16", "seconds": mine, "HFLM": peer}
    return {**row, "ratio": round(mine / peer, 3)}


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.log_softmax(-1)


def float32(
    model: Any, prompts: list[list[int]], many: list[list[int]], room: int, small: bool
) -> Iterator[Row]:
    model = model.float()
    gc.collect()
    length, prefix = 1024, 960
    if small:
        length, prefix = 32, 40
    ids = torch.tensor([(prompt * 2)[:length] for prompt in prompts[:8]], device=DEVICE)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, logits_to_keep=1)

    for products in ("ieee", "bf16x3"):
        if products == "bf16x3":
            drop_cache(model)
            start = ids[:1, :256]
            before = log_probabilities(model, start)
            split_products(model)
            after = log_probabilities(model, start)
            difference = float((before - after).abs().max())
            what = "largest difference of a log-probability, bf16x3 and ieee"
            yield {"what": what, "difference": difference}
            del before, after
        forward()
        prefill = min(seconds(forward) for _ in range(2))
        what = f"a forward pass of 8 x 1,024 tokens, float32 by {products}"
        yield {"what": what, "seconds": prefill}
        yield from step_times(model, 64, prompts[0][:prefix])
        for rows, asked in ((64, prompts), (256, many)):
            answers(model, rows, asked[:rows], 2)
            what = f"{len(asked)} answers of {room} tokens, float32 by {products}"
            spent = answers(model, rows, asked, room)
            yield {"what": what, "rows": rows, "seconds": spent}


def write_zeros(folder: Path, sizes: dict[str, int]) -> None:
    """Write a checkpoint of zeros as a sparse file, which takes no room on the disk."""
    architectures = ["LlamaForCausalLM"]
    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=architectures)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SANDBOX).save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    header: dict[str, Any] = {}
    begin = 0
    for name, weight in model.named_parameters():
        end = begin + 2 * prod(weight.shape)
        shape = tuple(weight.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


# Name of a load -> its bottom and top layers
LIVE_SWAPS = {
    "loading the first of two swaps": (5, 2),
    "from swap 5-2 to 3-1": (3, 1),
    "to 5-2": (5, 2),
}


def live_swaps(sizes: dict[str, int]) -> Iterator[Row]:
    """Yield the times of swaps of bfloat16 experts that are loaded into one model in turn."""
    from pipeline.merge.live import model_of
    from pipeline.merge.methods.layer_swap import LayerSwap
    from pipeline.merge.open_merge import open_merge
    from pipeline.merge.resident import keep_models_resident
    from pipeline.models.checkpoint import Checkpoint

    with tempfile.TemporaryDirectory() as place, keep_models_resident():
        sources = {}
        for name in ("math", "language"):
            folder = Path(place, name)
            write_zeros(folder, sizes)
            sources[name] = Checkpoint.open(folder)
        for what, (bottom, top) in LIVE_SWAPS.items():
            config = LayerSwap(
                math="math",
                language="language",
                bottom_layers=bottom,
                top_layers=top,
                scale_to_depth=sizes is TINY,
            )
            merge = open_merge(config, sources)
            spent = seconds(partial(model_of, merge, "auto", DEVICE.type))
            yield {"what": f"live merges: {what}", "seconds": spent}


def report(rows: list[Row], record: Path | None) -> None:
    """Print the last row and write all rows, because the script may be stopped at any row."""
    print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if record:
        name = "cpu"
        if DEVICE.type == "cuda":
            name = torch.cuda.get_device_name()
        contents = {"device": name, "versions": package_versions(), "git": git_state()}
        contents["rows"] = rows
        record.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    rows: list[Row] = []
    sizes = LLAMA_8B
    if asked.tiny:
        sizes = TINY
    for part in (lambda: scoring(sizes, asked.tiny), lambda: live_swaps(sizes)):
        try:
            for row in part():
                rows.append(row)
                report(rows, asked.record)
        except Exception:  # The other part is still measured.
            traceback.print_exc()
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
