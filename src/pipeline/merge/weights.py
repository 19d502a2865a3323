"""Weights of experts: arithmetic on numbers, no tensors. The methods spread them over parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site

# parameter -> source -> weight; 1 for a single source means that the parameter is that source's, byte for byte
Weights = dict[str, dict[str, float]]
MOST_WEIGHT = 1e30  # times a weight of a model, still below the largest float32


def inverse_weights(magnitudes: Mapping[str, float]) -> dict[str, float]:
    """Weights in proportion to 1 / mean absolute change, summing to 1 (`layer_swapping`, section 4.3).

    Raises PipelineError for an expert that did not move.
    """
    for role, size in magnitudes.items():
        if not size > 0:
            raise PipelineError(f"{role} does not differ from its base: it has no weight by magnitude; leave it out")
    total = math.fsum(1 / size for size in magnitudes.values())
    return {role: 1 / size / total for role, size in magnitudes.items()}


def weights_by_owner(
    sites: Mapping[str, Site], owner_of: Callable[[Site], str], shares: Mapping[str, Mapping[str, float]]
) -> Weights:
    """Return the weights of each parameter: the shares of the owner of its site, without weights of zero."""
    owned = {owner: {role: weight for role, weight in share.items() if weight} for owner, share in shares.items()}
    return {name: dict(owned[owner_of(site)]) for name, site in sites.items()}


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
    if large := next((weight for weight in weights if abs(weight) > MOST_WEIGHT), None):
        raise PipelineError(f"merge.weights={weights}: {large:g} is above {MOST_WEIGHT:g}, where float32 overflows")
    return [float(weight) for weight in weights]
