"""Random tiny models of each architecture, for all tests of merges."""

from __future__ import annotations

import pytest
import torch
from small_models import LAYERS


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """kind -> (base, math, language): folders of random tiny models in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for kind in ("llama", "qwen2", "cohere"):
        sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
        config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=LAYERS, vocab_size=64)
        folders, start = [], {}
        for seed, role in enumerate(("base", "math", "language")):
            torch.manual_seed(seed)
            folder = tmp_path_factory.mktemp(kind) / role
            network = AutoModelForCausalLM.from_config(config)
            for name, parameter in network.named_parameters():  # norms too: a constant would hide a wrong owner
                start.setdefault(name, torch.randn_like(parameter) * 0.1)
                moved = 0 if role == "base" else torch.randn_like(parameter) * 0.05
                parameter.data = start[name] + moved
            network.to(torch.bfloat16).save_pretrained(folder)
            (folder / "tokenizer.json").write_text(f'{{"of": "{role}"}}')
            (folder / "chat_template.jinja").write_text(role)
            folders.append(folder)
        made[kind] = folders
    return made
