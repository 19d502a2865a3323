"""Model Stock against mergekit's formula in torch, and DARE against its definition."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import stacked

from pipeline.errors import PipelineError
from pipeline.merge.methods.dare import Dare
from pipeline.merge.methods.model_stock import ModelStock
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Write a base and three experts in float32."""
    base = stacked(tmp_path / "base", 4, 0, dtype=torch.float32)
    return [
        base,
        *(stacked(tmp_path / f"{seed}", 4, seed, base, dtype=torch.float32) for seed in (1, 2, 3)),
    ]


def merged(config: Dare | ModelStock, folders: list[Path], out: Path) -> dict[str, torch.Tensor]:
    out.mkdir()
    sources = {str(place): Checkpoint.open(folder) for place, folder in enumerate(folders[1:])}
    open_merge(config, sources, Checkpoint.open(folders[0]), None, 1).write(out)
    return load_file(out / "model.safetensors")


def test_model_stock_follows_the_mean_by_the_angle(folders: list[Path], tmp_path: Path) -> None:
    found = merged(ModelStock(experts=["a", "b", "c"]), folders, tmp_path / "out")
    base, *experts = (load_file(folder / "model.safetensors") for folder in folders)
    for name, origin in base.items():
        offsets = [(expert[name] - origin).double().flatten() for expert in experts]
        pairs = itertools.combinations(offsets, 2)
        cosine = torch.stack(
            [torch.nn.functional.cosine_similarity(one, other, dim=0) for one, other in pairs]
        ).mean()
        share = 3 * cosine / (1 + 2 * cosine)
        mean = torch.stack([expert[name].double() for expert in experts]).mean(0)
        expected = share * mean + (1 - share) * origin.double()
        torch.testing.assert_close(found[name], expected.float(), rtol=1e-5, atol=1e-6)


def test_model_stock_has_no_weights_of_its_user() -> None:
    with pytest.raises(PipelineError, match=r"merge.weights and merge.scale"):
        ModelStock(experts=["a", "b"], scale=0.5).refuse(None, None)


def test_dare_keeps_a_share_of_the_entries_and_scales_them(
    folders: list[Path], tmp_path: Path
) -> None:
    one = folders[:2]
    found = merged(Dare(experts=["a"], density=0.25), one, tmp_path / "out")
    base, expert = (load_file(folder / "model.safetensors") for folder in one)
    kept, entries = 0, 0
    for name, origin in base.items():
        vector = expert[name] - origin
        moved = found[name] != origin
        scaled = origin + vector / np.float32(0.25)
        torch.testing.assert_close(found[name][moved], scaled[moved])
        kept, entries = kept + int(moved.sum()), entries + vector.numel()
    assert 0.15 < kept / entries < 0.35
    again = merged(Dare(experts=["a"], density=0.25), one, tmp_path / "again")
    other = merged(Dare(experts=["a"], density=0.25, seed=1), one, tmp_path / "other")
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert any(not torch.equal(found[name], other[name]) for name in found)
