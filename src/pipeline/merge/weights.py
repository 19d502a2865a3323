"""Weights of experts: arithmetic on numbers, no tensors.

The methods spread them over parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site

# parameter -> source -> weight; 1 for a single source means that the parameter is that source's,
# byte for byte
Weights = dict[str, dict[str, float]]
MOST_WEIGHT = 1e30  # times a weight of a model, still below the largest float32


def inverse_weights(magnitudes: Mapping[str, float]) -> dict[str, float]:
    """Weights in proportion to 1 / mean absolute change, summing to 1 (`layer_swapping`, section
    4.3).

    Raises PipelineError for an expert that did not move.
    """
    for role, size in magnitudes.items():
        if not size > 0:
            raise PipelineError(
                f"{role} does not differ from its base: it has no weight by magnitude; leave it out"
            )
    total = math.fsum(1 / size for size in magnitudes.values())
    return {role: 1 / size / total for role, size in magnitudes.items()}


def weights_by_owner(
    sites: Mapping[str, Site],
    owner_of: Callable[[Site], str],
    shares: Mapping[str, Mapping[str, float]],
) -> Weights:
    """Return the weights of each parameter: the shares of the owner of its site, without weights of
    zero.
    """
    owned = {
        owner: {role: weight for role, weight in share.items() if weight}
        for owner, share in shares.items()
    }
    return {name: dict(owned[owner_of(site)]) for name, site in sites.items()}


def weights_over_depth(
    weights: Sequence[Any] | None, count: int, default: float, sites: Mapping[str, Site]
) -> dict[str, list[float]]:
    """Return the weight of each expert in each parameter.

    An expert has a number, or a list of numbers that are interpolated from the first to the last
    layer. Parameters outside the layers have the first number, as with a gradient in a file of
    mergekit.

    Raises:
        PipelineError: as `expert_weights`, and for an empty list.
    """
    if not isinstance(weights, list):
        weights = expert_weights(weights, count, default)
    if len(weights) != count:
        expert_weights([0.0] * len(weights), count)  # raises
    lists = [entry if isinstance(entry, list) else [entry] for entry in weights]
    for numbers in lists:
        if not numbers:
            raise PipelineError(
                f"merge.weights={weights} has an empty list. Give numbers from first to last layer."
            )
        expert_weights(numbers, len(numbers))
    last = max((site.layer for site in sites.values() if site.layer is not None), default=0)
    at_layer: dict[int | None, list[float]] = {None: [float(numbers[0]) for numbers in lists]}
    for layer in range(last + 1):
        depth = layer / last if last else 1.0
        at_layer[layer] = [interpolate(numbers, depth) for numbers in lists]
    return {name: at_layer[site.layer] for name, site in sites.items()}


def interpolate(numbers: Sequence[float], depth: float) -> float:
    """Return the number at a depth from 0 to 1, linearly between evenly spaced numbers."""
    place = depth * (len(numbers) - 1)
    below = int(place)
    above = min(len(numbers) - 1, below + 1)
    share = place - below
    return (1 - share) * numbers[below] + share * numbers[above]


def expert_weights(
    weights: Sequence[float] | None, count: int, default: float = 1.0
) -> list[float]:
    """merge.weights as a number for each expert.

    Raises PipelineError where there is not one for each.
    """
    if weights is None:
        return [default] * count
    if not isinstance(weights, list) or not all(
        isinstance(weight, int | float) for weight in weights
    ):
        raise PipelineError(
            f"merge.weights must be a list of numbers, one for each expert, got {weights!r}"
        )
    if len(weights) != count:
        raise PipelineError(
            f"merge.weights has {len(weights)} numbers for {count} merge.experts: give one for each"
            " expert"
        )
    large = next((weight for weight in weights if abs(weight) > MOST_WEIGHT), None)
    if large:
        raise PipelineError(
            f"merge.weights={weights}: {large:g} is above {MOST_WEIGHT:g}, where float32 overflows"
        )
    return [float(weight) for weight in weights]
