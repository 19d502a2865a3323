"""The layer and the kind of a parameter, read from its name.

Partitions, LoRA targets, alternating training, layer swap and reset all use this classification. It
knows the names that transformers gives to dense decoders, also inside a model that also sees or
hears. This module imports no heavy library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.models.names import HEAD, decoder_name, is_of_decoder, plain_name

OUTSIDE = ("embedding", "final_norm", "head")  # kinds outside the transformer layers
TOWER = "tower"  # encoders of images or sound, which are neither trained nor merged
NORMS = ("attention_norm", "mlp_norm", "shared_norm")
# The half of a layer that mixes tokens, and its norms
ATTENTION = ("attention", "linear_attention", "attention_norm")
MLP = ("mlp", "mlp_norm")

_LAYER = re.compile(
    r"(?:model|model\.decoder|transformer|gpt_neox)\.(?:layers|h|blocks)\.(\d+)\.(.+)"
)
_OUTSIDE = {  # kind -> the names behind model., transformer., ...
    "embedding": (
        "embed_tokens",
        "wte",
        "wpe",
        "embed_in",
        "embed_positions",
        "project_in",
        "word_embeddings",
        "word_embeddings_layernorm",
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
        "altup_projections",
    ),
    "final_norm": (
        "norm",
        "final_layernorm",
        "final_layer_norm",
        "layer_norm",
        "ln_f",
        "norm_f",
        "embedding_norm",  # LFM2's final norm
    ),
    "head": ("lm_head", "embed_out", "project_out", "altup_unembed_projections"),
}
# kind -> the first modules inside a layer
_KINDS = {
    "attention": ("self_attn", "self_attention", "attention", "attn"),
    "linear_attention": ("linear_attn", "mamba", "conv"),
    "mlp": ("mlp", "shared_mlp", "feed_forward", "ffn", "fc1", "fc2"),
    "per_layer_input": (
        "per_layer_input_gate",
        "per_layer_projection",
        "post_per_layer_input_norm",
        "altup",
        "laurel",
        "layer_scalar",
    ),
    # before and after each half; for post_attention_layernorm see `anatomy`
    "attention_norm": (
        "input_layernorm",
        "attention_layernorm",
        "attention_layer_norm",
        "ln_1",
        "norm_1",
        "self_attn_layer_norm",
        "operator_norm",
        "ln_attn",
        "post_self_attn_layernorm",
    ),
    "mlp_norm": (
        "feedforward_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "post_mlp_layernorm",
        "post_attention_layernorm",
        "pre_ff_layernorm",
        "ln_2",
        "norm_2",
        "final_layer_norm",
        "ffn_norm",
        "ln_mlp",
        "feedforward_layer_norm",
    ),
}
_AFTER_ATTENTION = "post_attention_layernorm"
_OF_FEEDFORWARD = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_EXPERTS = re.compile(
    r"\.(experts|shared_experts?|block_sparse_moe)\.|\.(mlp\.gate|router)\.(?!.*norm)"
)


@dataclass(frozen=True)
class Site:
    """The place of a parameter: its layer (None outside the layers) and its kind.

    Kinds in layers:

    - attention, with the norms of queries and keys
    - linear_attention: recurrent or convolutional mixing of tokens (Qwen 3.5, LFM2, Mamba)
    - mlp
    - per_layer_input (Gemma 3n and 4)
    - attention_norm and mlp_norm: the norms before and after each half, such as Llama's
      input_layernorm and post_attention_layernorm
    - shared_norm: a single input_layernorm for both halves (Cohere, Phi 2)

    Kinds outside the layers are embedding, final_norm, head and tower.
    """

    layer: int | None
    kind: str


def towers(names: Iterable[str]) -> list[str]:
    """Return the parameters outside the decoder of a model that also sees or hears."""
    plain = {name: plain_name(name) for name in names}
    if not any(map(is_of_decoder, plain.values())):
        return []
    found = []
    for name, text in plain.items():
        if not is_of_decoder(text) and decoder_name(text) != HEAD:
            found.append(name)
    return found


def anatomy(names: Iterable[str]) -> dict[str, Site]:
    """Classify the parameter names of a whole model, with or without PEFT's wrappers.

    Two names mean different things in different families, which only the rest of the layer shows.
    input_layernorm is shared if the MLP has no norm (Cohere, Phi 2). post_attention_layernorm is
    the norm before the MLP (Llama), unless the layer has separate norms for the MLP (Gemma 2 and 3,
    OLMo 2 and 3). Then it norms the output of attention.

    Raises:
        PipelineError: a name is unknown, or the model is a mixture of experts.
    """
    names = list(names)
    sites = dict.fromkeys(towers(names), Site(None, TOWER))
    sites = {name: sites.get(name) or _classify(name) for name in names}
    with_mlp_norms = {
        site.layer for name, site in sites.items() if any(norm in name for norm in _OF_FEEDFORWARD)
    }
    for name, site in sites.items():
        if site.layer in with_mlp_norms and _AFTER_ATTENTION in name:
            sites[name] = Site(site.layer, "attention_norm")
    split = {site.layer for site in sites.values() if site.kind == "mlp_norm"}
    for name, site in sites.items():
        if site.kind == "attention_norm" and site.layer not in split:
            sites[name] = Site(site.layer, "shared_norm")
    return sites


def _classify(name: str) -> Site:
    plain = re.sub(r"\.(weight|bias)$", "", decoder_name(plain_name(name)))
    if _EXPERTS.search(name):
        raise PipelineError(
            f"Parameter {name!r} belongs to a mixture of experts, whose layers cannot be split into"
            " halves. Give a dense model."
        )
    layer, kinds = None, _OUTSIDE
    rest = re.sub(r"^(model\.decoder|\w+)\.(?=\w)", "", plain)
    match = _LAYER.fullmatch(plain)
    if match:
        layer, kinds = int(match[1]), _KINDS
        rest = match[2]
    first = rest.partition(".")[0]
    for kind, modules in kinds.items():
        if first in modules:
            return Site(layer, kind)
    raise PipelineError(
        f"Parameter {name!r} is not known as a dense decoder's. Give a model of Llama's shape, or"
        " add the name to models/anatomy.py."
    )


def num_layers(sites: Mapping[str, Site]) -> int:
    """Return the number of transformer layers.

    Raises:
        PipelineError: there is no layer, or an index is skipped.
    """
    layers = {site.layer for site in sites.values() if site.layer is not None}
    if not layers:
        raise PipelineError(
            "The model has no layers, that is no parameter of the form model.layers.<i>.*. Give a"
            " decoder."
        )
    missing = sorted(set(range(max(layers) + 1)) - layers)
    if missing:
        raise PipelineError(
            f"The model has layer {max(layers)} but no layer {missing[0]}. Copy the checkpoint"
            " again."
        )
    return len(layers)
