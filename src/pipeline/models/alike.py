"""Checks by headers and config.json that the tensors of two models can be combined by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint

HARMLESS = {  # keys that do not change what a model computes
    # the file's origin, and the form of the model in memory
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "unsloth_version",
    "unsloth_fixed",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "use_cache",
    "gradient_checkpointing",
    "tokenizer_class",
    "torchscript",
    # only read by training
    "initializer_range",
    "attention_dropout",
    "router_aux_loss_coef",
    "output_router_logits",
    # tokens that end or pad a text; generation_config.json has them too
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    # outputs of a call, and labels of classifiers
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "chunk_size_feed_forward",
    "finetuning_task",
    "task_specific_params",
    # settings of generation, which transformers 4 stored here
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "num_beams",
    "repetition_penalty",
    # compared separately: its default depends on the class or the weights
    "tie_word_embeddings",
}
POSITIONS = "max_position_embeddings"
# Rotary embeddings that are computed from the number of positions
_BY_POSITIONS = ("dynamic", "longrope", "yarn")
_WINDOW = ("sliding_window", "max_window_layers", "layer_types")


def same_architecture(first: Checkpoint, second: Checkpoint, keys: tuple[str, str]) -> None:
    """Raise PipelineError unless the tensors of two models can be combined by name.

    Keys in both config.json that change what a model computes must be equal. Names and shapes of
    tensors must be equal. Dtypes may differ.

    Args:
        first: a model.
        second: another model.
        keys: the configuration keys of both, for the message.
    """
    configs_differ = _flat(first.config) != _flat(second.config)
    one, other = _facts(first, configs_differ), _facts(second, configs_differ)
    for fact, a in one.items():
        b = other.get(fact, a)
        if a != b:
            raise PipelineError(
                f"{keys[1]}: {second.folder} has {fact} {b!r}, but {keys[0]}: {first.folder}"
                f" has {fact} {a!r}. Give models of one architecture."
            )
    for name in sorted(first.infos.keys() ^ second.infos.keys()):
        in_first, in_second = ("a", "no") if name in first.infos else ("no", "a")
        raise PipelineError(
            f"{keys[1]}: {second.folder} has {in_second} {name}, but {keys[0]}: {first.folder}"
            f" has {in_first} {name}. Give models of one architecture."
        )


def _facts(model: Checkpoint, with_settings: bool) -> dict[str, Any]:
    """Return the values that two models must share, by their names.

    Without settings, transformers need not be imported.
    """
    facts: dict[str, Any] = {}
    if with_settings:
        settings = arithmetic_settings(model.config)
        first = [key for key in ("num_hidden_layers", "model_type") if key in settings]
        facts = {key: settings[key] for key in [*first, *sorted(settings)]}
    facts["tie_word_embeddings"] = model.tied_head
    for name, info in sorted(model.infos.items()):
        facts[f"{name} of shape"] = list(info.shape)
    return facts


def arithmetic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that change what the model computes, flat.

    They are read as transformers' class of the type reads them. So an absent key has the class's
    default, and both spellings of the rotary embedding are one: rope_theta and rope_scaling of
    transformers 4, and rope_parameters of 5. Unused windows are left out, and so is the number of
    positions, unless a rotary embedding is computed from it. Types that transformers does not have,
    and values that its class refuses, are compared as written.
    """
    settings = _flat(_as_transformers_reads(config))
    if settings.pop("use_sliding_window", None) is False:
        for key in _WINDOW:
            settings.pop(key, None)
    rotary = [value for key, value in settings.items() if key.endswith("rope_type")]
    if not any(value in _BY_POSITIONS for value in rotary):
        settings.pop(POSITIONS, None)  # learned positions show in the shape of their matrix
    return settings


def _as_transformers_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    written = {}
    for key, value in copy.deepcopy(dict(config)).items():
        if key not in ("auto_map", "dtype"):
            written[key] = value
    try:
        return dict(CONFIG_MAPPING[config["model_type"]].from_dict(written).to_dict())
    except Exception:  # a class can raise anything for unexpected values
        return dict(config)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value} without harmless keys; the decoder's keys have no prefix."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if key in HARMLESS or (value is None and key != "sliding_window"):
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, prefix if key == "text_config" else f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
