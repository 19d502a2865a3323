#!/usr/bin/env python
"""Real tokens per computed position of a training, and its speed against a bare SFTTrainer, without a GPU.

    python scripts/bench_padding.py --gsm8k DATA/gsm8k/train.jsonl      # two minutes, into results/bench/padding.json

Two sets of 2,048 rows: lengths of GSM8K's, in tokens of the small world's tokenizer scaled to 250 on average, as of
Llama 3's; and lognormal lengths of 320 tokens on average (sigma 0.5), like OrcaMath's. The pipeline's own loader makes
the micro-batches: with all rows of a step at once, as the default was before it was at most 4; in the default; and
padding-free.

Speed: full training of a small Llama on GSM8K's lengths (scaled by 1/4), rounds of a few steps with the pipeline's
trainer and with TRL's SFTTrainer, which gets the same rows in the same order and the same arguments, in turns; the
median of the rounds' ratios. Losses: the same steps with padding and without, and the largest relative difference of
a step's loss.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from small_world.tokenizer import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import SFTTrainer

from pipeline.config.data import Data, Expert
from pipeline.config.stages import TrainStage
from pipeline.config.training import Model, Sft
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.train.order import pass_order, sort_by_length
from pipeline.train.recipe import plan_steps, trainer_arguments
from pipeline.train.stage import silence_warnings
from pipeline.train.trainer import Trainer

ROWS, VOCABULARY = 2048, 1024
RECORD = Path(__file__).parents[1] / "results/bench/padding.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "all rows at once, 32 rows": {"batch_size": 32, "micro_batch_size": 32},
    "all rows at once, 4 rows": {"batch_size": 4, "micro_batch_size": 4},
    "default, 32 rows": {"batch_size": 32}, "default, 4 rows": {"batch_size": 4},
    "padding-free, 32 rows": {"batch_size": 32, "padding_free": True},
    "padding-free, 4 rows": {"batch_size": 4, "padding_free": True},
}  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--gsm8k", type=Path, required=True, help="its train.jsonl")
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--record", default=str(RECORD), help="where to; '' for nowhere")
    options = asked.parse_args()
    silence_warnings(), datasets.disable_progress_bars()
    sets = {"gsm8k": lengths_of_gsm8k(options.gsm8k), "like orca_math": lengths_like_orca_math()}
    found = {
        name: {setting: round(filled(lengths, knobs), 4) for setting, knobs in SETTINGS.items()}
        for name, lengths in sets.items()
    }
    for name, shares in found.items():
        print(name, *(f"  {setting}: {share:.3f}" for setting, share in shares.items()), sep="\n", flush=True)
    short = [max(4, length // 4) for length in sets["gsm8k"]]
    ratios = [speed(short, number) for number in range(options.rounds)]
    apart = losses_apart(short)
    print(f"speed against a bare SFTTrainer {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"losses without padding differ by up to {apart:.1e} of themselves")
    record = {
        "real_tokens_per_position": found, "speed_against_bare": ratios, "median_speed": statistics.median(ratios),
        "losses_apart": apart, "machine": machine_facts(), "versions": package_versions(),
    }  # fmt: skip
    if options.record:
        Path(options.record).write_text(json.dumps(record, indent=1) + "\n")


def lengths_of_gsm8k(file: Path) -> list[int]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:ROWS]]
    counts = [len(ids) for ids in make_tokenizer()([f"{row['question']}\n{row['answer']}" for row in rows]).input_ids]
    scale = 250 / statistics.fmean(counts)
    return [max(4, round(scale * count)) for count in counts]


def lengths_like_orca_math() -> list[int]:
    numbers = random.Random(0)
    return [max(4, round(320 * numbers.lognormvariate(-(0.5**2) / 2, 0.5))) for _ in range(ROWS)]


def recipe(**knobs: Any) -> Sft:
    return Sft(name="full", seq_length=2048, learning_rate=1e-4, schedule="constant", **knobs)


def trainer(lengths: list[int], sft: Sft, folder: Path, bare: bool = False) -> Any:
    """A trainer on rows of random tokens with these lengths, of the pipeline or TRL's own, in the same order."""
    torch.manual_seed(0)
    numbers = random.Random(1)
    rows = [[numbers.randrange(4, VOCABULARY) for _ in range(length)] for length in lengths]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=672, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    stage = TrainStage(
        stage="sft", model=Model(name="m"), expert=Expert(name="e", side="math"), data=Data(), sft=sft
    )  # fmt: skip
    args = trainer_arguments(stage, text=False, validated=False, output=folder)
    plan_steps(args, sft, sft.steps or len(rows) // sft.batch_size)
    shared = {"model": LlamaForCausalLM(config), "args": args, "processing_class": make_tokenizer()}
    if bare:
        args.train_sampling_strategy = "sequential"
        rows = [rows[n] for n in sort_by_length(pass_order(len(rows), sft, 0), lengths, sft.batch_size)]
        made: Any = SFTTrainer(train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), **shared)
    else:
        sets = {"all": Dataset.from_dict({"input_ids": rows, "labels": rows})}
        made = Trainer(train_dataset=sets, sft=sft, parts={"all": []}, **shared)
    made.data_collator.padding_free = sft.padding_free
    made.remove_callback(PrinterCallback)
    return made


def filled(lengths: list[int], knobs: dict[str, Any]) -> float:
    """Real tokens per computed position, over one pass."""
    with tempfile.TemporaryDirectory() as folder:
        batches = list(trainer(lengths, recipe(**knobs), Path(folder)).get_train_dataloader())
    return sum(lengths) / sum(batch["input_ids"].numel() for batch in batches)


class Clock(TrainerCallback):
    """When each step ended, in CPU seconds, which other programs hardly change."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.process_time())


def speed(lengths: list[int], number: int) -> float:
    """CPU seconds of six steps of 16 rows with TRL's trainer over those with ours, after two of warm-up."""
    seconds: dict[bool, float] = {}
    for bare in (True, False) if number % 2 else (False, True):
        with tempfile.TemporaryDirectory() as folder:
            made, clock = trainer(lengths, recipe(batch_size=16, steps=8), Path(folder), bare), Clock()
            made.add_callback(clock)
            made.train()
        seconds[bare] = clock.ends[-1] - clock.ends[1]
    return seconds[True] / seconds[False]


def losses_apart(lengths: list[int]) -> float:
    losses = []
    for padding_free in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            sft = replace(recipe(batch_size=16, steps=8), padding_free=padding_free)
            made = trainer(lengths, sft, Path(folder))
            made.train()
        losses.append([row["loss"] for row in made.state.log_history if "loss" in row])
    return max(math.fabs(one - other) / one for one, other in zip(*losses, strict=True))


if __name__ == "__main__":
    main()
