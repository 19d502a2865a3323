"""Layer swaps of families beside the papers', held against networks whose layers are exchanged as modules."""

import pytest
from small_decoders import network

from pipeline.config.training import Partition
from pipeline.models.anatomy import anatomy
from pipeline.models.partition import sides_of_all


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
        "gemma3_text": {"input_layernorm", "post_attention_layernorm"}, "olmo2": {"post_attention_layernorm"},
        "phi3": {"input_layernorm"}, "apertus": {"attention_layernorm"},
    }  # fmt: skip
    assert language == expected[kind]
