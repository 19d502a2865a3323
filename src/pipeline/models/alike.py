"""Whether the tensors of two models can be combined by name, decided from their headers and config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint, text_settings

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


def same_architecture(
    first: Checkpoint, second: Checkpoint, keys: tuple[str, str] = ("the first", "the second"), dtypes: bool = True
) -> None:
    """Raise PipelineError, naming what differs first, unless the tensors of both can be combined by name.

    That is: the same values of all keys that both config.json have and that decide arithmetic, and tensors of the same
    names and shapes. `keys` are the knobs to name in the sentence. `dtypes=False` accepts tensors of other precision (a
    base in bfloat16 under experts in float32).
    """
    for a, b in find_differences(first, second, dtypes):
        raise PipelineError(
            f"{keys[1]}: {second.folder} has {b}, {keys[0]}: {first.folder} has {a}; they must be alike"
        )


def find_differences(first: Checkpoint, second: Checkpoint, dtypes: bool) -> Iterator[tuple[str, str]]:
    """For each difference, a description of the first model's value and of the second's."""
    headers = (first, second)
    depths = [text_settings(header.config).get("num_hidden_layers") for header in headers]
    if depths[0] != depths[1]:
        yield f"{depths[0]} layers", f"{depths[1]} layers"
    settings = [arithmetic_settings(header.config) for header in headers]
    common = settings[0].keys() & settings[1].keys()
    for key in sorted(common, key=lambda key: (key != "model_type", key)):
        a, b = (values[key] for values in settings)
        if a != b:  # as JSON where both print the same: the string "1e-06" and the number 1e-06
            a_text, b_text = (json.dumps(value) if str(a) == str(b) else value for value in (a, b))
            yield f"{key} {a_text}", f"{key} {b_text}"
    if first.tied_head != second.tied_head:
        a_text, b_text = ("a tied head" if header.tied_head else "a head of its own" for header in headers)
        yield a_text, b_text
    for name in sorted(first.infos.keys() | second.infos.keys()):
        if name not in first.infos or name not in second.infos:
            a_text, b_text = (f"{'a' if name in header.infos else 'no'} {name}" for header in headers)
            yield a_text, b_text
            continue
        x, y = first.infos[name], second.infos[name]
        if x.shape != y.shape:
            yield f"{name} of shape {list(x.shape)}", f"{name} of shape {list(y.shape)}"
        if dtypes and x.dtype != y.dtype:
            yield f"{name} as {x.dtype}", f"{name} as {y.dtype}"


def arithmetic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that decide what the model computes, flat and in the spelling of transformers 5.

    Sizes of heads have their defaults, windows that are not used are left out, and both spellings of the rotary
    embedding (rope_theta and rope_scaling of transformers 4, rope_parameters of 5) are one.
    """
    flat = {**config, **text_settings(config)}
    settings = {key: value for key, value in flat.items() if value is not None or key == "sliding_window"}
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    if heads is not None:
        settings.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(width, int) and heads:
        settings.setdefault("head_dim", width // heads)
    if settings.pop("use_sliding_window", None) is False:
        for key in ("sliding_window", "max_window_layers", "layer_types"):
            settings.pop(key, None)
    settings |= _rope_settings(settings)
    return {key: value for key, value in settings.items() if key not in HARMLESS and key not in _ROPE}


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
        rope |= {"original_max_position_embeddings": first} | rope if first else {}
    return {f"rope_parameters.{key}": value for key, value in rope.items()}
