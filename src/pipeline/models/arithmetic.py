"""The settings of a config.json that decide a model's arithmetic, in one spelling: models that differ there do not
merge.

Missing keys have the default of their architecture, as transformers 5 reads them, and both spellings of the
rotary embedding (rope_theta and rope_scaling of transformers 4, rope_parameters of 5) are one. No library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARMLESS = {  # two models that differ here alone compute the same
    # where the file is from, and how a model is held in memory
    *("_name_or_path", "name_or_path", "transformers_version", "unsloth_version", "unsloth_fixed"),
    *("dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("use_cache", "gradient_checkpointing", "tokenizer_class", "torchscript"),
    # read by training alone
    *("initializer_range", "attention_dropout"),
    # which token ends or fills a text; generation_config.json has them too
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    # what a call returns, and labels of classifiers
    *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
    *("is_encoder_decoder", "chunk_size_feed_forward", "finetuning_task", "task_specific_params"),
    # of generation, which transformers 4 kept here
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
    # judged on its own: its default is the class's, or what the weights hold
    "tie_word_embeddings",
}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
_FIRST_LENGTH = ("llama3", "yarn", "longrope")  # kinds of rotary embedding that know the length before scaling
_LLAMA = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    **{"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0},
}
_QWEN2 = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "num_hidden_layers": 32, "hidden_act": "silu", "max_position_embeddings": 32768},
    **{"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    **{"rope_theta": 10000.0},
}
_COHERE = {
    **{"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_attention_heads": 64},
    **{"num_hidden_layers": 40, "hidden_act": "silu", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5},
    **{"logit_scale": 0.0625, "attention_bias": False, "use_qk_norm": False, "rope_theta": 500000.0},
}
_MISTRAL = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "num_hidden_layers": 32, "hidden_act": "silu", "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-6, "sliding_window": 4096, "rope_theta": 10000.0},
}
DEFAULTS: dict[str, dict[str, Any]] = {  # model_type -> the default of a missing key
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
    "cohere": _COHERE,
    "mistral": _MISTRAL,
}


def arithmetic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that decide what the model computes, in one spelling, with rope_parameters
    flattened."""
    default = DEFAULTS.get(str(config.get("model_type")), {})
    settings = {**default, **{key: value for key, value in config.items() if value is not None or key not in default}}
    if "sliding_window" in config:  # null is a value: no window
        settings["sliding_window"] = config["sliding_window"]
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    if settings.get("num_key_value_heads") is None:
        settings["num_key_value_heads"] = heads
    if settings.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads:
        settings["head_dim"] = width // heads
    if "use_sliding_window" in settings:
        _set_windows(settings)
    settings |= _rope_settings(settings)
    return {
        key: value
        for key, value in settings.items()
        if value is not None and (value is not False or key in default) and key not in HARMLESS and key not in _ROPE
    }


def _set_windows(settings: dict[str, Any]) -> None:
    """Replace, in place, Qwen's three keys for sliding windows by layer_types of transformers 5 and sliding_window."""
    first, window = settings.pop("max_window_layers", None), settings.get("sliding_window")
    window = settings["sliding_window"] = window if settings.pop("use_sliding_window") else None
    layers = settings.get("num_hidden_layers")
    if settings.get("layer_types") is None and isinstance(layers, int) and isinstance(first, int):
        near = [bool(window) and layer >= first for layer in range(layers)]
        settings["layer_types"] = ["sliding_attention" if is_near else "full_attention" for is_near in near]


def _rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding, as transformers 5 reads either spelling (modeling_rope_utils.standardize_rope_params)."""
    stated = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    stated = stated if isinstance(stated, Mapping) else {"rope_type": stated}
    rope = {key: value for key, value in stated.items() if key != "type"}
    rope.setdefault("rope_type", stated.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is not None:
            rope.setdefault(key, settings[key])
    if rope["rope_type"] in _FIRST_LENGTH:
        first = settings.get("original_max_position_embeddings") or settings.get("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", first)
    return {f"rope_parameters.{key}": value for key, value in rope.items()}
