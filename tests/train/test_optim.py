"""Optimizers: what they save, and what rounding costs."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from pipeline.train import memory
from pipeline.train.memory import moment_bytes, trained_width
from pipeline.train.trainer import Trainer, trainer_arguments, warn_of_rate

CHOICES = [
    (weights, optimizer)
    for weights in ("float32", "bfloat16")
    for optimizer in ("adamw", "adamw_8bit")
]


def state_bytes(optimizer: Any) -> int:
    """Bytes of all state tensors but the step counts; of eight-bit ones, of their codes."""
    tensors = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    return sum(
        t.codes.numel() if hasattr(t, "codes") else t.numel() * t.element_size() for t in tensors
    )


@pytest.mark.parametrize(("weights", "optimizer"), CHOICES)
def test_bytes_a_parameter_are_those_of_the_table(
    tmp_path: Path, weights: str, optimizer: str
) -> None:
    """On a model whose matrices fill whole blocks.

    Smaller tensors keep moments in the weights' dtype.
    """
    recipe = tiny.recipe(weights=weights, optimizer=optimizer, learning_rate=1e-4, steps=1)
    big = tiny.model(
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        vocab_size=1024,
        dtype=getattr(torch, weights),
    )
    made = tiny.trainer(tmp_path, recipe, tiny.rows(4), of=big)
    made.train()
    weight_bytes = sum(p.numel() * p.element_size() for p in made.model.parameters())
    count = sum(p.numel() for p in made.model.parameters())
    total = 2 * weight_bytes + state_bytes(made.optimizer)  # a gradient is as large as its weight
    assert total / count == pytest.approx(
        2 * trained_width(recipe) + moment_bytes(recipe), rel=0.02
    )


@pytest.mark.parametrize(("weights", "optimizer"), CHOICES)
def test_what_rounding_leaves_of_a_small_movement(
    tmp_path: Path, weights: str, optimizer: str
) -> None:
    """40 steps at a rate a hundredth of what bfloat16 resolves.

    The mean movement, against AdamW in fp32.
    """
    recipe = tiny.recipe(weights=weights, optimizer=optimizer, learning_rate=1e-6, weight_decay=0.0)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.full((64, 256), 0.02).to(getattr(torch, weights)))
    if optimizer == "adamw":
        made: Any = torch.optim.AdamW([weight], lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    else:
        args = trainer_arguments(tiny.stage(recipe), False, False, tmp_path)
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        made = kind([weight], weight_decay=0.0, **settings)
    start = weight.detach().clone()
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        made.step()
    moved = (weight.detach().float() - start.float()).mean().item()
    if weights == "bfloat16" and optimizer == "adamw":
        assert moved == 0.0
    else:  # 16,384 entries: chance moves their mean by about 2 %
        assert moved == pytest.approx(-40e-6, rel=0.1)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (
            {"weights": "bfloat16", "learning_rate": 1e-6},
            "is below 1e-05, where most updates of bfloat16 weights",
        ),
        ({"weights": "bfloat16", "learning_rate": 1e-6, "optimizer": "adamw_8bit"}, ""),
        ({"weights": "bfloat16", "learning_rate": 1e-4}, ""),
        ({"weights": "float32", "learning_rate": 1e-7}, ""),
        (
            {"adapter": "lora", "learning_rate": 1e-6},
            "sft.learning_rate=1e-06 is below 1e-05, where adapters",
        ),
    ],
)
def test_a_rate_at_which_updates_are_lost_is_warned_of(
    knobs: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By arithmetic: 98 % of them at 1e-6, where bfloat16 rounds to nearest."""
    warn_of_rate(tiny.recipe(**knobs))
    err = capsys.readouterr().err
    assert told in err and bool(err) == bool(told)


def test_a_training_in_eight_bits_leaves_the_next_one_its_compiler(tmp_path: Path) -> None:
    """Of one process, as of a table's worker.

    On a CPU torchao's steps are not compiled, sft.compile's are.
    """
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    for optimizer, times in (("adamw_8bit", int(torch.cuda.is_available())), ("adamw", 1)):
        torch.compiler.reset()
        compiled.clear()
        trainer_arguments(tiny.stage(tiny.recipe(optimizer=optimizer)), False, False, tmp_path)
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert len(compiled) == times


@pytest.mark.parametrize("instructions", [True, False])
def test_products_that_a_cpu_has_no_instructions_for_are_told_of(
    monkeypatch: pytest.MonkeyPatch, instructions: bool
) -> None:
    monkeypatch.setattr(memory, "has_bf16", lambda: instructions)
    assert bool(memory.emulated(tiny.recipe(precision="bf16"))) != instructions
    assert not memory.emulated(tiny.recipe(precision="fp32"))
