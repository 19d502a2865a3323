"""The towers of models that see come from one source.

Partitions of families beside the papers' take whole modules.
"""

from pathlib import Path

import pytest
import torch
from as_torch import as_torch
from small_decoders import WITH_TOWERS, network

from pipeline.config.training import Partition
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.open_merge import open_merge
from pipeline.merge.summary import group_weights
from pipeline.models.anatomy import anatomy, towers
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.partition import sides_of_all


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
    for config in (
        Soup(experts=["a", "b"], files_from="1"),
        TaskArithmetic(experts=["a", "b"], files_from="1"),
    ):
        merge = open_merge(
            config, dict(zip("01", experts, strict=True)), base if config.needs_base() else None
        )
        beside = towers(merge.names)
        assert beside and all(
            torch.equal(as_torch(merge, name), as_torch(experts[1], name)) for name in beside
        )
        rows = group_weights(merge)
        assert {"where": "tower", "what": "all", "weights": {"1": 1.0}} in rows
        inside = next(
            name
            for name in merge.names
            if name.endswith("layers.0.mlp.up_proj.weight") and name not in beside
        )
        assert not torch.equal(as_torch(merge, inside), as_torch(experts[1], inside))


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo2", "phi3", "apertus"])
def test_a_partition_into_attention_and_mlp_takes_whole_modules_and_their_norms(kind: str) -> None:
    made = network(kind, 0)
    names = dict(made.named_parameters())
    partition = Partition(name="mine", bottom_layers=0, top_layers=0, all_attention=True)
    side_of = dict(sides_of_all(partition, anatomy(names)))
    for name in names:
        if ".self_attn." in name or ".mlp." in name:
            assert side_of[name] == ("language" if ".self_attn." in name else "math"), name
    norms = {
        name.split(".")[-2]: side
        for name, side in side_of.items()
        if name.startswith("model.layers.0.") and "norm" in name
    }
    language = {name for name, side in norms.items() if side == "language"} - {"q_norm", "k_norm"}
    expected = {
        "gemma3_text": {"input_layernorm", "post_attention_layernorm"},
        "olmo2": {"post_attention_layernorm"},
        "phi3": {"input_layernorm"},
        "apertus": {"attention_layernorm"},
    }
    assert language == expected[kind]
