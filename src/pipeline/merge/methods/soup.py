"""Model soups (Wortsman et al., 2022): a weighted average, the same for every parameter or in each
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.weights import Weights, inverse_weights, weights_over_depth
from pipeline.models.anatomy import Site, anatomy

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Linear


@dataclass
class Soup(Merge):
    method: str = "soup"
    experts: list[str] = knob(run=True)
    # uniform, magnitude, or for each expert a number or a list over depth; null: uniform
    weights: Any = None

    def __post_init__(self) -> None:
        if self.weights == "uniform":
            self.weights = None
        if isinstance(self.weights, list) and all(type(weight) is int for weight in self.weights):
            self.weights = [float(weight) for weight in self.weights]

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return isinstance(self.weights, str) and self.weights == "magnitude"

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if not self.needs_base():
            self.shares()

    def shares(self, magnitudes: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the weight of each role that has one: uniform unless weights are given.

        Raises PipelineError unless there is one weight for each expert and they sum to 1 (within
        1e-6).
        """
        (shares,) = self.shares_in({"": Site(None, "embedding")}, magnitudes).values()
        return shares

    def shares_in(
        self, sites: Mapping[str, Site], magnitudes: Mapping[str, float] | None = None
    ) -> Weights:
        """Return the weight of each role in each parameter, as `shares`."""
        count = len(self.experts)
        if not count:
            raise PipelineError("merge.experts is empty: give at least one run")
        if magnitudes is not None:
            weights = dict.fromkeys(sites, [*inverse_weights(magnitudes).values()])
        elif isinstance(self.weights, str):
            raise PipelineError(
                "merge.weights must be uniform, magnitude or a list of numbers, got"
                f" {self.weights!r}"
            )
        else:
            weights = weights_over_depth(self.weights, count, 1 / count, sites)
        shares: Weights = {}
        for name, numbers in weights.items():
            if not abs(math.fsum(numbers) - 1) <= 1e-6:  # "not <=" also catches NaN
                if sites[name].layer is None:
                    where = ""
                else:
                    where = f" in layer {sites[name].layer}"
                raise PipelineError(
                    f"merge.weights must sum to 1, got {numbers}{where}, which sum to"
                    f" {math.fsum(numbers):g}"
                )
            shares[name] = {str(role): weight for role, weight in enumerate(numbers) if weight}
        return shares

    def decide(
        self,
        sources: dict[str, Source],
        base: Source | None,
        partition: Partition | None,
        threads: int | None,
    ) -> Linear:
        from pipeline.merge.formulas import mean_change
        from pipeline.merge.merge import Linear

        magnitudes = None
        if self.needs_base():
            assert base is not None
            magnitudes = {
                role: mean_change([(1.0, source)], base, threads)
                for role, source in sources.items()
            }
        return Linear(self.shares_in(anatomy(sources["0"].names), magnitudes))
