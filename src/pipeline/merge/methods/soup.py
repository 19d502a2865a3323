"""Model soups (Wortsman et al., 2022): a weighted average, everywhere or layer by layer."""

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
    from pipeline.merge.adapters import Opened
    from pipeline.merge.merge import Linear


@dataclass
class Soup(Merge):
    method: str = "soup"
    experts: list[str] = knob(run=True)
    # uniform, magnitude, or per expert a number or a list over depth; null: uniform
    weights: Any = None

    def __post_init__(self) -> None:
        if self.weights == "uniform":
            self.weights = None
        if not isinstance(self.weights, list):
            return
        if all(type(weight) is int for weight in self.weights):
            self.weights = [float(weight) for weight in self.weights]

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return bool(self.weights == "magnitude")

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if not self.needs_base():
            self.shares_in({"": Site(None, "embedding")})

    def shares_in(
        self, sites: Mapping[str, Site], magnitudes: Mapping[str, float] | None = None
    ) -> Weights:
        """Return the weight of each role whose weight is not 0, in each parameter.

        Raises:
            PipelineError: there is not one weight for each expert, or their sum differs from 1 by
                more than 1e-6.
        """
        count = len(self.experts)
        if not count:
            raise PipelineError("merge.experts is empty. Give at least one run.")
        if magnitudes is not None:
            weights = dict.fromkeys(sites, [*inverse_weights(magnitudes).values()])
        elif isinstance(self.weights, str):
            raise PipelineError(
                f"merge.weights={self.weights} is not known. Give uniform, magnitude or a list of"
                " numbers."
            )
        else:
            weights = weights_over_depth(self.weights, count, 1 / count, sites)
        shares: Weights = {}
        for name, numbers in weights.items():
            total = math.fsum(numbers)
            if not abs(total - 1) <= 1e-6:  # "not <=" also catches NaN
                where = ""
                if sites[name].layer is not None:
                    where = f" in layer {sites[name].layer}"
                raise PipelineError(
                    f"merge.weights={numbers}{where} sum to {total:g}. Give weights that sum to 1."
                )
            shares[name] = {str(role): weight for role, weight in enumerate(numbers) if weight}
        return shares

    def decide(self, opened: Opened) -> Linear:
        from pipeline.merge.formulas import mean_change
        from pipeline.merge.merge import Linear

        magnitudes = None
        if self.needs_base():
            magnitudes = {}
            for role, source in opened.experts.items():
                magnitudes[role] = mean_change([(1.0, source)], opened.base, opened.threads)
        return Linear(self.shares_in(anatomy(opened.experts["0"].names), magnitudes))
