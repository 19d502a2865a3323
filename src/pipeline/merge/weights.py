"""The linear merges: for each parameter, how much of each source goes in. Arithmetic on names, no tensors.

A weight of 1 for a single source means that the parameter is that source's, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.models.anatomy import NORMS, OUTSIDE, Site, num_layers
from pipeline.models.partition import is_outer, resolved, scaled_count, side

if TYPE_CHECKING:
    from pipeline.config.merging import LayerSwap, Reset, Soup
    from pipeline.config.training import Partition

Weights = dict[str, dict[str, float]]  # parameter name -> source -> weight
SIDES = ("math", "language")
_OUTSIDE_KEYS = {"embedding": "embeddings", "final_norm": "final_norm", "head": "head"}


def roles(config: object) -> list[str]:
    """The names of a merge's sources, in order: math and language (math.0, math.1, ... of a list), "0", "1", ..."""
    if hasattr(config, "math"):
        found = []
        for one in SIDES:
            value = getattr(config, one)
            count = len(value) if isinstance(value, list) else 1
            found += [one] if count == 1 else [f"{one}.{index}" for index in range(count)]
        return found
    if hasattr(config, "expert"):
        return ["expert"]
    return [str(index) for index in range(len(config.experts))]  # type: ignore[attr-defined]


def needs_magnitudes(config: object) -> bool:
    """Whether a choice of this merge weighs sides or experts by how far they moved from the base."""
    keys = ("weights", "zones", "layer_norms", *_OUTSIDE_KEYS.values())
    return "magnitude" in [value for key in keys if isinstance(value := getattr(config, key, None), str)]


def layer_swap_weights(
    config: LayerSwap,
    sites: Mapping[str, Site],
    partition: Partition | None = None,
    magnitudes: Mapping[str, float] | None = None,
) -> Weights:
    """Layer swapping, Algorithm 1 of `layer_swapping`: outer layers from language, the middle from math.

    Line 5 is read with `and`: as printed, with `or`, no layer would ever be in a transition zone. The zones
    lie inside, next to the swapped layers. Parameters outside the layers follow their own keys (section 4.2,
    item 6); layer norms go with their layer, or follow `merge.layer_norms` (line 2 averages them). A tied head is the
    embedding. With a partition its sides stand in place of the counts; what it leaves to neither is math's.

    Sources are those of `roles`: a side that is a list is the uniform soup of its experts. `magnitudes`: the mean
    absolute change of each side, for the choices that are weighted by it. Raises PipelineError where zones overlap or
    exceed the model.
    """
    layers = num_layers(sites)
    sources = {one: [role for role in roles(config) if role.partition(".")[0] == one] for one in SIDES}
    shares = {"math": {"math": 1.0}, "language": {"language": 1.0}, "average": dict.fromkeys(SIDES, 0.5)}
    if magnitudes is not None:
        shares["magnitude"] = inverse(magnitudes)

    def chosen(key: str) -> dict[str, float]:
        value = getattr(config, key)
        if value not in shares:
            raise PipelineError(f"merge.{key} must be average, magnitude, math or language, got {value!r}")
        return spread(shares[value])

    def spread(share: Mapping[str, float]) -> dict[str, float]:
        return {role: part / len(sources[one]) for one, part in share.items() for role in sources[one]}

    math_only, language_only = spread(shares["math"]), spread(shares["language"])
    outside = {kind: chosen(key) for kind, key in _OUTSIDE_KEYS.items()}
    norms = None if config.layer_norms == "with_layer" else chosen("layer_norms")
    zone = chosen("zones")
    b, u, t_b, t_u = (0, 0, 0, 0) if partition else swapped_counts(config, layers)
    if partition is not None:
        refuse_counts(config, partition)
        resolved(partition, layers)

    def weights(site: Site) -> dict[str, float]:
        if site.layer is None:
            return outside[site.kind]
        if site.kind in NORMS and norms is not None:
            return norms
        if partition is not None:
            return language_only if side(partition, site, layers) == "language" else math_only
        if is_outer(site.layer, b, u, layers):
            return language_only
        return zone if is_outer(site.layer, b + t_b, u + t_u, layers) else math_only

    return {name: weights(site) for name, site in sites.items()}


def inverse(magnitudes: Mapping[str, float]) -> dict[str, float]:
    """Weights in proportion to 1 / mean absolute change, summing to 1 (`layer_swapping`, section 4.3).

    Raises PipelineError for an expert that did not move.
    """
    for role, size in magnitudes.items():
        if not size > 0:
            raise PipelineError(f"{role} does not differ from its base: it has no weight by magnitude; leave it out")
    total = math.fsum(1 / size for size in magnitudes.values())
    return {role: 1 / size / total for role, size in magnitudes.items()}


def refuse_counts(config: LayerSwap, partition: Partition) -> None:
    """Counts beside a partition would be read by nobody."""
    for key in ("bottom_layers", "top_layers", "bottom_transition", "top_transition", "scale_to_depth"):
        value = getattr(config, key)
        if value != type(config).__dataclass_fields__[key].default:
            raise PipelineError(
                f"merge.{key}={value} beside partition={partition.name}: give layer counts or a partition, not both"
            )
    if partition.outside != "frozen":
        raise PipelineError(
            f"partition.outside={partition.outside} is of training: a merge reads merge.embeddings, merge.final_norm "
            "and merge.head"
        )


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


def soup_weights(config: Soup, names: Iterable[str], magnitudes: Mapping[str, float] | None = None) -> Weights:
    """A model soup: the same weighted average for every parameter, uniform unless weights are given.

    Sources are "0", "1", ... in the order of merge.experts. Raises PipelineError unless there is one weight
    for each expert and they sum to 1 (within 1e-6).
    """
    count = len(config.experts)
    if not count:
        raise PipelineError("merge.experts is empty: give at least one run")
    if config.weights == "magnitude" and magnitudes is not None:
        weights = list(inverse(magnitudes).values())
    elif isinstance(config.weights, str):
        raise PipelineError(f"merge.weights must be uniform, magnitude or a list of numbers, got {config.weights!r}")
    else:
        weights = expert_weights(config.weights, count, 1 / count)
    if not abs(math.fsum(weights) - 1) <= 1e-6:  # "not <=" also catches NaN
        raise PipelineError(f"merge.weights must sum to 1, got {weights}, which sum to {math.fsum(weights):g}")
    row = {str(source): weight for source, weight in enumerate(weights) if weight}
    return {name: row for name in names}


def expert_weights(weights: Sequence[float] | None, count: int, default: float = 1.0) -> list[float]:
    """merge.weights as a number for each expert. Raises PipelineError where there is not one for each."""
    if weights is None:
        return [default] * count
    if not isinstance(weights, list) or not all(isinstance(weight, int | float) for weight in weights):
        raise PipelineError(f"merge.weights must be a list of numbers, one for each expert, got {weights!r}")
    if len(weights) != count:
        raise PipelineError(
            f"merge.weights has {len(weights)} numbers for {count} merge.experts: give one for each expert"
        )
    return [float(weight) for weight in weights]


def reset_weights(config: Reset, sites: Mapping[str, Site], partition: Partition | None = None) -> Weights:
    """Which parameters are given back to the base whole (`layer_swapping` 3.3, `unreasonable` table 2).

    Sources are `expert` and `base`. With merge.threshold, parameters of the layers are left out: their rows are judged
    one by one. Resetting a side resets what is outside the layers too, unless merge.outside=keep, so that "frozen
    during" and "reset after" differ in nothing else. Raises PipelineError unless exactly one of side, layers and
    threshold is given, and for layers that the model does not have.
    """
    layers = num_layers(sites)
    asked = [key for key in ("side", "layers", "threshold") if getattr(config, key) is not None]
    if len(asked) != 1:
        told = " and ".join(f"merge.{key}" for key in asked) or "none"
        raise PipelineError(f"merge=reset needs one of merge.side, merge.layers and merge.threshold, got {told}")
    if config.side is not None and partition is None:
        raise PipelineError(f"merge.side={config.side} needs a partition: give partition=A, B, C or Z")
    if config.side is None and partition is not None:
        raise PipelineError(f"partition={partition.name} is read with merge.side alone: leave one of them out")
    if partition is not None:
        resolved(partition, layers)
    for layer in config.layers or []:
        if layer >= layers:
            raise PipelineError(f"merge.layers={config.layers}: the model has layers 0 to {layers - 1}")
    outside = config.outside or ("reset" if config.side is not None else "keep")
    expert, base = {"expert": 1.0}, {"base": 1.0}

    def weights(site: Site) -> dict[str, float]:
        if site.layer is None or site.kind in OUTSIDE:
            return base if outside == "reset" else expert
        if partition is not None:
            return base if side(partition, site, layers) == config.side else expert
        return base if site.layer in (config.layers or []) else expert

    by_row = config.threshold is not None
    return {name: weights(site) for name, site in sites.items() if not (by_row and site.layer is not None)}
