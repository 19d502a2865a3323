"""Killed at random instants, nothing is lost: KILLS kills by SEED (make test-kill N=... SEED=...), 15 unless told."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from harness import commands, harass

pytestmark = pytest.mark.kill


def test_killed_at_random_nothing_is_lost_and_nothing_is_made_twice(
    base: Path, world: Path, math_expert: Path, language_expert: Path, tmp_path: Path
) -> None:
    table = tmp_path / "mine.yaml"
    table.write_text(
        f"name: mine\nevery: {{model: trained, model.path: {base}, data_root: {world}, threads: 1, sft.epochs: 9,"
        " sft.steps: 20, sft.batch_size: 4, sft.seq_length: 96, sft.precision: fp32, sft.resume_minutes: 0.02}\n"
        "runs:\n  math: {stage: sft, expert: math, recipe: sandbox_math}\n"
        "  language: {stage: sft, expert: qac, recipe: sandbox_language}\n"
        "  soup: {merge: soup, merge.experts: [math, language]}\n"
        "score: {eval: mgsm_0shot, eval.max_gen_toks: 4, in: en}\n"
        "columns: {math: {run: math}, language: {run: language}, soup: {run: soup}}\n"
    )
    kills, seed = int(os.environ.get("KILLS", 15)), int(os.environ.get("SEED") or time.time())
    asked = commands(base, world, math_expert, language_expert, table)
    random.Random(seed).shuffle(asked)  # of few kills, not always the first commands
    few = asked if kills > 30 else asked[:3]
    print(f"SEED={seed}: {kills} kills of {', '.join(one.name for one in few)}")
    record = harass(few, tmp_path, kills, seed)
    if file := os.environ.get("KILL_RECORD"):
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    assert record["kills"] >= kills
