"""The adaptive layer swap of arXiv 2601.22620: each layer from the expert that moved it more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References
from pipeline.config.training import Partition
from pipeline.merge.weights import Weights, weights_by_owner
from pipeline.models.anatomy import Site, anatomy

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Linear

SIDES = ("math", "language")
MEASURED = ("attention", "linear_attention", "mlp")  # the kinds whose matrices are measured
SMALLEST = (
    1e-8  # norms below it are not divided by, and it is added to sums, as in the authors' code
)
Unit = tuple[Any, ...]  # (layer,) or (layer, "attention" or "mlp")


@dataclass
class AdaptiveSwap(Merge):
    """Take each layer, or its attention and its MLP, from the expert that moved it more.

    An expert's share of a unit is the relative change of the unit's matrices, divided by that of
    all units. If the shares of the two experts differ by at most `threshold`, the unit is blended.
    So is what lies outside the layers.
    """

    method: str = "adaptive_swap"
    math: str = knob(run=True)
    language: str = knob(run=True)
    unit: str = knob(
        "layer", options=("layer", "module")
    )  # module: attention and MLP of a layer apart
    threshold: float = knob(0.001, ge=0)  # tau of the paper
    blend: float = knob(
        0.5, ge=0, le=1
    )  # alpha of the paper: the weight of the math expert where both are blended

    def references(self) -> References:
        return {side: (f"merge.{side}", getattr(self, side)) for side in SIDES}

    def needs_base(self) -> bool:
        return True

    def described(self, partition: Partition | None, layers: int | None) -> str:
        what = "layer's attention and MLP"
        if self.unit == "layer":
            what = "layer"
        return (
            f"each {what} of the expert that moved it more, blended where the shares differ by at"
            f" most {self.threshold:g}"
        )

    def decide(
        self,
        sources: dict[str, Source],
        base: Source | None,
        partition: Partition | None,
        threads: int | None,
    ) -> Linear:
        from pipeline.merge.merge import Linear

        assert base is not None
        sites = anatomy(base.names)
        changes = {side: self.unit_changes(sources[side], base, sites, threads) for side in SIDES}
        return Linear(self.weights(sites, changes))

    def unit_changes(
        self, expert: Source, base: Source, sites: Mapping[str, Site], threads: int | None
    ) -> dict[Unit, float]:
        """Return how far an expert moved each unit.

        It is the sum of the relative changes of a layer's matrices, or the root of the sum of their
        squares if the unit is a module (layer_swap.py and module_swap.py of the authors).
        """
        from pipeline.merge.formulas import relative_change
        from pipeline.models.arrays import in_threads

        names = [
            name
            for name, site in sites.items()
            if site.kind in MEASURED and len(base.info(name).shape) > 1
        ]
        measured = in_threads(
            lambda name: relative_change(expert, base, name, SMALLEST), names, threads
        )
        power = 1 if self.unit == "layer" else 2
        sums: dict[Unit, float] = {}
        for name, change in zip(names, measured, strict=True):
            unit = self.unit_of(sites[name])
            assert unit is not None
            sums[unit] = sums.get(unit, 0.0) + change**power
        return {unit: total ** (1 / power) for unit, total in sums.items()}

    def unit_of(self, site: Site) -> Unit | None:
        """Return the unit that a parameter belongs to; None outside of all units."""
        if site.layer is None:
            return None
        if self.unit == "layer":
            return (site.layer,)
        if site.kind not in MEASURED:
            return None
        return (site.layer, "mlp" if site.kind == "mlp" else "attention")

    def weights(
        self, sites: Mapping[str, Site], changes: Mapping[str, Mapping[Unit, float]]
    ) -> Weights:
        """Return the weight of each expert in each parameter."""
        totals = {side: math.fsum(changes[side].values()) + SMALLEST for side in SIDES}

        def owner(site: Site) -> str:
            unit = self.unit_of(site)
            if site.layer is None:
                return "blend"
            if unit is None:  # norms beside modules: the authors keep those of the language expert
                return "language"
            moved_math, moved_language = (
                changes[side].get(unit, 0.0) / totals[side] for side in SIDES
            )
            if moved_math - moved_language > self.threshold:
                return "math"
            if moved_language - moved_math > self.threshold:
                return "language"
            return "blend"

        shares = {
            "math": {"math": 1.0},
            "language": {"language": 1.0},
            "blend": {"math": self.blend, "language": 1 - self.blend},
        }
        return weights_by_owner(sites, owner, shares)
