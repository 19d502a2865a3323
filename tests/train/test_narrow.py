"""Frozen matrices in bfloat16, and adapters whose inputs PEFT does not cast.

The same bits as without, in half the bytes.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline.config.training import Partition
from pipeline.runs.tracking import Tracker
from pipeline.train import load
from pipeline.train.processes import train_together
from pipeline.train.save import save_model

LORA = {"adapter": "lora", "lora_rank": 4}
A = Partition(name="A", bottom_layers=1, top_layers=1, all_attention=True)
C = Partition(name="C", bottom_layers=2, top_layers=1)
WAYS: dict[str, tuple[dict[str, Any], Partition | None]] = {
    "lora": (LORA, None),
    "mixed_lora": ({"method": "mixed", **LORA}, None),
    "partial A": ({"method": "partial", "side": "language"}, A),
    "partial B": ({"method": "partial", "side": "math"}, tiny.B),
    "partial C, checkpointing": (
        {"method": "partial", "side": "language", "gradient_checkpointing": True},
        C,
    ),
    "partial_lora": ({"method": "partial", "side": "math", **LORA}, tiny.B),
    "simultaneous_lora": ({"method": "simultaneous", **LORA}, tiny.B),
}


def train(
    folder: Path, way: str, stored: torch.dtype = torch.bfloat16, resume: int = 0, **more: Any
) -> dict[str, Any]:
    """Train, stop after a step and resume; return losses, gradients, tensors and bytes."""
    knobs, partition = WAYS[way]
    recipe = tiny.recipe(precision="bf16", learning_rate=1e-3, **knobs, **more)
    joint = recipe.method in ("mixed", "simultaneous")
    found: dict[str, Any] = {"losses": [], "gradients": []}
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: found["gradients"].append(
            [
                p.grad.clone()
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
        )
    )
    for stop in (resume, 0) if resume else (0,):
        of, examples = tiny.model(dtype=stored).float(), tiny.joint(8) if joint else tiny.rows(16)
        of.config.dtype = torch.float32  # as from_pretrained leaves it
        made = tiny.trainer(folder / "trainer", recipe, examples, partition, of=of)
        if stop:
            made.args.save_strategy, made.args.save_steps, made.args.max_steps = "steps", stop, stop
            made.args.lr_scheduler_kwargs = {}
        made.train(
            resume_from_checkpoint=(
                str(folder / f"trainer/checkpoint-{resume}") if resume and not stop else None
            )
        )
    hook.remove()
    if made.is_world_process_zero():
        save_model(made.model, made.processing_class, folder, None)
        found["saved"] = {
            name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()
        }
    found["losses"] = [row["loss"] for row in made.state.log_history if "loss" in row]
    found["narrow"] = [
        name for name, p in made.model.named_parameters() if p.dtype == torch.bfloat16
    ]
    found["bytes"] = sum(p.numel() * p.element_size() for p in made.model.parameters())
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"] and len(one["losses"]) > 2
    assert len(one["gradients"]) == len(other["gradients"])
    for ours, theirs in zip(one["gradients"], other["gradients"], strict=True):
        assert len(ours) > 1 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert one["saved"].keys() == other["saved"].keys()
    for name, tensor in one["saved"].items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, other["saved"][name]), name


def wide(train: Any, *given: Any, **named: Any) -> Any:
    """With the weights kept wide, and PEFT's casts."""
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(load, "narrow_frozen", lambda *_: None)
        return train(*given, **named)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_in_fewer_bytes(tmp_path: Path, way: str) -> None:
    before, after = wide(train, tmp_path / "a", way), train(tmp_path / "b", way)
    same(before, after)
    assert not before["narrow"] and after["narrow"] and after["bytes"] < before["bytes"]
    of_layers = [name for name in after["narrow"] if "embed_tokens" not in name]
    assert all(
        ".layers." in name and ".lora_" not in name and "norm" not in name for name in of_layers
    )
    assert (len(of_layers) < len(after["narrow"])) == (
        "lora" in way
    )  # embeddings of adapters, which are untied here


@pytest.mark.parametrize("way", ["lora", "partial B", "simultaneous_lora"])
def test_resumed_it_has_the_same_bits(tmp_path: Path, way: str) -> None:
    more = {"schedule": "constant"}
    same(wide(train, tmp_path / "a", way, **more), train(tmp_path / "b", way, resume=2, **more))


@pytest.mark.parametrize("way", ["lora", "partial B"])
def test_values_that_bfloat16_cannot_hold_stay_wide(tmp_path: Path, way: str) -> None:
    after = train(tmp_path / "b", way, torch.float32)
    same(wide(train, tmp_path / "a", way, torch.float32), after)
    assert not after["narrow"]


def test_embeddings_trained_with_in_bfloat16_stay_so(tmp_path: Path) -> None:
    recipe = tiny.recipe(precision="bf16", weights="bfloat16", **LORA)
    made = tiny.trainer(tmp_path, recipe, tiny.rows(16), None, of=tiny.model(dtype=torch.bfloat16))
    assert made.model.get_input_embeddings()(torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_dropout_keeps_its_mask(tmp_path: Path) -> None:
    same(
        wide(train, tmp_path / "a", "lora", lora_dropout=0.3),
        train(tmp_path / "b", "lora", lora_dropout=0.3),
    )


def both_ways(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Each way in two processes, narrow and wide; the names of those whose bits differ."""
    different = []
    for way in WAYS:
        more = {"processes": 2, "micro_batch_size": 1}
        found = [
            made(work / name / way, way, **more) for name, made in (("n", train), ("w", keep_wide))
        ]
        if "saved" in found[0]:
            try:
                same(*found)
                assert found[0]["narrow"] and not found[1]["narrow"]
            except AssertionError:
                different.append(way)
    return {"different": different}


def keep_wide(*given: Any, **named: Any) -> Any:
    return wide(train, *given, **named)


def test_two_processes_have_the_same_bits(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(
        name="run", config=SimpleNamespace(sft=SimpleNamespace(processes=2), threads=1)
    )
    tracker: Tracker = SimpleNamespace(log=lambda *_, **__: None)  # type: ignore[assignment]
    assert train_together(both_ways, run, tmp_path, tracker) == {"different": []}
