"""The adaptive layer swap against a reference in torch, written from the paper's rule."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import stacked

from pipeline.merge.methods.adaptive_swap import AdaptiveSwap
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint

Tensors = dict[str, torch.Tensor]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def unit_of(name: str, unit: str) -> str:
    layer, part = name.split(".")[2:4]
    return layer if unit == "layer" else f"{layer} {part}"


def shares(expert: Tensors, base: Tensors, unit: str) -> dict[str, torch.Tensor]:
    """Return the share of each unit in an expert's relative changes."""
    moved: dict[str, torch.Tensor] = {}
    for name, origin in base.items():
        if name.split(".")[-2] in MATRICES and name.endswith("weight"):
            change = torch.linalg.norm((expert[name] - origin).double()) / torch.linalg.norm(
                origin.double()
            )
            key = unit_of(name, unit)
            moved[key] = moved.get(key, torch.zeros(())) + (
                change if unit == "layer" else change**2
            )
    if unit == "module":
        moved = {key: value.sqrt() for key, value in moved.items()}
    total = sum(moved.values(), torch.zeros(())) + 1e-8
    return {key: value / total for key, value in moved.items()}


def reference(
    math: Tensors, language: Tensors, base: Tensors, unit: str, threshold: float
) -> tuple[Tensors, set[str]]:
    """Return the merge and the decisions that occurred."""
    of_math, of_language = shares(math, base, unit), shares(language, base, unit)
    merged, decisions = {}, set()
    for name in base:
        blended = 0.5 * math[name] + 0.5 * language[name]
        if not name.startswith("model.layers."):
            merged[name] = blended
            continue
        key = unit_of(name, unit)
        if key not in of_math:  # a norm beside modules
            merged[name] = language[name]
            continue
        difference = of_math[key] - of_language[key]
        if difference > threshold:
            decision, merged[name] = "math", math[name]
        elif difference < -threshold:
            decision, merged[name] = "language", language[name]
        else:
            decision, merged[name] = "blend", blended
        decisions.add(decision)
    return merged, decisions


@pytest.mark.parametrize("unit", ["layer", "module"])
def test_each_unit_is_of_the_expert_that_moved_it_more(unit: str, tmp_path: Path) -> None:
    folders = {role: tmp_path / role for role in ("base", "math", "language")}
    base = stacked(folders["base"], 8, 0, dtype=torch.float32)
    stacked(folders["math"], 8, 1, base, dtype=torch.float32)
    stacked(folders["language"], 8, 2, base, dtype=torch.float32)
    tensors = {role: load_file(folder / "model.safetensors") for role, folder in folders.items()}
    threshold = 0.004
    expected, decisions = reference(
        tensors["math"], tensors["language"], tensors["base"], unit, threshold
    )
    assert decisions == {"math", "language", "blend"}
    config = AdaptiveSwap(math="m", language="l", unit=unit, threshold=threshold)
    sources = {role: Checkpoint.open(folders[role]) for role in ("math", "language")}
    out = tmp_path / "out"
    out.mkdir()
    open_merge(config, sources, Checkpoint.open(folders["base"]), None, 1).write(out)
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name
