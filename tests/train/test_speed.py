"""torch.compile on a CPU: the same training within rounding."""

from pathlib import Path
from shutil import which

import pytest
import tiny


@pytest.mark.skipif(which("g++") is None, reason="sft.compile on a CPU needs g++")
def test_a_compiled_training_is_the_same_within_rounding(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        recipe = tiny.recipe(compile=compiled, learning_rate=1e-3)
        made = tiny.trainer(
            tmp_path, recipe, tiny.rows(1) * 8, of=tiny.model(layers=1)
        )  # one shape, compiled once
        made.train()
        losses.append([row["loss"] for row in made.state.log_history if "loss" in row])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
