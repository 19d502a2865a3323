"""Model soups (Wortsman et al., 2022): a weighted average, the same for every parameter unless layers have weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.layer_weights import (
    LAYER_KINDS,
    check_layer_weights,
    spread_weights,
    weights_of_layers,
    with_text_keys,
)
from pipeline.merge.weights import Weights, expert_weights, inverse_weights
from pipeline.models.anatomy import anatomy, num_layers

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Linear


@dataclass
class Soup(Merge):
    method: str = "soup"
    experts: list[str] = knob(run=True)
    weights: Any = None  # uniform, magnitude, or a number an expert; null: uniform
    # {role: {kind: number, list of a number a layer, or anchors {layer: number}}}, in place of `weights`
    layer_weights: Any = None

    def __post_init__(self) -> None:
        if self.weights == "uniform":
            self.weights = None
        if isinstance(self.weights, list) and all(type(weight) is int for weight in self.weights):
            self.weights = [float(weight) for weight in self.weights]
        self.layer_weights = with_text_keys(self.layer_weights)

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return isinstance(self.weights, str) and self.weights == "magnitude"

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        numbers = None if self.needs_base() else soup_numbers(self)
        if self.layer_weights is not None:
            check_layer_weights(self.layer_weights, list(self.references()), layers)
            if numbers is not None and layers is not None:
                check_sums(numbers, self.layer_weights, layers)

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Linear:
        from pipeline.merge.formulas import mean_change
        from pipeline.merge.merge import Linear

        magnitudes = None
        if self.needs_base():
            assert base is not None
            magnitudes = {role: mean_change([(1.0, source)], base, threads) for role, source in sources.items()}
        return Linear(soup_weights(self, sources["0"].names, magnitudes))


def soup_weights(config: Soup, names: Iterable[str], magnitudes: Mapping[str, float] | None = None) -> Weights:
    """A model soup: a weighted average of each parameter, uniform unless weights are given.

    Sources are "0", "1", ... in the order of merge.experts. Raises PipelineError unless there is one weight
    for each expert and those of every parameter sum to 1 (within 1e-6).
    """
    numbers, names = soup_numbers(config, magnitudes), list(names)
    if config.layer_weights is not None:
        check_sums(numbers, config.layer_weights, num_layers(anatomy(names)))
    weights = spread_weights(numbers, config.layer_weights, names)
    return {name: {role: number for role, number in row.items() if number} for name, row in weights.items()}


def check_sums(numbers: Mapping[str, float], layer_weights: Any, layers: int) -> None:
    """Raise PipelineError unless the weights of every kind of parameter in every layer sum to 1."""
    for kind, rows in weights_of_layers(numbers, layer_weights, layers).items():
        for layer, row in enumerate(rows):
            if not abs(sum(row.values()) - 1) <= 1e-6:
                given = " + ".join(f"{number:g}" for number in row.values())
                place = f"{kind} in layer {layer}" if kind in LAYER_KINDS.values() else kind
                raise PipelineError(
                    f"merge.layer_weights: the weights of {place} are {given} = {sum(row.values()):g}, not 1: "
                    "give them for each expert, or merge=task_arithmetic, whose weights have any sum"
                )


def soup_numbers(config: Soup, magnitudes: Mapping[str, float] | None = None) -> dict[str, float]:
    """merge.weights as a number for each role, which sum to 1."""
    count = len(config.experts)
    if not count:
        raise PipelineError("merge.experts is empty: give at least one run")
    if config.weights == "magnitude" and magnitudes is not None:
        weights = list(inverse_weights(magnitudes).values())
    elif isinstance(config.weights, str):
        raise PipelineError(f"merge.weights must be uniform, magnitude or a list of numbers, got {config.weights!r}")
    else:
        weights = expert_weights(config.weights, count, 1 / count)
    if not abs(math.fsum(weights) - 1) <= 1e-6:  # "not <=" also catches NaN
        raise PipelineError(f"merge.weights must sum to 1, got {weights}, which sum to {math.fsum(weights):g}")
    return {str(source): weight for source, weight in enumerate(weights)}
