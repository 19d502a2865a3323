"""Scoring and generation after shared exemplars, against the harness' own HFLM on the same model in the same run.

    python scripts/bench_eval.py --data_root DIR                    # a small Llama on this machine, minutes
    python scripts/bench_eval.py --data_root DIR --size tiny        # seconds: does it work
    python scripts/bench_eval.py --data_root DIR --size 8b          # the shape of an 8B model in bfloat16, for a GPU
    python scripts/bench_eval.py --data_root DIR --model FOLDER     # which answers of a real model rounding changes
    python scripts/bench_eval.py --data_root DIR --model FOLDER --steps 40 --dtype float32    # mgsm_steps as tries

DIR holds mgsm/te: the prompts are the real Telugu problems with 8 exemplars, asked for four letters (scoring: a prefix
of more than 10 questions' length) and for up to 64 new tokens (generation). Weights are random; what is computed does
not depend on them. A ceiling is what the count of tokens allows: scoring, tokens without sharing over tokens with it;
generation, the same for the prefill seconds of HFLM, with its decode seconds as they are. Writes results/bench/.

With --model, English MGSM 2-shot problems are answered in --dtype: one at a time without sharing, and then as each
cause of other rounding has it alone. Recorded is how many answers each cause changes. With --steps N, N items of
mgsm_steps in English, 4-shot, are scored on one thread: as token tries, with shared prefixes alone (the form of
single-token choices), and by HFLM one request at a time, in batches of 8.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the pipeline has it

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from pipeline.config.evaluation import EvalTask
from pipeline.evaluate import torch_backend
from pipeline.evaluate.model import Answering
from pipeline.evaluate.prefix import group_prompts
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_definitions
from pipeline.runs.provenance import git_state, machine_facts, package_versions

SIZES = {  # layers, width, MLP width, heads, key and value heads, dtype, questions, batch size
    "tiny": (2, 64, 128, 4, 2, torch.float32, 6, 3),
    "small": (4, 512, 1408, 8, 4, torch.float32, 48, 8),
    "8b": (32, 4096, 14336, 32, 8, torch.bfloat16, 250, 50),
}
VOCABULARY, NEW_TOKENS, SHOTS = 1024, 64, 8


def tokenizer_of(data_root: Path) -> PreTrainedTokenizerFast:
    """A small byte-level BPE of the Telugu exemplars and of English, which cuts Telugu as finely as large ones do."""
    exemplars = [(data_root / f"mgsm/{code}/train.jsonl").read_text(encoding="utf-8") for code in ("te", "en")]
    text = [*exemplars, " A B C D" * 100]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, letters = ["<pad>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def model_of(size: str, device: str) -> LlamaForCausalLM:
    layers, width, mlp, heads, shared_heads, dtype, _, _ = SIZES[size]
    config = LlamaConfig(
        vocab_size=128256 if size == "8b" else VOCABULARY,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared_heads,
        max_position_embeddings=16384,
        initializer_range=0.02 if size == "8b" else 0.1,  # wider: answers that differ from prompt to prompt
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


class Watch:
    """Seconds, tokens and number of a model's forward passes: prefill and decode (a token a row) apart."""

    def __init__(self, model: Any) -> None:
        self.hooks = [
            model.register_forward_pre_hook(self.begin, with_kwargs=True),
            model.register_forward_hook(self.end, with_kwargs=True),
        ]
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}
        self.passes = {"prefill": 0, "decode": 0}
        self.started = 0.0

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        _wait()
        self.started = time.perf_counter()

    def end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        _wait()
        ids = args[0] if args else kwargs["input_ids"]
        kind = "prefill" if ids.shape[1] > 1 else "decode"
        self.seconds[kind] += time.perf_counter() - self.started
        self.tokens[kind] += ids.numel()
        self.passes[kind] += 1


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(lm: Any, method: str, requests: list[Instance]) -> tuple[list[Any], dict[str, Any]]:
    """Answers, and {seconds, prefill_seconds, decode_seconds, prefill_tokens (padding included), decode_steps}."""
    watch, begun = Watch(lm.model), time.perf_counter()
    answers = getattr(lm, method)(requests, disable_tqdm=True)
    _wait()
    total = time.perf_counter() - begun
    for hook in watch.hooks:
        hook.remove()
    seconds = {"seconds": total} | {f"{kind}_seconds": spent for kind, spent in watch.seconds.items()}
    tokens = {"prefill_tokens": watch.tokens["prefill"], "decode_steps": watch.passes["decode"]}
    return answers, {kind: round(spent, 3) for kind, spent in seconds.items()} | tokens


def tokens_of(prompts: list[list[int]]) -> dict[str, int]:
    found = group_prompts(prompts)
    shared = sum(length + sum(len(prompts[one]) - length for one in members) for length, members in found)
    longest = max(length for length, _ in found)
    questions = [len(prompt) - longest for prompt in prompts]
    return {
        "prefix": longest,
        "question": round(sum(questions) / len(questions)),
        "without_sharing": sum(map(len, prompts)),
        "with_sharing": shared,
    }


def short_questions(prompts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The problems that are no longer than a tenth of the exemplars before them."""
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    ((prefix, _),) = group_prompts([tokenizer.encode(prompt) for prompt in prompts])
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length - prefix <= prefix / 10]


def scoring(ours: Answering, stock: HFLM, prompts: list[str]) -> dict[str, Any]:
    pairs = [(prompt, f" {letter}") for prompt in prompts for letter in "ABCD"]
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
    theirs, stock_time = timed(stock, "loglikelihood", requests)
    found, our_time = timed(ours, "loglikelihood", requests)
    tokens = tokens_of([ours.tok_encode(prompt) for prompt in prompts])
    speedup, ceiling = stock_time["seconds"] / our_time["seconds"], tokens["without_sharing"] / tokens["with_sharing"]
    far = max(abs(one[0] - two[0]) for one, two in zip(found, theirs, strict=True))
    return {
        "tokens": tokens, "stock": stock_time, "ours": our_time, "speedup": round(speedup, 2),
        "ceiling": round(ceiling, 2), "of_ceiling": round(speedup / ceiling, 3), "largest_difference": far,
    }  # fmt: skip


def generation(ours: Answering, stock: HFLM, prompts: list[str]) -> dict[str, Any]:
    settings = {"until": ["ప్రశ్న:"], "do_sample": False, "max_gen_toks": NEW_TOKENS}
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, settings), idx=0) for prompt in prompts
    ]
    theirs, stock_time = timed(stock, "generate_until", requests)
    found, our_time = timed(ours, "generate_until", requests)
    tokens = tokens_of([ours.tok_encode(prompt) for prompt in prompts])
    share = tokens["with_sharing"] / tokens["without_sharing"]
    least = stock_time["seconds"] - stock_time["prefill_seconds"] * (1 - share)
    speedup, ceiling = stock_time["seconds"] / our_time["seconds"], stock_time["seconds"] / least
    few = requests[:8]  # on a CPU it computes the attention of all requests over all of them
    gaps = [_gap(ours, prompt, one, two) for prompt, one, two in zip(prompts, found, theirs, strict=True) if one != two]
    return {
        "tokens": tokens, "stock": stock_time, "ours": our_time, "speedup": round(speedup, 2),
        "ceiling": round(ceiling, 2), "of_ceiling": round(speedup / ceiling, 3),
        "other_answers": len(gaps), "largest_logit_gap_where_they_part": max(gaps, default=0.0),
        "continuous_batching": {
            "questions": len(few), "seconds": continuous(ours, prompts[: len(few)]),
            "ours_seconds": timed(ours, "generate_until", few)[1]["seconds"],
        },
    }  # fmt: skip


def _gap(lm: Answering, prompt: str, one: str, two: str) -> float:
    """How far apart the two best logits are where two answers part: a tie, where it is no more than rounding."""
    same = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    with torch.no_grad():
        logits = lm.model(torch.tensor([lm.tok_encode(prompt + one[:same])], device=lm.device), logits_to_keep=1).logits
    best = logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def continuous(lm: Answering, prompts: list[str]) -> float:
    """Seconds that transformers' continuous batching, which shares prefixes in blocks, takes for the same tokens."""
    inputs = [lm.tok_encode(prompt) for prompt in prompts]
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)
    blocks = None if torch.cuda.is_available() else 64 + len(prompts) * (max(map(len, inputs)) + NEW_TOKENS) // 256
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=None if blocks is None else 4096)
    copied = copy.deepcopy(lm.model) if blocks else lm.model  # it changes the model's attention
    begun = time.perf_counter()
    with torch.no_grad():
        copied.generate_batch(inputs=inputs, generation_config=config, continuous_batching_config=batching)
    _wait()
    return round(time.perf_counter() - begun, 3)


# ---------------------------------------------------------------------------------------------------- changed answers

ALONE = {"batch_size": 1, "share_prefix": False, "threads": 1}
CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # cause -> how it is asked, what that is compared with
    "eval.batch_size=4": ({"batch_size": 4}, {}),
    "eval.share_prefix=true": ({"share_prefix": True}, {}),
    "HFLM with batch size 4": ({"batch_size": 4, "stock": True}, {}),
    "2 threads": ({"threads": 2}, {}),
    "a processor without AVX-512": ({"instructions": "avx2"}, {}),
}


def answers_of(folder: str, dtype: str, prompts: list[str], tokens: int, how: dict[str, Any]) -> list[str]:
    """The greedy answer to each prompt, computed as `how` says."""
    torch.set_num_threads(how["threads"])
    lm: Any = HFLM if how.get("stock") else Answering
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = lm(pretrained=folder, dtype=dtype, batch_size=how["batch_size"], device=device)
    lm.share_prefix = how["share_prefix"]
    settings = {"until": ["Question:"], "do_sample": False, "max_gen_toks": tokens}
    requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
    return lm.generate_until(requests, disable_tqdm=True)


def in_a_process(instructions: str | None, *asked: Any) -> list[str]:
    """answers_of in a process of its own, whose libraries use no more than these instructions."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"} if instructions else {}
    before = dict(os.environ)
    os.environ |= limits
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(answers_of, *asked).result()
    finally:
        for name in limits:
            os.environ.pop(name)
        os.environ |= before


def changed_answers(folder: Path, dtype: str, prompts: list[str], tokens: int) -> dict[str, int]:
    """Cause -> answers that it changes."""
    made: dict[str, list[str]] = {}
    found = {}

    def answers(how: dict[str, Any]) -> list[str]:
        key = json.dumps(how, sort_keys=True)
        if key not in made:
            made[key] = in_a_process(how.get("instructions"), str(folder), dtype, prompts, tokens, ALONE | how)
        return made[key]

    for cause, (how, against) in CAUSES.items():
        if torch.cuda.is_available() and ("threads" in how or "instructions" in how):
            continue  # of CPUs
        found[cause] = sum(one != two for one, two in zip(answers(how), answers(against), strict=True))
        print(f"{dtype}, {cause}: {found[cause]} of {len(prompts)} answers change", flush=True)
    return found


def prompts_of(data_root: Path, shots: int, code: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        definitions = task_definitions([EvalTask("mgsm", shots)], [code], data_root, Path(folder))
        (task,) = load_tasks(definitions)
        task.build_all_requests()
    return [instance.args[0] for instance in task.instances]


def record_steps(asked: argparse.Namespace) -> Path:
    """CPU seconds and tokens of the three forms, and how far their log-likelihoods are apart."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (task,) = load_tasks(task_definitions([EvalTask("mgsm_steps", 4)], ["en"], asked.data_root, Path(folder)))
        task.build_all_requests(samples=range(asked.steps))
    stock: Any = HFLM(pretrained=str(asked.model), dtype=asked.dtype, batch_size=8, device="cpu")
    ours = Answering(pretrained=stock.model, tokenizer=stock.tokenizer, batch_size=8)
    ours.share_prefix = True
    forms, most = {"tries": ours, "prefixes": ours, "hflm": stock}, torch_backend.MOST_TOKENS
    found: dict[str, list[float]] = {}
    record: dict[str, Any] = {
        "what": "mgsm_steps as token tries", "model": asked.model.resolve().name.partition("-transformers")[0],
        "device": "cpu", "dtype": asked.dtype, "threads": 1, "task": "mgsm_steps en 4-shot", "batch_size": 8,
        "steps": asked.steps, "requests": len(task.instances),
    }  # fmt: skip
    for form, lm in forms.items():
        torch_backend.MOST_TOKENS = most if form == "tries" else 0
        begun = time.process_time()
        answers, spent = timed(lm, "loglikelihood", task.instances)
        found[form] = [likelihood for likelihood, _ in answers]
        far = max(abs(one - two) for one, two in zip(found[form], found["tries"], strict=True))
        record[form] = {
            "cpu_seconds": round(time.process_time() - begun, 1), "tokens": spent["prefill_tokens"],
            "largest_difference": far,
        }  # fmt: skip
        print(f"{form}: {record[form]}", flush=True)
    torch_backend.MOST_TOKENS = most
    record |= {
        f"speedup_over_{form}": round(record[form]["cpu_seconds"] / record["tries"]["cpu_seconds"], 2)
        for form in ("prefixes", "hflm")
    }
    record |= {"machine": machine_facts(), "versions": package_versions(), "git": git_state()}
    file = asked.out / "eval_steps_cpu.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def record_changed(asked: argparse.Namespace, device: str) -> Path:
    prompts = prompts_of(asked.data_root, 2, "en")[: asked.questions]
    record = {
        "what": "answers that rounding changes", "model": asked.model.resolve().name.partition("-transformers")[0],
        "device": device, "dtype": asked.dtype, "task": "mgsm en 2-shot", "new_tokens": asked.tokens,
        "questions": len(prompts), "changed": changed_answers(asked.model, asked.dtype, prompts, asked.tokens),
        "machine": machine_facts(), "versions": package_versions(), "git": git_state(),
    }  # fmt: skip
    file = asked.out / f"eval_changed_{asked.dtype}_{device}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data_root", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--model", type=Path, help="a folder with a bfloat16 model: count changed answers alone")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="with --model")
    parser.add_argument("--questions", type=int, default=16, help="with --model")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="with --model: the longest answer")
    parser.add_argument("--steps", type=int, help="with --model: score so many items of mgsm_steps instead")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    *_, questions, batch_size = SIZES[asked.size]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.model:
        print(record_steps(asked) if asked.steps else record_changed(asked, device))
        return
    model, tokenizer = model_of(asked.size, device), tokenizer_of(asked.data_root)
    ours = Answering(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    ours.share_prefix = True
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    prompts = short_questions(prompts_of(asked.data_root, SHOTS, "te"), tokenizer)[:questions]
    for lm in (ours, stock):  # what is done once is not measured
        timed(lm, "loglikelihood", [Instance(request_type="loglikelihood", doc={}, arguments=("a", " b"), idx=0)])
    record = {
        "what": "shared few-shot prefixes", "size": asked.size, "device": device, "dtype": str(model.dtype),
        "parameters": model.num_parameters(), "questions": len(prompts), "batch_size": batch_size, "shots": SHOTS,
        "new_tokens": NEW_TOKENS,
        "scoring": scoring(ours, stock, prompts), "generation": generation(ours, stock, prompts),
        "machine": machine_facts(), "versions": package_versions(), "git": git_state(),
    }  # fmt: skip
    file = asked.out / f"eval_{asked.size}_{device}.json"
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in ("scoring", "generation"):
        one = record[name]
        print(f"{name}: {one['speedup']} times faster than HFLM, {100 * one['of_ceiling']:.0f} % of what tokens allow")
    print(file)


if __name__ == "__main__":
    main()
