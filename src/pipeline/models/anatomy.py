"""What a parameter is, read from its name: which layer it sits in and what kind of parameter it is.

Partitions, LoRA targets, alternating training, layer swap and reset all use this one classification.
Knows the names that transformers gives to dense decoders: Llama, Mistral, Qwen 2 and 3, Falcon3, Cohere (Aya), Gemma 1
to 3, OLMo 1 to 3, Phi 1 to 4, Apertus and those that share theirs. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError

OUTSIDE = ("embedding", "final_norm", "head")  # the kinds that belong to no transformer layer
NORMS = ("attention_norm", "mlp_norm", "shared_norm")

_OUTSIDE_NAMES = {
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "model.final_layernorm": "final_norm",  # Phi
    "lm_head": "head",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER_KINDS = {
    **{f"self_attn.{part}_proj": "attention" for part in ("q", "k", "v", "o", "qkv")},
    **{f"self_attn.{part}": "attention" for part in ("dense", "q_norm", "k_norm", "q_layernorm", "k_layernorm")},
    **{f"self_attn.{part}_layernorm": "attention" for part in ("query", "key")},
    **{f"mlp.{part}_proj": "mlp" for part in ("gate", "up", "down", "gate_up", "c")},
    **{f"mlp.{part}": "mlp" for part in ("fc1", "fc2", "c_fc")},
    **{f"mlp.act_fn.{part}": "mlp" for part in ("alpha_p", "alpha_n", "beta", "eps")},  # xIELU, two of them constants
    # before and behind each half; post_attention_layernorm: see `anatomy`
    **dict.fromkeys(("input_layernorm", "attention_layernorm", "post_self_attn_layernorm"), "attention_norm"),
    **dict.fromkeys(("feedforward_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"), "mlp_norm"),
    **dict.fromkeys(("post_mlp_layernorm", "post_attention_layernorm"), "mlp_norm"),
}
_AFTER_ATTENTION, _OF_FEEDFORWARD = (
    "post_attention_layernorm",
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_EXPERTS = re.compile(r"\.(experts|shared_experts?|block_sparse_moe|router)\.|\.mlp\.gate\.")
_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.lora_[AB](?:\.(?!weight$|bias$)\w+)?(?=\.|$)")


@dataclass(frozen=True)
class Site:
    """Where a parameter sits: its layer (None outside the layers) and its kind.

    Kinds: attention (norms of queries and keys included), mlp, attention_norm and mlp_norm (the norms before and behind
    each half: in Llama input_layernorm and post_attention_layernorm), shared_norm (a single input_layernorm that feeds
    both, as in Cohere and Phi 2), embedding, final_norm, head.
    """

    layer: int | None
    kind: str


def plain_name(name: str) -> str:
    """The name of the base model's parameter that a PEFT-wrapped name belongs to."""
    return _PEFT.sub("", name)


def anatomy(names: Iterable[str]) -> dict[str, Site]:
    """Classify all parameter names of one model, PEFT-wrapped or not.

    Give the whole model at once: two names mean different things in different families, which shows only in the rest of
    the layer. input_layernorm is shared where no norm belongs to the MLP (Cohere, Phi 2). post_attention_layernorm is
    the norm before the MLP (Llama), unless the layer has a separate one for it (Gemma 2 and 3, OLMo 2 and 3): then it
    norms what attention gives. Raises PipelineError for an unknown name, and for a mixture of experts.
    """
    sites = {name: _classify(name) for name in names}
    owned = {site.layer for name, site in sites.items() if any(norm in name for norm in _OF_FEEDFORWARD)}
    for name, site in sites.items():
        if site.layer in owned and _AFTER_ATTENTION in name:
            sites[name] = Site(site.layer, "attention_norm")
    split = {site.layer for site in sites.values() if site.kind == "mlp_norm"}
    return {
        name: Site(site.layer, "shared_norm") if site.kind == "attention_norm" and site.layer not in split else site
        for name, site in sites.items()
    }


def _classify(name: str) -> Site:
    plain = re.sub(r"\.(weight|bias)$", "", plain_name(name))
    if plain in _OUTSIDE_NAMES:
        return Site(None, _OUTSIDE_NAMES[plain])
    match = _LAYER.fullmatch(plain)
    if match and match[2] in _LAYER_KINDS:
        return Site(int(match[1]), _LAYER_KINDS[match[2]])
    if _EXPERTS.search(name):
        raise PipelineError(
            f"parameter {name!r} belongs to a mixture of experts: weights depend on the token, so that its layers "
            "cannot be trained or swapped by half; give a dense model"
        )
    raise PipelineError(
        f"parameter {name!r} is not one of a dense decoder whose names are known: give a text-only model of Llama's "
        "shape, or add the name to models/anatomy.py"
    )


def num_layers(sites: Mapping[str, Site]) -> int:
    """The number of transformer layers. Raises PipelineError where an index is skipped or there is none."""
    layers = {site.layer for site in sites.values() if site.layer is not None}
    if not layers:
        raise PipelineError("the model has no parameter of the form model.layers.<i>.*: it has no layers")
    missing = sorted(set(range(max(layers) + 1)) - layers)
    if missing:
        raise PipelineError(
            f"the model has layer {max(layers)} but no layer {missing[0]}: the checkpoint is incomplete"
        )
    return len(layers)
