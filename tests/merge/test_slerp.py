"""SLERP against its definition on whole tensors, hand computations, and mergekit."""

import math

import pytest
import torch
from as_torch import as_torch
from by_mergekit import made_by_mergekit
from safetensors.torch import load_file, save_file
from small_models import TWO_LAYERS, by_hand

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.merge.live import model_of
from pipeline.merge.methods.slerp import Slerp
from pipeline.merge.open_merge import open_merge
from pipeline.models import arrays
from pipeline.models.checkpoint import Checkpoint

CLOSE = {"rtol": 2e-6, "atol": 2e-7}  # of float32: mergekit's angle is float32, ours float64


def slerp(t: float, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute the definition in float64."""
    a, b = first.double().flatten(), second.double().flatten()
    unit_a, unit_b = (v / v.norm() if v.norm() > 1e-8 else v for v in (a, b))
    cosine = (unit_a @ unit_b).clamp(-1, 1)
    if cosine.abs() > 0.9995:
        return ((1 - t) * a + t * b).reshape(first.shape).float()
    theta = torch.acos(cosine)
    found = (torch.sin((1 - t) * theta) * a + torch.sin(t * theta) * b) / torch.sin(theta)
    return found.reshape(first.shape).float()


@pytest.fixture(scope="module")
def sources(models, tmp_path_factory):
    """Write two experts far apart, with nearly equal, colinear, opposite and zero tensors."""
    _, first, second = (Checkpoint.open(folder) for folder in models["qwen2"])
    folder = tmp_path_factory.mktemp("slerp") / "second"
    folder.mkdir()
    for path in first.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: as_torch(second, name) for name in second.names}
    at = "model.layers.{}.mlp.up_proj.weight".format
    tensors[at(0)] = as_torch(first, at(0)) * 3
    tensors[at(1)] = as_torch(first, at(1)) * -2
    tensors[at(2)] = torch.zeros_like(tensors[at(2)])
    tensors[at(3)] = (as_torch(first, at(3)).float() + 0.1 * tensors[at(3)].float()).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return {"0": first, "1": Checkpoint.open(folder)}


def opened(sources, t, **settings):
    return open_merge(Slerp(experts=["a", "b"], t=t, dtype="float32", **settings), sources)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_slerp_is_its_definition_on_whole_tensors(sources, t, monkeypatch):
    monkeypatch.setattr(
        arrays, "PIECE", 50
    )  # entries: the angle is of all rows, whatever the pieces
    merge = opened(sources, t)
    for name in merge.names:
        expected = slerp(t, as_torch(sources["0"], name), as_torch(sources["1"], name))
        torch.testing.assert_close(as_torch(merge, name), expected, **CLOSE)


def test_disk_and_live_agree(models, tmp_path):
    experts = {
        str(index): Checkpoint.open(folder) for index, folder in enumerate(models["llama"][1:])
    }
    open_merge(Slerp(experts=["a", "b"], t=0.3), experts).write(tmp_path, threads=2)
    live = model_of(open_merge(Slerp(experts=["a", "b"], t=0.3), experts), "auto", "cpu")
    written = load_file(tmp_path / "model.safetensors")
    for name, parameter in live.model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, written[name])


def test_what_is_refused(sources, tmp_path):
    with pytest.raises(PipelineError, match="Give two for merge=slerp"):
        Slerp(experts=["a", "b", "c"]).references()
    with pytest.raises(PipelineError, match="merge.t must be at least 0 and at most 1, got 1.5"):
        compose("stage=merge merge=slerp merge.experts=[a,b] merge.t=1.5".split())
    with pytest.raises(PipelineError, match="merge.form=adapter is not possible"):
        opened(sources, 0.5, form="adapter")
    good = by_hand(tmp_path / "good", 1.0)
    bad = by_hand(
        tmp_path / "bad",
        {name: [1.0, math.nan if "up_proj" in name else 2.0] for name in TWO_LAYERS},
    )
    with pytest.raises(
        PipelineError, match="bad/model.safetensors: model.layers.0.mlp.up_proj.weight holds NaN"
    ):
        as_torch(opened({"0": good, "1": bad}, 0.3), "model.layers.0.mlp.up_proj.weight")


@pytest.mark.mergekit
def test_slerp_is_mergekits(sources, tmp_path):
    """Within CLOSE: mergekit finds the angle in float32."""
    folders = [str(source.folder) for source in sources.values()]
    asked = {
        str(t): {
            "merge_method": "slerp",
            "dtype": "float32",
            "base_model": folders[0],
            "models": [{"model": folder} for folder in folders],
            "parameters": {"t": t},
        }
        for t in (0.25, 0.5)
    }
    for t, theirs in made_by_mergekit(asked, tmp_path).items():
        merge = opened(sources, float(t))
        assert set(theirs) == set(merge.names)
        for name in merge.names:
            torch.testing.assert_close(as_torch(merge, name), theirs[name], **CLOSE)
