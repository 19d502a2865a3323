"""Weights of layer swaps and soups, against Algorithm 1 worked by hand."""

from pathlib import Path

import pytest

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge import methods
from pipeline.merge.methods import METHODS
from pipeline.merge.methods.layer_swap import LayerSwap, layer_swap_weights
from pipeline.merge.methods.soup import Soup
from pipeline.models.anatomy import Site, anatomy

MATH, LANGUAGE, AVERAGE = {"math": 1.0}, {"language": 1.0}, {"math": 0.5, "language": 0.5}


def model(layers: int, own_head: bool = True) -> dict[str, Site]:
    parts = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "post_attention_layernorm")
    names = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    outside = [
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(["lm_head.weight"] if own_head else []),
    ]
    return anatomy([*names, *outside])


def swap(layers: int, own_head: bool = True, **settings) -> dict[str, dict[str, float]]:
    return layer_swap_weights(
        LayerSwap(math="m", language="l", **settings), model(layers, own_head)
    )


def by_layer(weights, part="mlp.up_proj") -> str:
    """One letter a layer: m, l, or a for the average."""
    letters = {tuple(MATH): "m", tuple(LANGUAGE): "l", tuple(AVERAGE): "a"}
    rows = [
        weights[f"model.layers.{i}.{part}.weight"]
        for i in range(sum(part in name for name in weights))
    ]
    return "".join(letters[tuple(row)] for row in rows)


def test_transition_zones_lie_inside_next_to_the_swapped_layers():
    zones = {"bottom_layers": 2, "bottom_transition": 1, "top_transition": 2, "top_layers": 1}
    assert by_layer(swap(10, **zones)) == "llammmmaal"
    assert by_layer(swap(10, **zones, zones="math")) == "llmmmmmmml"
    assert by_layer(swap(10, **zones, zones="language")) == "lllmmmmlll"
    assert by_layer(swap(6, **zones)) == "llaaal"  # the zones may touch: no math layer is left


def test_layer_norms_by_the_letter_are_averaged():
    weights = swap(4, bottom_layers=1, top_layers=1, layer_norms="average")
    assert (
        by_layer(weights, "input_layernorm")
        == by_layer(weights, "post_attention_layernorm")
        == "aaaa"
    )
    assert by_layer(weights) == by_layer(weights, "self_attn.q_proj") == "lmml"


def test_scaled_to_depth():
    # 14 layers: 5 -> 2, 2 -> 1, a zone of 3 -> 1, no zone stays none
    assert by_layer(swap(14, scale_to_depth=True)) == "ll" + "m" * 11 + "l"
    assert by_layer(swap(14, scale_to_depth=True, bottom_transition=3)) == "lla" + "m" * 10 + "l"


def shares(count: int, weights: list[float] | None = None) -> dict[str, float]:
    """Return the weights of a soup of `count` experts in one parameter."""
    soup = Soup(experts=[str(role) for role in range(count)], weights=weights)
    return soup.shares_in({"x": Site(None, "embedding")})["x"]


def test_soups():
    assert shares(2) == {"0": 0.5, "1": 0.5}
    assert shares(2, [0.25, 0.75]) == {"0": 0.25, "1": 0.75}
    assert shares(2, [0, 1]) == {"1": 1.0}
    thirds = shares(3, [0.3333333, 0.3333333, 0.3333333])
    assert sum(thirds.values()) == pytest.approx(1, abs=1e-6)
    with pytest.raises(PipelineError, match=r"merge.weights=\[0.5, 0.51\] sum to 1.01"):
        shares(2, [0.5, 0.51])


def test_methods_are_the_files_of_the_folder() -> None:
    files = sorted(
        path.stem for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__"
    )
    assert list(METHODS) == files and len(files) >= 5
    assert all(kind.method == name for name, kind in METHODS.items())


@pytest.mark.parametrize(
    ("method", "knobs", "partition", "label"),
    [
        ("layer_swap", {"math": "a", "language": "b", "bottom_layers": 4}, None, "layer_swap-4-2"),
        ("layer_swap", {"math": "a", "language": "b"}, Partition("B", 8, 4), "layer_swap-B"),
        ("reset", {"expert": "a", "side": "math"}, Partition("C", 3, 1), "reset-C-math"),
        ("reset", {"expert": "a", "layers": [0]}, None, "reset-layers"),
        ("reset", {"expert": "a", "threshold": 0.1}, None, "reset-rows"),
        ("ties", {"experts": ["a", "b"]}, None, "ties"),
    ],
)
def test_labels(
    method: str, knobs: dict[str, object], partition: Partition | None, label: str
) -> None:
    assert METHODS[method](**knobs).label(partition, None) == label


def test_a_swap_is_named_by_its_layers_in_the_model() -> None:
    """5 and 2 of 32 layers are 4 and 1 of SmolLM2's 30, and 1 and 1 of 8."""
    swap = METHODS["layer_swap"](scale_to_depth=True)
    assert [swap.label(None, layers) for layers in (None, 32, 30, 8)] == [
        "layer_swap-5-2",
        "layer_swap-5-2",
        "layer_swap-4-1",
        "layer_swap-1-1",
    ]


def test_scaling_is_advised_where_it_fits() -> None:
    for layers, advised in ((6, True), (1, False)):
        with pytest.raises(PipelineError, match=f"the model has {layers}. Lower them") as caught:
            METHODS["layer_swap"]().refuse(None, layers)
        assert ("or set merge.scale_to_depth=true" in str(caught.value)) == advised


def test_weights_over_depth_are_interpolated_from_the_first_to_the_last_layer() -> None:
    sites = model(5)
    shares = Soup(experts=["a", "b"], weights=[[1.0, 0.0], [0.0, 1.0]]).shares_in(sites)
    of_first = [
        shares[f"model.layers.{layer}.mlp.up_proj.weight"].get("0", 0.0) for layer in range(5)
    ]
    assert of_first == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert shares["model.embed_tokens.weight"] == shares["lm_head.weight"] == {"0": 1.0}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([[1.0, 0.5], [0.0, 0.4]], ["sum to 1", "layer 1"]),
        ([[1.0], []], ["empty list"]),
        ([[1.0, 0.5]], ["1", "2 merge.experts"]),
    ],
)
def test_weights_over_depth_that_cannot_be(weights: list[list[float]], words: list[str]) -> None:
    with pytest.raises(PipelineError) as raised:
        Soup(experts=["a", "b"], weights=weights).shares_in(model(3))
    assert all(word in str(raised.value) for word in words), raised.value
