"""Partitions A, B, C and Z against sides written out by hand."""

import pytest

from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site, anatomy
from pipeline.models.partition import Partition, layer_counts, scaled_count, side_of, sides_of_all

A = Partition("A", 6, 2, all_attention=True)
B = Partition("B", 8, 4)
C = Partition("C", 6, 2)
Z = Partition("Z", 8, 4, inverse=True)


def language_layers(partition: Partition, kind: str, layers: int) -> list[int]:
    return [i for i in range(layers) if side_of(partition, Site(i, kind), layers) == "language"]


def test_b_c_and_z_on_32_layers():
    for kind in ("attention", "mlp", "attention_norm", "mlp_norm", "shared_norm"):
        assert language_layers(B, kind, 32) == [0, 1, 2, 3, 4, 5, 6, 7, 28, 29, 30, 31]
        assert language_layers(C, kind, 32) == [0, 1, 2, 3, 4, 5, 30, 31]
        assert language_layers(Z, kind, 32) == list(range(8, 28))  # math trains the outer twelve


def test_counts_are_absolute_on_28_layers():
    assert language_layers(B, "mlp", 28) == [0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27]


def test_a_gives_attention_and_its_norm_to_language():
    assert language_layers(A, "attention", 32) == list(range(32))
    assert language_layers(A, "attention_norm", 32) == list(range(32))
    assert language_layers(A, "mlp", 32) == [0, 1, 2, 3, 4, 5, 30, 31]
    assert language_layers(A, "mlp_norm", 32) == [0, 1, 2, 3, 4, 5, 30, 31]
    assert side_of(A, Site(6, "mlp"), 32) == "math"


def test_a_freezes_the_shared_norm_of_the_middle():
    assert side_of(A, Site(5, "shared_norm"), 32) == "language"
    assert side_of(A, Site(6, "shared_norm"), 32) == "frozen"
    assert side_of(A, Site(30, "shared_norm"), 32) == "language"


@pytest.mark.parametrize("kind", ["embedding", "final_norm", "head"])
def test_outside_parameters(kind):
    assert side_of(B, Site(None, kind), 32) == "outside"
    assert side_of(Partition("B", 8, 4, outside="math"), Site(None, kind), 32) == "math"


def test_scaling_to_depth():
    # 6 x 14 / 32 = 2.6 and 2 x 14 / 32 = 0.9, at least 1; a count of zero stays zero
    assert layer_counts(Partition("C", 6, 2, scale_to_depth=True), 14) == (2, 1)
    assert layer_counts(Partition("B", 8, 4, scale_to_depth=True), 14) == (3, 1)
    assert scaled_count(0, 14) == 0
    assert layer_counts(Partition("B", 8, 4, scale_to_depth=True), 32) == (8, 4)


def model(layers: int) -> dict[str, Site]:
    parts = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "post_attention_layernorm")
    names = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    return anatomy([*names, "model.embed_tokens.weight", "model.norm.weight"])


def test_sides_of_a_whole_model():
    result = sides_of_all(Partition("P", 1, 1), model(3))
    assert {name: value for name, value in result.items() if "up_proj" in name} == {
        "model.layers.0.mlp.up_proj.weight": "language",
        "model.layers.1.mlp.up_proj.weight": "math",
        "model.layers.2.mlp.up_proj.weight": "language",
    }
    assert result["model.embed_tokens.weight"] == "outside"
    assert set(result) == set(model(3))


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (Partition("P", 0, 0), "none to language"),
        (Partition("P", 2, 1), "none to math"),
        (Partition("P", 2, 1, inverse=True), "none to language"),
        (Partition("P", 3, 1), "the model has 3"),
    ],
)
def test_partitions_that_do_not_split_are_refused(partition, words):
    with pytest.raises(PipelineError, match=words):
        sides_of_all(partition, model(3))
