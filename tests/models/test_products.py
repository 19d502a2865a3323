"""float32 products as three of bfloat16, against float64."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=True)).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        split_products(model)
        after = model(input_ids=ids).logits
    assert len(split_layers(model)) == 15 and model.get_input_embeddings().weight.dtype == torch.float32
    assert 0 < (before - after).abs().max() < 1e-5 * before.abs().max() + 1e-6
