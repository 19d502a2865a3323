"""What a parameter is, read from its name: which layer it sits in and what kind of parameter it is.

Partitions, LoRA targets, alternating training, layer swap and reset all stand on this one classification.
Knows the names that transformers gives to Llama, Qwen2/3, Falcon3 and Cohere (Aya); imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError

OUTSIDE = ("embedding", "final_norm", "head")  # the kinds that belong to no transformer layer
NORMS = ("attention_norm", "mlp_norm", "shared_norm")

_OUTSIDE_NAMES = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final_norm",
    "model.norm.bias": "final_norm",
    "lm_head.weight": "head",
    "lm_head.bias": "head",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(?:weight|bias)")
_LAYER_KINDS = {
    **{f"self_attn.{part}_proj": "attention" for part in "qkvo"},
    **{f"self_attn.{part}_norm": "attention" for part in "qk"},
    **{f"mlp.{part}_proj": "mlp" for part in ("gate", "up", "down")},
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.lora_[AB](?:\.(?!weight$|bias$)\w+)?(?=\.|$)")


@dataclass(frozen=True)
class Site:
    """Where a parameter sits: its layer (None outside the layers) and its kind.

    Kinds: attention, mlp, attention_norm (input_layernorm), mlp_norm (post_attention_layernorm), shared_norm
    (a single input_layernorm that feeds both, as in Cohere), embedding, final_norm, head.
    """

    layer: int | None
    kind: str


def plain_name(name: str) -> str:
    """The name of the base model's parameter that a PEFT-wrapped name belongs to."""
    return _PEFT.sub("", name)


def anatomy(names: Iterable[str]) -> dict[str, Site]:
    """Classify all parameter names of one model, PEFT-wrapped or not.

    Give the whole model at once: whether input_layernorm is Cohere's shared norm shows only in its layer
    having no post_attention_layernorm. Raises PipelineError for a name that it does not know.
    """
    sites = {name: _site(name) for name in names}
    split = {site.layer for site in sites.values() if site.kind == "mlp_norm"}
    return {
        name: Site(site.layer, "shared_norm") if site.kind == "attention_norm" and site.layer not in split else site
        for name, site in sites.items()
    }


def _site(name: str) -> Site:
    plain = plain_name(name)
    if plain in _OUTSIDE_NAMES:
        return Site(None, _OUTSIDE_NAMES[plain])
    match = _LAYER.fullmatch(plain)
    if match and match[2] in _LAYER_KINDS:
        return Site(int(match[1]), _LAYER_KINDS[match[2]])
    raise PipelineError(f"parameter {name!r} is not one of Llama, Qwen2, Falcon3 or Cohere: teach models/anatomy.py")


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


def parameter_counts(sites: Mapping[str, Site], sizes: Mapping[str, int]) -> dict[Site, int]:
    """Number of parameters at each site; `sizes` holds the number of elements of each name in `sites`."""
    counts: dict[Site, int] = {}
    for name, site in sites.items():
        counts[site] = counts.get(site, 0) + sizes[name]
    return counts
