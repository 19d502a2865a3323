"""torch.compile on a CPU: the same training within rounding; and what its speed is measured against."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import which

import pytest
import tiny

RECORD = Path(__file__).parents[2] / "results/bench/padding.json"


@pytest.mark.skipif(which("g++") is None, reason="sft.compile on a CPU needs g++")
def test_a_compiled_training_is_the_same_within_rounding(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        recipe = tiny.recipe(compile=compiled, learning_rate=1e-3)
        made = tiny.trainer(tmp_path, recipe, tiny.rows(1) * 8, of=tiny.model(layers=1))  # one shape, compiled once
        made.train()
        losses.append([row["loss"] for row in made.state.log_history if "loss" in row])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_record_meets_what_is_promised() -> None:
    """Real tokens per computed position, and speed against a bare SFTTrainer (measured at commit fb35b6d)."""
    record = json.loads(RECORD.read_text())
    for shares in record["real_tokens_per_position"].values():
        assert shares["default, 32 rows"] >= 0.85
        assert min(shares["padding-free, 32 rows"], shares["padding-free, 4 rows"]) >= 0.99
    assert record["median_speed"] >= 0.97 and record["losses_apart"] < 1e-4
