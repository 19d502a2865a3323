"""Whether the tensors of two models can be combined by name, decided from their headers and
config.json alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint

HARMLESS = {  # two models that differ here alone compute the same
    # where the file is from, and how a model is held in memory
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
    # read by training alone
    "initializer_range",
    "attention_dropout",
    "router_aux_loss_coef",
    "output_router_logits",
    # which token ends or fills a text; generation_config.json has them too
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    # what a call returns, and labels of classifiers
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
    # of generation, which transformers 4 kept here
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "num_beams",
    "repetition_penalty",
    # judged on its own: its default is the class's, or what the weights hold
    "tie_word_embeddings",
}
POSITIONS = "max_position_embeddings"
_BY_POSITIONS = (
    "dynamic",
    "longrope",
    "yarn",
)  # rotary embeddings that are computed from the number of positions
_WINDOW = ("sliding_window", "max_window_layers", "layer_types")


def same_architecture(first: Checkpoint, second: Checkpoint, keys: tuple[str, str]) -> None:
    """Raise PipelineError, naming what differs first, unless the tensors of both can be combined by
    name.

    That is: the same values of all keys that both config.json have and that decide arithmetic, and
    tensors of the same names and shapes, whatever their dtype. `keys` are the knobs to name in the
    sentence.
    """
    for a, b in find_differences(first, second):
        raise PipelineError(
            f"{keys[1]}: {second.folder} has {b}, {keys[0]}: {first.folder} has {a}; they must be"
            " alike"
        )


def find_differences(first: Checkpoint, second: Checkpoint) -> Iterator[tuple[str, str]]:
    """For each difference, a description of the first model's value and of the second's."""
    read = _flat(first.config) != _flat(second.config)  # else transformers need not be imported
    one, other = _facts(first, read), _facts(second, read)
    for text, a in one.items():
        b = other.get(text, a)
        if a != b:  # as JSON where both print the same: the string "1e-06" and the number 1e-06
            a, b = (json.dumps(value) if str(a) == str(b) else value for value in (a, b))
            yield text.replace("{}", str(a)), text.replace("{}", str(b))
    for name in sorted(first.infos.keys() ^ second.infos.keys()):
        absent = f"no {name}", f"a {name}"
        yield absent if name in second.infos else absent[::-1]  # type: ignore[misc]


def _facts(model: Checkpoint, read: bool) -> dict[str, Any]:
    """A text with a place for the value -> the value, of all that two models must share where both
    have it.
    """
    settings = {}
    if read:
        settings = arithmetic_settings(model.config)
    order = sorted(settings, key=lambda key: (key != "num_hidden_layers", key != "model_type", key))
    facts = {
        f"{key} {{}}" if key != "num_hidden_layers" else "{} layers": settings[key] for key in order
    }
    facts["tie_word_embeddings {}"] = model.tied_head
    return facts | {
        f"{name} of shape {{}}": list(info.shape) for name, info in sorted(model.infos.items())
    }


def arithmetic_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that decide what the model computes, flat, as transformers' class
    of the type reads it.

    So a key that is absent has the class's default, and both spellings of the rotary embedding
    (rope_theta and rope_scaling of transformers 4, rope_parameters of 5) are one. Windows that are
    not used are left out, and so is the number of positions, unless a rotary embedding is computed
    from it. A type that transformers does not have, or values that its class refuses, are compared
    as written.
    """
    settings = _flat(_as_transformers_reads(config))
    if settings.pop("use_sliding_window", None) is False:
        settings = {key: value for key, value in settings.items() if key not in _WINDOW}
    if not any(
        value in _BY_POSITIONS for key, value in settings.items() if key.endswith("rope_type")
    ):
        settings.pop(POSITIONS, None)  # learned positions differ in the shape of their matrix
    return settings


def _as_transformers_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    written = {}
    for key, value in copy.deepcopy(dict(config)).items():
        if key not in ("auto_map", "dtype"):
            written[key] = value
    try:
        return dict(CONFIG_MAPPING[config["model_type"]].from_dict(written).to_dict())
    except Exception:  # classes raise what they like of values that they do not expect
        return dict(config)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, without those that decide no arithmetic; the decoder's own keys have no
    prefix.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if key in HARMLESS or (value is None and key != "sliding_window"):
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, prefix if key == "text_config" else f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
