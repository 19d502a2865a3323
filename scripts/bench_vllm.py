"""MGSM 8-shot and live merges on vLLM, beside the harness' HFLM and the torch backend in the same run.

    python scripts/bench_vllm.py --data_root DIR --model $(python scripts/get_smollm2.py) --python PATH_WITH_VLLM

One thread, float32, as many rows as HFLM's batch. Greedy answers by all three; log-probabilities of four letters after
the same prompts; then layer swaps of two random experts loaded live, each compared with the
torch backend's answers. CPU seconds of vLLM are those of its process. Writes results/bench/vllm_cpu.json (on a GPU
vllm_gpu.json, with seconds of the clock); where an answer differs in float32, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_generation import requests_of
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file

from pipeline.evaluate.before import vllm_versions
from pipeline.evaluate.model import Answering, load_model
from pipeline.evaluate.vllm_backend import VllmBackend
from pipeline.merge.live import model_of
from pipeline.merge.merge import Merging, open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.resident import keep_models_resident
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.provenance import git_state, machine_facts, package_versions

ON_GPU = torch.cuda.is_available()
SECONDS = "seconds" if ON_GPU else "cpu_seconds"
SWAPS = [(8, 4), (7, 4), (7, 3), (6, 3), (6, 2), (5, 2)]  # bottom and top layers
RANK = 8  # of an expert's changes, a stand-in for those of trained LoRA adapters


def expert_of(base: dict[str, torch.Tensor], strength: float, seed: int) -> dict[str, torch.Tensor]:
    """Each linear layer plus a random matrix of rank RANK, `strength` times as large (Frobenius norm)."""
    generator, expert = torch.Generator().manual_seed(seed), {}
    for name, tensor in base.items():
        if ".layers." in name and tensor.dim() == 2:
            down, up = (torch.randn(size, RANK, generator=generator) for size in tensor.shape)
            change = down @ up.T
            expert[name] = tensor + change * (strength * tensor.norm() / change.norm())
    return expert


def seconds_of(process: int | None = None) -> float:
    """Seconds of the clock on a GPU, else CPU seconds of this process, or of another one."""
    if ON_GPU:
        return time.perf_counter()
    if process is None:
        return time.process_time()
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(lm: Any, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and its seconds: of this process, and of vLLM's where there is one."""
    engine = getattr(getattr(lm, "engine", None), "engine", None)
    begun, other = seconds_of(), seconds_of(engine.process.pid) if engine and not ON_GPU else 0.0
    found = work()
    others = seconds_of(engine.process.pid) - other if engine and not ON_GPU else 0.0
    return found, round(seconds_of() - begun + others, 2)


def letters_after(requests: list[Instance]) -> list[Instance]:
    return [
        Instance("loglikelihood", {}, (request.args[0], f" {letter}"), 0) for request in requests for letter in "ABCD"
    ]


def different(found: list[Any], expected: list[Any]) -> int:
    return sum(one != two for one, two in zip(found, expected, strict=True))


def write_expert(base: Path, folder: Path, seed: int, strength: float) -> Checkpoint:
    """A copy of `base` with the linear layers of a random expert."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(next(base.glob("*.safetensors")))
    expert = expert_of({name: tensor.float() for name, tensor in tensors.items()}, strength, seed)
    tensors = {name: expert.get(name, tensor.float()) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint.open(folder)


def live_merges(
    asked: argparse.Namespace, vllm: Callable[..., VllmBackend], requests: list[Instance]
) -> dict[str, Any]:
    """Each swap in vLLM and in torch: seconds of loading and answering, the first with the start of the process."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, keep_models_resident():
        math, language = (write_expert(asked.model, Path(folder, str(seed)), seed, asked.strength) for seed in (1, 2))
        for bottom, top in [*SWAPS[: asked.configurations], SWAPS[0]]:
            method = LayerSwap(math="m", language="l", bottom_layers=bottom, top_layers=top)
            merge = open_merge(method, {"math": math, "language": language}, None, None, 1)
            backend = vllm(weights=merge)
            begun = time.perf_counter()
            backend.load()
            loading = round(time.perf_counter() - begun, 2)
            ours = Answering(backend, pretrained=backend.model, tokenizer=backend.tokenizer)
            found, cost = timed(ours, partial(ours.generate_until, requests, disable_tqdm=True))
            expected, torch_cost = timed(None, partial(by_torch, merge, asked, requests))
            rows.append({"swap": f"{bottom}+{top}", "loading_seconds": loading, f"vllm_{SECONDS}": cost,
                         f"torch_{SECONDS}": torch_cost, "other_answers": different(found, expected)})  # fmt: skip
            print(rows[-1], flush=True)
    return {"rank": RANK, "strength": asked.strength, "each": rows}


def by_torch(merge: Merging, asked: argparse.Namespace, requests: list[Instance]) -> list[str]:
    live = model_of(merge, asked.dtype, "cuda" if ON_GPU else "cpu")
    lm = Answering(batch_size=asked.slots, pretrained=live.model, tokenizer=live.tokenizer)
    lm.share_prefix = True
    return lm.generate_until(requests, disable_tqdm=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_root", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", help="a Python that has vLLM; by default this one")
    parser.add_argument("--language", default="en")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="the longest answer")
    parser.add_argument("--slots", type=int, default=8, help="rows that are computed together")
    parser.add_argument("--strength", type=float, default=0.02, help="of a random expert, relative to the weights")
    parser.add_argument("--configurations", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    asked = parser.parse_args()
    vllm = partial(VllmBackend, asked.slots, asked.dtype, python=asked.python)
    requests = requests_of(asked.data_root, asked.language, asked.questions, asked.tokens)
    ours = load_model(asked.model, asked.slots, asked.dtype)
    ours.share_prefix = True
    backend = vllm(weights=asked.model)
    begun = time.perf_counter()
    backend.load()
    start = round(time.perf_counter() - begun, 1)
    models = {
        "hflm": HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=asked.slots),
        "torch": ours,
        "vllm": Answering(backend, pretrained=backend.model, tokenizer=backend.tokenizer),
    }
    record: dict[str, Any] = {
        "what": f"greedy answers to MGSM 8-shot ({asked.language}), letters after the same prompts, live layer swaps",
        "model": asked.model.resolve().name.partition("-transformers")[0], "dtype": asked.dtype, "threads": 1,
        "questions": asked.questions, "rows": asked.slots, "new_tokens": asked.tokens,
        "vllm": vllm_versions(asked.python), "start_seconds": start,
    }  # fmt: skip
    for task, asks in {"generate_until": requests, "loglikelihood": letters_after(requests)}.items():
        found = {name: timed(lm, partial(getattr(lm, task), asks, disable_tqdm=True)) for name, lm in models.items()}
        seconds = {name: cost for name, (_, cost) in found.items()}
        record[task] = {SECONDS: seconds, "vllm_to_hflm": round(seconds["vllm"] / seconds["hflm"], 3),
                        "vllm_to_torch": round(seconds["vllm"] / seconds["torch"], 3)}  # fmt: skip
        answers = {name: answer for name, (answer, _) in found.items()}
        if task == "generate_until":
            record[task]["other_answers"] = {
                name: different(answers[name], answers["hflm"]) for name in ("torch", "vllm")
            }
        else:
            pairs = zip(answers["vllm"], answers["hflm"], strict=True)
            record[task]["largest_difference"] = max(abs(one[0] - two[0]) for one, two in pairs)
        print(task, record[task], flush=True)
    backend.engine.close()
    record["live"] = live_merges(asked, vllm, requests)
    record |= {"machine": machine_facts(), "versions": package_versions(), "git": git_state()}
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"vllm_{'gpu' if ON_GPU else 'cpu'}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(file)
    wrong = (
        sum(row["other_answers"] for row in record["live"]["each"]) + record["generate_until"]["other_answers"]["vllm"]
    )
    return 1 if wrong and asked.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
