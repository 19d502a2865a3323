"""Every dense decoder that transformers builds small: layers of one model in another, and loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from as_torch import as_torch
from small_decoders import DECODERS, LAYERS, NOT_IN_MEMORY, WITH_TOWERS, network

from pipeline.errors import PipelineError
from pipeline.merge.live import Live
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.models.anatomy import anatomy, num_layers, towers
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.names import tensor_names


@pytest.mark.parametrize("kind", DECODERS)
def test_a_swap_is_loaded_and_its_layers_are_where_they_belong(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    for seed, name in enumerate(("math", "language")):
        network(kind, seed).save_pretrained(tmp_path / name)
    opened = {name: Checkpoint.open(tmp_path / name) for name in ("math", "language")}
    outside = {"embeddings": "math", "final_norm": "math", "head": "math"}
    merge = open_merge(LayerSwap(math="m", language="l", bottom_layers=1, top_layers=1, **outside), opened)
    (tmp_path / "out").mkdir()
    merge.write(tmp_path / "out")
    found, math, language = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        for name in ("out", "math", "language")
    )
    sites = anatomy(found)
    assert num_layers(sites) == LAYERS
    for name, parameter in found.items():
        owner = language if sites[name].layer in (0, LAYERS - 1) else math
        assert torch.equal(parameter, owner[name]), name
    live = Live(AutoModelForCausalLM.from_pretrained(tmp_path / "math"), None)
    if kind in NOT_IN_MEMORY:
        with pytest.raises(PipelineError, match="the model in memory has other parameters"):
            live.apply(merge)
        return
    live.apply(merge)
    parameters = dict(live.model.named_parameters())
    for own, name in tensor_names(parameters).items():
        assert torch.equal(parameters[own], as_torch(merge, name)), name


@pytest.mark.parametrize("kind", WITH_TOWERS)
def test_towers_come_from_one_source_whatever_the_method(tmp_path: Path, kind: str) -> None:
    for seed, name in enumerate(("base", "0", "1")):
        made = network(kind, 0)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.01 * seed * torch.randn_like(parameter))
        made.save_pretrained(tmp_path / name)
    base, *experts = (Checkpoint.open(tmp_path / name) for name in ("base", "0", "1"))
    for config in (Soup(experts=["a", "b"], files_from="1"), TaskArithmetic(experts=["a", "b"], files_from="1")):
        merge = open_merge(config, dict(zip("01", experts, strict=True)), base if config.needs_base() else None)
        beside = towers(merge.names)
        assert beside and all(torch.equal(as_torch(merge, name), as_torch(experts[1], name)) for name in beside)
        assert {"where": "tower", "what": "all", "weights": {"1": 1.0}} in merge.method.rows
        inside = next(
            name for name in merge.names if name.endswith("layers.0.mlp.up_proj.weight") and name not in beside
        )
        assert not torch.equal(as_torch(merge, inside), as_torch(experts[1], inside))
