"""Weights of layer swaps and soups, against Algorithm 1 worked by hand."""

import pytest

from pipeline.errors import PipelineError
from pipeline.merge.methods.layer_swap import LayerSwap, layer_swap_weights
from pipeline.merge.methods.soup import Soup
from pipeline.models.anatomy import Site, anatomy

MATH, LANGUAGE, AVERAGE = {"math": 1.0}, {"language": 1.0}, {"math": 0.5, "language": 0.5}


def model(layers: int, own_head: bool = True) -> dict[str, Site]:
    parts = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "post_attention_layernorm")
    names = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    outside = ["model.embed_tokens.weight", "model.norm.weight", *(["lm_head.weight"] if own_head else [])]
    return anatomy([*names, *outside])


def swap(layers: int, own_head: bool = True, **settings) -> dict[str, dict[str, float]]:
    return layer_swap_weights(LayerSwap(math="m", language="l", **settings), model(layers, own_head))


def by_layer(weights, part="mlp.up_proj") -> str:
    """One letter a layer: m, l, or a for the average."""
    letters = {tuple(MATH): "m", tuple(LANGUAGE): "l", tuple(AVERAGE): "a"}
    rows = [weights[f"model.layers.{i}.{part}.weight"] for i in range(sum(part in name for name in weights))]
    return "".join(letters[tuple(row)] for row in rows)


def test_transition_zones_lie_inside_next_to_the_swapped_layers():
    zones = {"bottom_layers": 2, "bottom_transition": 1, "top_transition": 2, "top_layers": 1}
    assert by_layer(swap(10, **zones)) == "llammmmaal"
    assert by_layer(swap(10, **zones, zones="math")) == "llmmmmmmml"
    assert by_layer(swap(10, **zones, zones="language")) == "lllmmmmlll"
    assert by_layer(swap(6, **zones)) == "llaaal"  # the zones may touch: no math layer is left


def test_layer_norms_by_the_letter_are_averaged():
    weights = swap(4, bottom_layers=1, top_layers=1, layer_norms="average")
    assert by_layer(weights, "input_layernorm") == by_layer(weights, "post_attention_layernorm") == "aaaa"
    assert by_layer(weights) == by_layer(weights, "self_attn.q_proj") == "lmml"


def test_scaled_to_depth():
    # 14 layers: 5 -> 2, 2 -> 1, a zone of 3 -> 1, no zone stays none
    assert by_layer(swap(14, scale_to_depth=True)) == "ll" + "m" * 11 + "l"
    assert by_layer(swap(14, scale_to_depth=True, bottom_transition=3)) == "lla" + "m" * 10 + "l"


def test_soups():
    assert Soup(experts=["a", "b"]).shares() == {"0": 0.5, "1": 0.5}
    assert Soup(experts=["a", "b"], weights=[0.25, 0.75]).shares() == {"0": 0.25, "1": 0.75}
    assert Soup(experts=["a", "b"], weights=[0, 1]).shares() == {"1": 1.0}
    thirds = Soup(experts=["a", "b", "c"], weights=[0.3333333, 0.3333333, 0.3333333]).shares()
    assert sum(thirds.values()) == pytest.approx(1, abs=1e-6)
    with pytest.raises(PipelineError, match=r"merge.weights must sum to 1, got \[0.5, 0.51\], which sum to 1.01"):
        Soup(experts=["a", "b"], weights=[0.5, 0.51]).shares()
