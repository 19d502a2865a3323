"""What a parameter is, read from its name: which layer it sits in and what kind of parameter it is.

Partitions, LoRA targets, alternating training, layer swap and reset all use this one
classification. Knows the names that transformers gives to dense decoders, those inside a model that
also sees or hears included. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.models.names import HEAD, decoder_name, is_of_decoder, plain_name

OUTSIDE = ("embedding", "final_norm", "head")  # the kinds that belong to no transformer layer
# what lies beside the decoder, such as the encoder of images: neither trained nor merged
TOWER = "tower"
NORMS = ("attention_norm", "mlp_norm", "shared_norm")
ATTENTION = (
    "attention",
    "linear_attention",
    "attention_norm",
)  # the half of a layer that mixes tokens, and its norms
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
        "embedding_norm",  # LFM2's, which stands at the end
    ),
    "head": ("lm_head", "embed_out", "project_out", "altup_unembed_projections"),
}
# kind -> the first modules inside a layer; those without a module of this name have a norm of their
# own
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
    # before and behind each half; post_attention_layernorm: see `anatomy`
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
_AFTER_ATTENTION, _OF_FEEDFORWARD = (
    "post_attention_layernorm",
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_EXPERTS = re.compile(
    r"\.(experts|shared_experts?|block_sparse_moe)\.|\.(mlp\.gate|router)\.(?!.*norm)"
)


@dataclass(frozen=True)
class Site:
    """Where a parameter sits: its layer (None outside the layers) and its kind.

    Kinds: attention (norms of queries and keys included), linear_attention (recurrent or
        convolutional mixing of
    tokens: Qwen 3.5, LFM2, Mamba), mlp, per_layer_input (Gemma 3n and 4), attention_norm and
    mlp_norm (the norms before and behind each half: in Llama input_layernorm and
    post_attention_layernorm), shared_norm (a single input_layernorm that feeds both, as in Cohere
    and Phi 2), embedding, final_norm, head, tower.
    """

    layer: int | None
    kind: str


def towers(names: Iterable[str]) -> list[str]:
    """Return the parameters beside the decoder of a model that also sees or hears; none for a text
    model.
    """
    plain = {name: plain_name(name) for name in names}
    if not any(map(is_of_decoder, plain.values())):
        return []
    found = []
    for name, text in plain.items():
        if not is_of_decoder(text) and decoder_name(text) != HEAD:
            found.append(name)
    return found


def anatomy(names: Iterable[str]) -> dict[str, Site]:
    """Classify all parameter names of one model, PEFT-wrapped or not.

    Give the whole model at once: two names mean different things in different families, which shows
    only in the rest of the layer. input_layernorm is shared where no norm belongs to the MLP
    (Cohere, Phi 2). post_attention_layernorm is the norm before the MLP (Llama), unless the layer
    has a separate one for it (Gemma 2 and 3, OLMo 2 and 3): then it norms what attention gives.
    Raises PipelineError for an unknown name, and for a mixture of experts.
    """
    names = list(names)
    beside = set(towers(names))
    sites = {name: Site(None, TOWER) if name in beside else _classify(name) for name in names}
    owned = set()
    for name, site in sites.items():
        if any(norm in name for norm in _OF_FEEDFORWARD):
            owned.add(site.layer)
    for name, site in sites.items():
        if site.layer in owned and _AFTER_ATTENTION in name:
            sites[name] = Site(site.layer, "attention_norm")
    split = set()
    for site in sites.values():
        if site.kind == "mlp_norm":
            split.add(site.layer)
    return {
        name: (
            Site(site.layer, "shared_norm")
            if site.kind == "attention_norm" and site.layer not in split
            else site
        )
        for name, site in sites.items()
    }


def _classify(name: str) -> Site:
    plain = re.sub(r"\.(weight|bias)$", "", decoder_name(plain_name(name)))
    if _EXPERTS.search(name):
        raise PipelineError(
            f"parameter {name!r} belongs to a mixture of experts: weights depend on the token, so"
            " that its layers cannot be trained or swapped by half; give a dense model"
        )
    match = _LAYER.fullmatch(plain)
    if match:
        layer, rest = (int(match[1]), match[2])
    else:
        layer, rest = (None, re.sub(r"^(model\.decoder|\w+)\.(?=\w)", "", plain))
    first, kinds = rest.partition(".")[0], _OUTSIDE if match is None else _KINDS
    kind = next((kind for kind, names in kinds.items() if first in names), None)
    if kind is None:
        raise PipelineError(
            f"parameter {name!r} is not one of a dense decoder whose names are known: give a model"
            " of Llama's shape, or add the name to models/anatomy.py"
        )
    return Site(layer, kind)


def num_layers(sites: Mapping[str, Site]) -> int:
    """Return the number of transformer layers.

    Raises: PipelineError: an index is skipped, or there is none.
    """
    layers = set()
    for site in sites.values():
        if site.layer is not None:
            layers.add(site.layer)
    if not layers:
        raise PipelineError(
            "the model has no parameter of the form model.layers.<i>.*: it has no layers"
        )
    missing = sorted(set(range(max(layers) + 1)) - layers)
    if missing:
        raise PipelineError(
            f"the model has layer {max(layers)} but no layer {missing[0]}: the checkpoint is"
            " incomplete"
        )
    return len(layers)
