"""Optimizers: what they save, what rounding costs, and that a saved state goes on where it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from pipeline.train.memory import BYTES, bytes_per_parameter, rounds_stochastically
from pipeline.train.optim import MuonWithAdamW, torchao_optimizer

CHOICES = [pair for pair in BYTES if pair[1] != "muon_adamw"]


def state_bytes(optimizer: Any) -> int:
    """Bytes of all state tensors but the step counts; of eight-bit ones, of their codes."""
    tensors = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    return sum(t.codes.numel() if hasattr(t, "codes") else t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("weights", "optimizer"), CHOICES)
def test_bytes_a_parameter_are_those_of_the_table(tmp_path: Path, weights: str, optimizer: str) -> None:
    """On a model whose matrices fill whole blocks: smaller tensors keep moments in the weights' dtype."""
    recipe = tiny.recipe(weights=weights, optimizer=optimizer, learning_rate=1e-4, steps=1)
    big = tiny.model(hidden_size=64, intermediate_size=128, layers=2, vocab_size=960, dtype=getattr(torch, weights))
    made = tiny.trainer(tmp_path, recipe, tiny.rows(4), of=big)
    made.train()
    weight_bytes = sum(p.numel() * p.element_size() for p in made.model.parameters())
    count = sum(p.numel() for p in made.model.parameters())
    total = 2 * weight_bytes + state_bytes(made.optimizer)  # a gradient is as large as its weight
    assert total / count == pytest.approx(bytes_per_parameter(recipe), rel=0.02)


@pytest.mark.parametrize(("weights", "optimizer"), CHOICES)
def test_what_rounding_leaves_of_a_small_movement(weights: str, optimizer: str) -> None:
    """40 steps at a rate a hundredth of what bfloat16 resolves: the mean movement, against AdamW in fp32."""
    recipe = tiny.recipe(weights=weights, optimizer=optimizer, learning_rate=1e-6, weight_decay=0.0)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.full((64, 256), 0.02).to(getattr(torch, weights)))
    if optimizer == "adamw":
        made: Any = torch.optim.AdamW([weight], lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    else:
        kind, settings = torchao_optimizer(recipe)
        made = kind([weight], weight_decay=0.0, **settings)
    start = weight.detach().clone()
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        made.step()
    moved = (weight.detach().float() - start.float()).mean().item()
    if weights == "bfloat16" and optimizer == "adamw":
        assert moved == 0.0 and not rounds_stochastically(recipe)
    else:  # 16,384 entries: chance moves their mean by about 2 %
        assert moved == pytest.approx(-40e-6, rel=0.1)


def test_lost_updates_are_told_and_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(weights="bfloat16", learning_rate=1e-6, method="simultaneous")
    made = tiny.trainer(tmp_path, recipe, tiny.joint(8), tiny.B, of=tiny.model(dtype=torch.bfloat16))
    made.train()
    rows = [row for row in made.state.log_history if "loss" in row]
    assert rows[2]["updates_lost_math"] > 0.9 < rows[3]["updates_lost_language"]  # looked at from each side's second
    told = capsys.readouterr().err
    assert told.count("of the math side's updates are lost in rounding") == 1 == told.count("of the language side's")


def test_a_warm_up_is_not_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first rates are lost even in fp32; after it the remedy is one that is not already in use."""
    recipe = tiny.recipe(learning_rate=1e-12, warmup_steps=3, schedule="constant", steps=12)
    made = tiny.trainer(tmp_path, recipe, tiny.rows(48))
    made.train()
    lost = {row["step"]: row["updates_lost"] for row in made.state.log_history if "updates_lost" in row}
    assert list(lost) == [2, 12] and min(lost.values()) > 0.9
    told = [line for line in capsys.readouterr().err.splitlines() if "are lost in rounding" in line]
    assert len(told) == 1 and "step 12): raise sft.learning_rate" in told[0] and "use sft.weights" not in told[0]


def test_muon_follows_the_schedule_behind_accelerate(tmp_path: Path) -> None:
    """Accelerate loads the optimizer's own state into it, which makes new groups."""
    made = tiny.trainer(tmp_path, tiny.recipe(optimizer="muon_adamw", learning_rate=1e-2, steps=4), tiny.rows(16))
    rates: list[tuple[float, float]] = []
    clip = made._clip_grad_norm
    both = lambda: made.optimizer.optimizer.parts  # noqa: E731
    made._clip_grad_norm = lambda model: (
        rates.append(tuple(one.param_groups[0]["lr"] for one in both())),
        clip(model),
    )[1]
    made.train()
    assert rates == [(rate, rate) for rate in (1e-2, 0.75e-2, 0.5e-2, 0.25e-2)]


def test_muon_goes_on_from_a_saved_state() -> None:
    """Three steps, saved, and three more in another: the same bits as six."""
    ids = torch.arange(20).reshape(2, 10)

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first = tiny.model(), tiny.model()
    steps(whole, MuonWithAdamW(whole, 1e-2, 0.1, (0.9, 0.98)), 6)
    optimizer = MuonWithAdamW(first, 1e-2, 0.1, (0.9, 0.98))
    steps(first, optimizer, 3)
    saved, second = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(first)
    assert len(saved["state"]) == len(list(first.parameters()))
    again = MuonWithAdamW(second, 1e-2, 0.1, (0.9, 0.98))
    again.load_state_dict(saved)
    steps(second, again, 3)
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
