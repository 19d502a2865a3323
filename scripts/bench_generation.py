"""Greedy answers of a real model to MGSM 8-shot: CPU seconds beside the harness' own HFLM in the same run.

    python scripts/bench_generation.py --data_root DIR --model $(python scripts/get_smollm2.py)
    python scripts/bench_generation.py --part sweep --languages en --data_root DIR --model DIR

One thread, float32, as many slots as HFLM's batch has rows. DIR holds mgsm/<language>. Writes
results/bench/generation_cpu.json; where an answer differs, the exit status is 1, and HFLM
answers that question again in a batch of its own.

--part sweep: a sweep of layer swaps, one layer apart, of two random experts: the model plus a random matrix of low rank
in each linear layer, a stand-in for trained LoRA adapters. Decoding steps and CPU seconds without drafts, with prompt
lookup, and with drafts from the answers of the configurations before; the latter also where the answers before are
those to other questions, so that drafts from them are of no use. Writes results/bench/generation_sweep_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the pipeline has it

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from pipeline.config.evaluation import EvalTask
from pipeline.evaluate import drafts
from pipeline.evaluate.model import Answering, load_model, request_key
from pipeline.evaluate.score import harness_tamed, load_tasks
from pipeline.evaluate.score_cache import Answers
from pipeline.evaluate.tasks import task_definitions
from pipeline.runs.provenance import git_state, machine_facts, package_versions

SHOTS = 8
SWAPS = [(8, 4), (7, 4), (7, 3), (6, 3), (6, 2), (5, 2)]  # bottom and top layers
RANK = 8


def requests_of(data_root: Path, language: str, questions: int, tokens: int) -> list[Instance]:
    with tempfile.TemporaryDirectory() as folder, harness_tamed():
        task = EvalTask("mgsm", SHOTS)
        (loaded,) = load_tasks(task_definitions([task], [language], data_root, Path(folder), max_gen_toks=tokens))
        loaded.build_all_requests(samples=range(questions))
    return loaded.instances


def measure(lm: Any, requests: list[Instance]) -> tuple[list[str], dict[str, Any]]:
    """The answers, and CPU seconds, number of forward passes, and tokens that they took, padding included."""
    passes: list[int] = []
    hook = lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    begun = time.process_time()
    answers = lm.generate_until(requests, disable_tqdm=True)
    seconds = time.process_time() - begun
    hook.remove()
    return answers, {"cpu_seconds": round(seconds, 2), "passes": len(passes), "tokens": sum(passes)}


def compare(ours: Answering, stock: HFLM, requests: list[Instance]) -> dict[str, Any]:
    found, our_cost = measure(ours, requests)
    theirs, stock_cost = measure(stock, requests)
    others = [index for index, (one, two) in enumerate(zip(found, theirs, strict=True)) if one != two]
    one_by_one = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=1)
    alone = one_by_one.generate_until([requests[index] for index in others], disable_tqdm=True)
    return {
        "stock": stock_cost, "ours": our_cost,
        "cpu_ratio": round(our_cost["cpu_seconds"] / stock_cost["cpu_seconds"], 3),
        "other_answers": len(others), "other_questions": others,
        "of_these_ours_is_hflms_in_batches_of_one": sum(
            found[index] == answer for index, answer in zip(others, alone, strict=True)
        ),
        "cut_off": sum(ours.ran_out[request_key(request.args)] for request in requests),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- a sweep of merges


def expert_of(base: dict[str, torch.Tensor], strength: float, seed: int) -> dict[str, torch.Tensor]:
    """Each linear layer plus a random matrix of rank RANK, `strength` times as large (Frobenius norm)."""
    generator, expert = torch.Generator().manual_seed(seed), {}
    for name, tensor in base.items():
        if ".layers." in name and tensor.dim() == 2:
            down, up = (torch.randn(size, RANK, generator=generator) for size in tensor.shape)
            change = down @ up.T
            expert[name] = tensor + change * (strength * tensor.norm() / change.norm())
    return expert


def swap(model: Any, math: dict[str, torch.Tensor], language: dict[str, torch.Tensor], bottom: int, top: int) -> None:
    """The bottom and top layers of `language` in `math`, copied into the model."""
    parameters, layers = dict(model.named_parameters()), model.config.num_hidden_layers
    with torch.no_grad():
        for name in math:
            layer = int(name.partition(".layers.")[2].partition(".")[0])
            swapped = layer < bottom or layer >= layers - top
            parameters[name].copy_((language if swapped else math)[name])


def decode_swap(ours: Answering, requests: list[Instance], kept: Answers, lookup: int, most: int) -> Any:
    """The answers with drafts of `lookup` tokens from the prompt and at most `most` from `kept`, and their cost."""
    drafts.LOOKUP, drafts.NEIGHBOURS, ours.kept = lookup, most, kept
    ours.drafts.clear()
    answers, cost = measure(ours, requests)
    return answers, {"cpu_seconds": cost["cpu_seconds"], **ours.drafts}


def of_other_questions(source: Path, target: Path) -> None:
    """A file of answers, each stored as that to the next question."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").split("\n") if line]
    shifted = ([key, *rest] for (key, *_), (_, *rest) in zip(lines, lines[1:] + lines[:1], strict=True))
    target.write_text("".join(json.dumps(line) + "\n" for line in shifted), encoding="utf-8")


def sweep(ours: Answering, requests: list[Instance], strength: float, configurations: int) -> dict[str, Any]:
    base = {name: tensor.detach().clone() for name, tensor in ours.model.named_parameters()}
    math, language = (expert_of(base, strength, seed) for seed in (1, 2))
    ways: dict[str, tuple[int, int]] = {"plain": (0, 0), "lookup_2": (2, 0)}
    ways |= {f"neighbours_{most}": (2, most) for most in (2, 4, 8)} | {"other_questions_8": (2, 8)}
    found: dict[str, Any] = {way: [] for way in ways}
    same_as_before: list[int] = []
    different, before = 0, None
    with tempfile.TemporaryDirectory() as folder:
        for bottom, top in SWAPS[:configurations]:
            swap(ours.model, math, language, bottom, top)
            expected: list[str] = []
            for way, (lookup, most) in ways.items():
                file = Path(folder, way, f"mgsm-{bottom}+{top}.jsonl")
                if most and before is None:  # there are no answers yet
                    file.parent.mkdir()
                    shutil.copy(Path(folder, "lookup_2", file.name), file)
                    cost = found["lookup_2"][0]
                else:
                    answers, cost = decode_swap(ours, requests, Answers(file, fresh=not most), lookup, most)
                    expected = expected or answers
                    different += sum(one != two for one, two in zip(answers, expected, strict=True))
                found[way].append(cost)
                if way == "other_questions_8":
                    of_other_questions(file, file)
                print(f"{bottom}+{top} {way}: {cost}", flush=True)
            if before:
                same_as_before.append(sum(one == two for one, two in zip(before, expected, strict=True)))
            before = expected
    return {
        "swaps": [f"{bottom}+{top}" for bottom, top in SWAPS[:configurations]],
        "same_answers_as_the_swap_before": same_as_before, "other_answers": different,
        "ratio_to_plain": {way: ratios(found[way], found["plain"]) for way in found},
        "cpu_ratio_of_other_questions_to_lookup": ratios(found["other_questions_8"], found["lookup_2"]),
        "each": found,
    }  # fmt: skip


def ratios(costs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float]:
    """Steps and CPU seconds as shares: of the whole sweep, and of all configurations after the first."""

    def ratio(what: str, start: int) -> float:
        return round(sum(cost[what] for cost in costs[start:]) / sum(cost[what] for cost in plain[start:]), 3)

    return {f"{what}{name}": ratio(what, start) for what in ("steps", "cpu_seconds")
            for name, start in (("", 0), ("_after_the_first", 1))}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_root", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--languages", nargs="+", default=["en", "sw"])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="the longest answer")
    parser.add_argument("--slots", type=int, default=8, help="rows that are computed together")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--part", choices=["stock", "sweep"], default="stock")
    parser.add_argument("--strength", type=float, default=0.02, help="of a random expert, relative to the weights")
    parser.add_argument("--configurations", type=int, default=len(SWAPS))
    asked = parser.parse_args()
    ours = load_model(asked.model, asked.slots, "float32")
    ours.share_prefix = True
    stock = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=asked.slots)
    record: dict[str, Any] = {
        "what": "greedy answers to MGSM 8-shot", "model": asked.model.resolve().name.partition("-transformers")[0],
        "dtype": "float32", "threads": 1, "questions": asked.questions, "slots": asked.slots,
        "new_tokens": asked.tokens, "languages": {},
    }  # fmt: skip
    if asked.part == "sweep":
        record["what"] += ", layer swaps of two random experts"
        record |= {"experts": {"rank": RANK, "strength": asked.strength}}
    for language in asked.languages:
        requests = requests_of(asked.data_root, language, asked.questions, asked.tokens)
        if asked.part == "sweep":
            result = sweep(ours, requests, asked.strength, asked.configurations)
        else:
            result = compare(ours, stock, requests)
        record["languages"][language] = result
        print(f"{language}: { {name: value for name, value in result.items() if name != 'each'} }", flush=True)
    record |= {"machine": machine_facts(), "versions": package_versions(), "git": git_state()}
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / ("generation_sweep_cpu.json" if asked.part == "sweep" else "generation_cpu.json")
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(file)
    return 1 if any(result["other_answers"] for result in record["languages"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
