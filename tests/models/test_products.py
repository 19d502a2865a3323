"""float32 products as three of bfloat16, against float64."""

import copy
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.alike import arithmetic_settings
from pipeline.models.products import SplitLinear, split, split_layers, split_products


def test_the_parts_of_a_value_are_it_to_sixteen_bits() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    high, rest = split(values)
    assert high.dtype == rest.dtype == torch.bfloat16
    assert ((high.double() + rest.double() - values).abs() <= values.abs() * 2.0**-16).all()


def test_a_product_is_far_nearer_to_float64_than_one_in_bfloat16() -> None:
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(256, 40), torch.randn(3, 5, 256)
    exact = inputs.double() @ layer.weight.double().T + layer.bias.double()
    error = (SplitLinear(layer)(inputs).double() - exact).abs().max()
    rounded = (layer.bfloat16()(inputs.bfloat16()).double() - exact).abs().max()
    assert error < 2e-5 * exact.abs().max() and error < rounded / 100


def test_entries_are_written_in_the_order_in_which_they_lie() -> None:
    layer = torch.nn.Linear(6, 4, bias=False)
    parts = SplitLinear(copy.deepcopy(layer))
    with torch.no_grad():
        layer.weight.view(-1)[5:14] = torch.arange(9.0) / 7
    parts.write(5, torch.arange(9.0) / 7)
    assert torch.equal(parts.weight, SplitLinear(layer).weight)


def test_a_tied_head_has_its_own_parts_and_the_embeddings_stay_float32() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=True)).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        split_products(model)
        after = model(input_ids=ids).logits
    assert (
        len(split_layers(model)) == 15
        and model.get_input_embeddings().weight.dtype == torch.float32
    )
    assert 0 < (before - after).abs().max() < 1e-5 * before.abs().max() + 1e-6


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
AS_PUBLISHED = {  # config.json as transformers 4 wrote them
    "Llama 3.2": dict(
        model_type="llama",
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={**LLAMA3, "rope_type": "llama3"},
        max_position_embeddings=131072,
        vocab_size=128256,
        num_hidden_layers=16,
    ),
    "Llama 2, stretched": dict(model_type="llama", rope_scaling={"type": "linear", "factor": 4.0}),
    "Llama with yarn": dict(
        model_type="llama", rope_scaling={"type": "yarn", "factor": 4.0}, rope_theta=1e6
    ),
    "Qwen2.5": dict(
        model_type="qwen2",
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_hidden_layers=28,
        rope_theta=1000000.0,
        use_mrope=False,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=28,
    ),
    "Qwen with windows": dict(
        model_type="qwen2",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
    ),
    "Qwen3": dict(model_type="qwen3", num_hidden_layers=28, rope_theta=1000000, rope_scaling=None),
    "Aya Expanse": dict(
        model_type="cohere",
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=10000,
        logit_scale=0.125,
        layer_norm_eps=1e-5,
        vocab_size=256000,
    ),
    "Mistral": dict(model_type="mistral", sliding_window=None, rope_theta=1000000.0, head_dim=None),
}


def as_transformers_writes(config):
    from transformers import AutoConfig

    own = json.loads(json.dumps(config))  # it writes into what it is given
    return json.loads(json.dumps(AutoConfig.for_model(**own).to_dict()))


def differing(first, second):
    """Keys that both have with other values."""
    a, b = arithmetic_settings(first), arithmetic_settings(second)
    return {key for key in a.keys() & b.keys() if a[key] != b[key]}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_both_spellings_are_one(name):
    assert not differing(AS_PUBLISHED[name], as_transformers_writes(AS_PUBLISHED[name]))


@pytest.mark.parametrize("name", AS_PUBLISHED)
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_theta": 123.0},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_what_changes_arithmetic_shows_in_either_spelling(name, change):
    before, after = AS_PUBLISHED[name], AS_PUBLISHED[name] | change
    assert differing(as_transformers_writes(before), after)
    assert differing(as_transformers_writes(before), as_transformers_writes(after))
