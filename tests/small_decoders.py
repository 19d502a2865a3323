"""The dense decoders that transformers builds small, random.

The list of architectures that merges are tested on.
"""

from typing import Any

import torch

LAYERS = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SEES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PER_LAYER = {
    "head_dim": 8,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DECODERS: dict[
    str, dict[str, Any]
] = {  # model_type -> what it needs beside the sizes that all have
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "ministral3",
            "qwen2",
            "cohere",
            "cohere2",
            "olmo",
            "olmo2",
            "olmo3",
        ),
        {},
    ),
    **dict.fromkeys(
        ("phi", "phi3", "granite", "smollm3", "apertus", "exaone4", "nemotron", "glm", "glm4"),
        {},
    ),
    **dict.fromkeys(("seed_oss", "ernie4_5", "starcoder2", "stablelm", "arcee", "diffllama"), {}),
    **dict.fromkeys(("jais2", "nanochat"), {}),
    **dict.fromkeys(("gpt2", "xglm", "bloom", "gpt_neox", "mpt", "falcon"), {}),
    **dict.fromkeys(
        ("ministral", "hunyuan_v1_dense", "qwen3", "gemma", "gemma2", "vaultgemma"),
        {"head_dim": 8},
    ),
    "helium": {"head_dim": 8},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "gemma3_text": {"head_dim": 8},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "qwen3_5_text": {**LINEAR, **HEADS, "head_dim": 8},
    "olmo_hybrid": {**LINEAR, **HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {**PER_LAYER, "laurel_rank": 8},
    "gemma4_text": {**PER_LAYER, "global_head_dim": 8},
    "gemma3": {"head_dim": 8},
    "gemma4": {**PER_LAYER, "global_head_dim": 8},
}
NOT_IN_MEMORY = (
    "olmo_hybrid",
)  # its files have other names than its modules: its merges are written to be scored
WITH_TOWERS = {
    "gemma3": {**SEES, "image_size": 28, "patch_size": 14},
    "gemma4": {**SEES, "head_dim": 8},
}


def config_of(kind: str) -> Any:
    from transformers import AutoConfig

    sizes = {**SIZES, **TOKENS, **DECODERS[kind]}
    if kind not in WITH_TOWERS:
        return AutoConfig.for_model(kind, **sizes)
    return AutoConfig.for_model(
        kind, text_config=sizes, vision_config=WITH_TOWERS[kind], audio_config=None, **TOKENS
    )


def network(kind: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config_of(kind))
    with torch.no_grad():
        for parameter in made.parameters():  # norms too, which begin as ones
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()
