"""Greedy answers of a real model to MGSM 8-shot: CPU seconds beside the harness' own HFLM in the same run.

    python scripts/bench_generation.py --data_root DIR --model $(python scripts/get_smollm2.py)

One thread, float32, as many slots as HFLM's batch has rows. DIR holds mgsm/<language>. Writes
results/bench/generation_cpu.json; where an answer differs, the exit status is 1, and HFLM
answers that question again in a batch of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the pipeline has it

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from pipeline.config.evaluation import EvalTask
from pipeline.evaluate.model import Answering, load_model
from pipeline.evaluate.prompts import harness_tamed, load_tasks
from pipeline.evaluate.tasks import task_definitions
from pipeline.runs.provenance import git_state, machine_facts, package_versions

SHOTS = 8


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
    cut_off: list[bool] = []
    ours.ended = lambda kind, arguments, answer: cut_off.append(answer[1])
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
        "cut_off": sum(cut_off),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_root", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--languages", nargs="+", default=["en", "sw"])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="the longest answer")
    parser.add_argument("--slots", type=int, default=8, help="rows that are computed together")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    asked = parser.parse_args()
    ours = load_model(asked.model, asked.slots, "float32")
    ours.share_prefix = True
    stock = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=asked.slots)
    record: dict[str, Any] = {
        "what": "greedy answers to MGSM 8-shot", "model": asked.model.resolve().name.partition("-transformers")[0],
        "dtype": "float32", "threads": 1, "questions": asked.questions, "slots": asked.slots,
        "new_tokens": asked.tokens, "languages": {},
    }  # fmt: skip
    for language in asked.languages:
        requests = requests_of(asked.data_root, language, asked.questions, asked.tokens)
        record["languages"][language] = result = compare(ours, stock, requests)
        print(f"{language}: {result}", flush=True)
    record |= {"machine": machine_facts(), "versions": package_versions(), "git": git_state()}
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "generation_cpu.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(file)
    return 1 if any(result["other_answers"] for result in record["languages"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
