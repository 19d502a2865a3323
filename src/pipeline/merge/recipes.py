"""The linear merges: for each parameter, how much of each source goes in. Arithmetic on names, no tensors.

A weight of 1 for a single source means that the parameter is that source's, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipeline.knobs import PipelineError
from pipeline.models.anatomy import NORMS, Site, num_layers
from pipeline.models.partition import is_outer, scaled_count

if TYPE_CHECKING:
    from pipeline.config import LayerSwap, Soup

Weights = dict[str, dict[str, float]]  # parameter name -> source -> weight

CHOICES = {
    "math": {"math": 1.0},
    "language": {"language": 1.0},
    "average": {"math": 0.5, "language": 0.5},
}


def layer_swap_weights(config: LayerSwap, sites: Mapping[str, Site]) -> Weights:
    """Layer swapping, Algorithm 1 of `layer_swapping`: outer layers from language, the middle from math.

    Line 5 is read with `and`: as printed, with `or`, no layer would ever be in a transition zone. The zones
    lie inside, next to the swapped layers. Parameters outside the layers follow their own keys (section 4.2,
    item 6); layer norms go with their layer, or are averaged as line 2 has it. A tied head is the embedding.
    Sources are `math` and `language`. Raises PipelineError where zones overlap or exceed the model.
    """
    layers = num_layers(sites)
    b, u, t_b, t_u = swapped_counts(config, layers)
    zone = _choice(config, "zones")
    outside = {kind: _choice(config, key) for kind, key in _OUTSIDE_KEYS.items()}
    if config.layer_norms not in ("with_layer", "average"):
        raise PipelineError(f"merge.layer_norms must be with_layer or average, got {config.layer_norms!r}")

    def weights(site: Site) -> dict[str, float]:
        if site.layer is None:
            return outside[site.kind]
        if site.kind in NORMS and config.layer_norms == "average":
            return CHOICES["average"]
        if is_outer(site.layer, b, u, layers):
            return CHOICES["language"]
        if is_outer(site.layer, b + t_b, u + t_u, layers):
            return zone
        return CHOICES["math"]

    return {name: weights(site) for name, site in sites.items()}


_OUTSIDE_KEYS = {"embedding": "embeddings", "final_norm": "final_norm", "head": "head"}


def _choice(config: LayerSwap, key: str) -> dict[str, float]:
    value = getattr(config, key)
    if value not in CHOICES:
        raise PipelineError(f"merge.{key} must be average, math or language, got {value!r}")
    return CHOICES[value]


def swapped_counts(config: LayerSwap, layers: int) -> tuple[int, int, int, int]:
    """(b, u, t_b, t_u) for a model of this depth. Raises PipelineError where together they exceed it."""
    keys = ("bottom_layers", "top_layers", "bottom_transition", "top_transition")
    counts = [getattr(config, key) for key in keys]
    for key, count in zip(keys, counts, strict=True):
        if count < 0:
            raise PipelineError(f"merge.{key} must be 0 or more, got {count}")
    b, u, t_b, t_u = [scaled_count(count, layers) for count in counts] if config.scale_to_depth else counts
    if b + t_b + t_u + u > layers:
        raise PipelineError(
            f"merge.bottom_layers={b}, merge.bottom_transition={t_b}, merge.top_transition={t_u} and "
            f"merge.top_layers={u} are {b + t_b + t_u + u} layers, but the model has {layers}: lower them"
        )
    return b, u, t_b, t_u


def soup_weights(config: Soup, names: Iterable[str]) -> Weights:
    """A model soup: the same weighted average for every parameter, uniform unless weights are given.

    Sources are "0", "1", ... in the order of merge.experts. Raises PipelineError unless there is one weight
    for each expert and they sum to 1 (within 1e-6).
    """
    count = len(config.experts)
    if not count:
        raise PipelineError("merge.experts is empty: give at least one run")
    weights = [1 / count] * count if config.weights is None else [float(weight) for weight in config.weights]
    if len(weights) != count:
        raise PipelineError(
            f"merge.weights has {len(weights)} numbers for {count} merge.experts: give one for each expert"
        )
    if not abs(math.fsum(weights) - 1) <= 1e-6:  # "not <=" also catches NaN
        raise PipelineError(f"merge.weights must sum to 1, got {weights}, which sum to {math.fsum(weights):g}")
    row = {str(source): weight for source, weight in enumerate(weights) if weight}
    return {name: row for name in names}
