"""Adapters as PEFT's own tests configure them (tests/test_custom_models.py).

Read as PEFT reloads and merges them, or refused by the key that makes them something else.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from as_torch import as_torch

from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
READ = {
    "one module by its name": {"target_modules": "model.layers.1.mlp.up_proj"},
    "a pattern": {"target_modules": r".*\.(q|v)_proj"},
    "all linear layers": {"target_modules": "all-linear"},
    "without some": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "some layers": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "ranks and alphas": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 5, r"layers.0.*q_proj": 2},
        "alpha_pattern": {"q_proj": 3, r"model\.layers\.2\.mlp\.up_proj": 7},
        "use_rslora": True,
    },
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "biases of its layers": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "a whole module": {"target_modules": ["q_proj"], "modules_to_save": ["down_proj", "norm"]},
    "a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "the head": {"target_modules": ["lm_head", "q_proj"]},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal", "r": 4},
    "random": {"target_modules": ["q_proj"], "init_lora_weights": False},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "an adapter with use_dora=True. Only plain LoRA"),
    "a bias of B": ({"lora_bias": True}, "lora_bias=True"),
    "pissa": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights=pissa, which changes the base",
    ),
    "pissa by steps": ({"init_lora_weights": "pissa_niter_2"}, "init_lora_weights=pissa_niter_2"),
    "olora": ({"init_lora_weights": "OLoRA"}, "init_lora_weights=olora"),
    "alora": ({"alora_invocation_tokens": [3, 4]}, r"alora_invocation_tokens=\[3, 4\]"),
    "embedding": (
        {"target_modules": ["embed_tokens"]},
        "lora_embedding_A is not a factor of a linear layer",
    ),
    "tokens": ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices=\[1, 2\]"),
    "parameters": (
        {"target_modules": [], "target_parameters": ["up_proj.weight"]},
        "target_parameters=",
    ),
    "replicated": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication="),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("peft") / "base"
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter by PEFT in which every trainable parameter was moved."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    words = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    } | settings
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**words))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", READ)
def test_read_as_peft_reloads_and_merges_it(case: str, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = adapter(base, tmp_path / "adapter", **READ[case])
    start = AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    expected = PeftModel.from_pretrained(start, folder).merge_and_unload().state_dict()
    source = open_source(folder)
    assert set(source.names) == set(expected)
    moved = [name for name in expected if not torch.equal(expected[name], before[name])]
    assert moved
    for name, tensor in expected.items():
        found = as_torch(source, name)
        if name in moved:
            torch.testing.assert_close(found, tensor, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found, tensor), name
        if tensor.dim() > 1:
            torch.testing.assert_close(
                torch.from_numpy(source.rows(name, 1, 3)), tensor[1:3], rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("case", REFUSED)
def test_other_arithmetic_is_refused_by_its_key(case: str, base: Path, tmp_path: Path) -> None:
    settings, words = REFUSED[case]
    with pytest.raises(PipelineError, match=words):
        open_source(adapter(base, tmp_path / "adapter", **settings))


def test_what_a_later_peft_adds_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(
        file.read_text().replace("{", '{"use_better_lora": true, "use_other_lora": null, ', 1)
    )
    with pytest.raises(
        PipelineError, match="an adapter with use_better_lora=True. Only plain LoRA"
    ):
        open_source(folder)


def test_the_head_of_a_tied_model(tmp_path: Path) -> None:
    """The head is the embedding:

    PEFT parts them, and neither a swap nor a soup could tell which is meant.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tied = tmp_path / "tied"
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(tied)
    with pytest.raises(
        PipelineError, match=r"lm_head\S* belongs to an output head, but the head of .* is tied"
    ):
        open_source(adapter(tied, tmp_path / "adapter", target_modules=["lm_head", "q_proj"]))
    with pytest.raises(PipelineError, match="modules_to_save"):
        open_source(adapter(tied, tmp_path / "saved", modules_to_save=["embed_tokens"]))
