"""Names to layers and kinds, checked against the published sizes of the papers' models."""

from collections import Counter

import pytest

from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site, anatomy, num_layers
from pipeline.models.partition import Partition, layer_counts, scaled_count, side_of, sides_of_all

LAYER = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
]
OUTSIDE = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def counted(sites: dict[str, Site], sizes: dict[str, int]) -> Counter[Site]:
    counts: Counter[Site] = Counter()
    for name, size in sizes.items():
        counts[sites[name]] += size
    return counts


def llama_names(layers: int) -> list[str]:
    parts = [*LAYER, "post_attention_layernorm.weight"]
    return OUTSIDE + [f"model.layers.{i}.{part}" for i in range(layers) for part in parts]


def test_the_only_norm_of_a_cohere_layer_is_shared():
    sites = anatomy(f"model.layers.0.{part}" for part in LAYER)
    assert sites["model.layers.0.input_layernorm.weight"] == Site(0, "shared_norm")


@pytest.mark.parametrize(
    "part", ["mlp.experts.gate_up_proj", "mlp.gate.weight", "block_sparse_moe.experts.0.w1.weight"]
)
def test_a_mixture_of_experts_is_refused_with_the_reason(part):
    with pytest.raises(
        PipelineError, match="belongs to a mixture of experts, .* Give a dense model"
    ):
        anatomy([*llama_names(1), f"model.layers.0.{part}"])


@pytest.mark.parametrize("suffix", ["base_layer.weight", "lora_A.default.weight", "lora_B.weight"])
def test_peft_wrapping_is_seen_through(suffix):
    name = f"base_model.model.model.layers.3.self_attn.q_proj.{suffix}"
    assert anatomy([name]) == {name: Site(3, "attention")}


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.0.attention.self.query.weight",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.0.unheard_of.weight",
    ],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(PipelineError, match=name):
        anatomy([name])


def test_a_missing_layer_is_refused():
    names = [name for name in llama_names(4) if ".2." not in name]
    with pytest.raises(PipelineError, match="has layer 3 but no layer 2"):
        num_layers(anatomy(names))
    with pytest.raises(PipelineError, match="no layers"):
        num_layers(anatomy(OUTSIDE))


ONE, TWO = {"attention_norm": 1, "mlp_norm": 1}, {"attention_norm": 2, "mlp_norm": 2}
# model_type and model -> config of the published model, its published total, the norms of a layer
# by kind
FAMILIES = {
    "llama 3.1 8B": ((4096, 14336, 32, 32, 8, 128256), {}, 8_030_261_248, ONE),
    "llama Falcon3 7B": ((3072, 23040, 28, 12, 4, 131072), {"head_dim": 256}, 7_455_550_464, ONE),
    "qwen2 2.5 7B": ((3584, 18944, 28, 28, 4, 152064), {}, 7_615_616_512, ONE),
    "cohere Aya 8B": (
        (4096, 14336, 32, 32, 8, 256000),
        {"logit_scale": 0.125},
        8_028_033_024,
        {"shared_norm": 1},
    ),
    "mistral": ((4096, 14336, 32, 32, 8, 32000), {}, 7_241_732_096, ONE),
    "qwen3": ((4096, 12288, 36, 32, 8, 151936), {"head_dim": 128}, 8_190_735_360, ONE),
    "gemma2": ((3584, 14336, 42, 16, 8, 256000), {"head_dim": 256}, 9_241_705_984, TWO),
    "gemma3_text": ((1152, 6912, 26, 4, 1, 262144), {"head_dim": 256}, 999_885_952, TWO),
    "olmo2": ((4096, 11008, 32, 32, 32, 100352), {}, 7_298_617_344, ONE),
    "olmo3": ((4096, 11008, 32, 32, 32, 100278), {}, 7_298_011_136, ONE),
    "phi": ((2560, 10240, 32, 32, 32, 51200), {}, 2_779_683_840, {"shared_norm": 1}),
    "phi3": ((5120, 17920, 40, 40, 10, 100352), {"pad_token_id": None}, 14_659_507_200, ONE),
    "apertus": ((4096, 21504, 32, 32, 8, 131072), {}, 8_053_338_176, ONE),
}


@pytest.mark.parametrize("model", FAMILIES)
def test_published_parameter_counts(model):
    """Attention and MLP are compared with the modules of transformers' layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (hidden, inner, layers, heads, kv_heads, vocabulary), more, total, norms = FAMILIES[model]
    kind = model.partition(" ")[0]
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        **more,
    )
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    counts = counted(anatomy(sizes), sizes)
    assert sum(counts.values()) == total
    assert counts[Site(None, "embedding")] == vocabulary * hidden
    for number, layer in enumerate(network.model.layers):
        held = {
            part: sum(parameter.numel() for parameter in getattr(layer, name).parameters())
            for part, name in (("attention", "self_attn"), ("mlp", "mlp"))
        }
        assert {part: counts[Site(number, part)] for part in held} == held
        widths = 2 if kind == "phi" else 1  # weight and bias
        assert {
            site.kind: count
            for site, count in counts.items()
            if site.layer == number and "norm" in site.kind
        } == {name: count * widths * hidden for name, count in norms.items()}
    assert (Site(None, "head") in counts) == (not config.tie_word_embeddings)


def test_what_attention_gives_is_normed_by_an_attention_norm():
    """post_attention_layernorm is before the MLP in Llama.

    In Gemma 2 and OLMo 2 it is behind the attention.
    """
    behind = [
        f"model.layers.0.{name}.weight"
        for name in ("post_attention_layernorm", "post_feedforward_layernorm")
    ]
    assert [anatomy(behind)[name].kind for name in behind] == ["attention_norm", "mlp_norm"]
    assert anatomy(behind[:1])[behind[0]].kind == "mlp_norm"


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
