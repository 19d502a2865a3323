"""Layer swaps of families beside the papers', held against networks whose layers are exchanged as modules."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.training import Partition
from pipeline.models.anatomy import anatomy
from pipeline.models.partition import sides_of_all

LAYERS = 4


def network(kind: str, seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"pad_token_id": None} if kind == "phi3" else {"head_dim": 8} if kind.startswith("gemma") else {}
    config = AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():  # norms too, which begin as ones
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


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
