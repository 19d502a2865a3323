"""Weights of experts: arithmetic on numbers, without tensors.

The merge methods assign the weights to parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site

# parameter -> source -> weight; a single source with weight 1 is copied byte for byte
Weights = dict[str, dict[str, float]]


def inverse_weights(magnitudes: Mapping[str, float]) -> dict[str, float]:
    """Return weights in proportion to 1 / mean absolute change (`layer_swapping`, section 4.3).

    They sum to 1.

    Raises:
        PipelineError: an expert does not differ from its base.
    """
    inverses = {}
    for role, size in magnitudes.items():
        if not size > 0:
            raise PipelineError(
                f"{role} does not differ from its base, so it has no weight by magnitude. Leave it"
                " out."
            )
        inverses[role] = 1 / size
    total = math.fsum(inverses.values())
    return {role: inverse / total for role, inverse in inverses.items()}


def weights_by_owner(
    sites: Mapping[str, Site],
    owner_of: Callable[[Site], str],
    shares: Mapping[str, Mapping[str, float]],
) -> Weights:
    """Return the weights of each parameter: the shares of its owner that are not 0."""
    weights = {}
    for name, site in sites.items():
        share = shares[owner_of(site)]
        weights[name] = {role: weight for role, weight in share.items() if weight}
    return weights


def weights_over_depth(
    weights: Sequence[Any] | None, count: int, default: float, sites: Mapping[str, Site]
) -> dict[str, list[float]]:
    """Return the weight of each expert in each parameter.

    An expert has a number, or a list of numbers that are interpolated from the first to the last
    layer. Parameters outside the layers have the first number, as with mergekit's gradients.

    Args:
        weights: merge.weights.
        count: the number of experts.
        default: the weight of each expert without merge.weights.
        sites: the parameters.

    Raises:
        PipelineError: as in `expert_weights`, and for an empty list.
    """
    if not isinstance(weights, list):
        weights = expert_weights(weights, count, default)
    refuse_other_count(weights, count)
    lists = []
    for entry in weights:
        numbers: list[float] = [entry]
        if isinstance(entry, list):
            numbers = entry
        if not numbers:
            raise PipelineError(
                f"merge.weights={weights} has an empty list. Give numbers from first to last layer."
            )
        lists.append(expert_weights(numbers, len(numbers)))
    layers = [site.layer for site in sites.values() if site.layer is not None]
    last = max(layers, default=0)
    at_layer: dict[int | None, list[float]] = {None: [numbers[0] for numbers in lists]}
    for layer in range(last + 1):
        depth = 1.0
        if last:
            depth = layer / last
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
    """Return merge.weights as a number for each expert.

    Raises:
        PipelineError: merge.weights is not a list with one number for each expert.
    """
    if weights is None:
        return [default] * count
    is_list = isinstance(weights, list)
    if not is_list or not all(isinstance(weight, int | float) for weight in weights):
        raise PipelineError(
            f"merge.weights={weights!r} is not a list of numbers. Give one number for each expert."
        )
    if not all(map(math.isfinite, weights)):
        raise PipelineError(f"merge.weights={weights} must be finite numbers.")
    refuse_other_count(weights, count)
    return [float(weight) for weight in weights]


def refuse_other_count(weights: Sequence[Any], count: int) -> None:
    if len(weights) != count:
        raise PipelineError(
            f"merge.weights has {len(weights)} numbers for {count} merge.experts. Give one number"
            " for each expert."
        )
