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
    from pipeline.merge.adapters import Opened, Source
    from pipeline.merge.merge import Linear

SIDES = ("math", "language")
MEASURED = ("attention", "linear_attention", "mlp")  # the kinds whose matrices are measured
# As in the authors' code: smaller norms do not divide, and sums of changes are raised by it
SMALLEST = 1e-8
Unit = tuple[Any, ...]  # (layer,) or (layer, "attention" or "mlp")


@dataclass
class AdaptiveSwap(Merge):
    """Take each layer, or its attention and its MLP, from the expert that moved it more.

    An expert's share of a unit is the relative change of the unit's matrices, divided by the sum
    over all units. If the two experts' shares differ by at most `threshold`, the unit is blended.
    Parameters outside the layers are also blended.
    """

    method: str = "adaptive_swap"
    math: str = knob(run=True)
    language: str = knob(run=True)
    # module: attention and MLP of a layer separately
    unit: str = knob("layer", options=("layer", "module"))
    threshold: float = knob(0.001, ge=0)  # tau of the paper
    # alpha of the paper: the weight of the math expert in a blend
    blend: float = knob(0.5, ge=0, le=1)

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

    def decide(self, opened: Opened) -> Linear:
        from pipeline.merge.merge import Linear

        sites = anatomy(opened.base.names)
        changes = {
            side: self.unit_changes(opened.experts[side], opened.base, sites, opened.threads)
            for side in SIDES
        }
        return Linear(self.weights(sites, changes))

    def unit_changes(
        self, expert: Source, base: Source, sites: Mapping[str, Site], threads: int | None
    ) -> dict[Unit, float]:
        """Return how far an expert moved each unit (the authors' layer_swap.py, module_swap.py).

        For a layer it is the sum of the relative changes of its matrices. For a module it is the
        root of the sum of their squares.
        """
        from pipeline.merge.formulas import relative_change
        from pipeline.models.arrays import in_threads

        names = []
        for name, site in sites.items():
            is_matrix = len(base.info(name).shape) > 1
            if is_matrix and site.kind in MEASURED:
                names.append(name)
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
        """Return the unit of a parameter, or None if it belongs to no unit."""
        if site.layer is None:
            return None
        if self.unit == "layer":
            return (site.layer,)
        if site.kind not in MEASURED:
            return None
        if site.kind == "mlp":
            return (site.layer, "mlp")
        return (site.layer, "attention")

    def weights(
        self, sites: Mapping[str, Site], changes: Mapping[str, Mapping[Unit, float]]
    ) -> Weights:
        """Return the weight of each expert in each parameter."""
        totals = {side: math.fsum(changes[side].values()) + SMALLEST for side in SIDES}

        def share_of(side: str, unit: Unit) -> float:
            return changes[side].get(unit, 0.0) / totals[side]

        def owner(site: Site) -> str:
            unit = self.unit_of(site)
            if site.layer is None:
                return "blend"
            if unit is None:  # the authors keep the language expert's norms
                return "language"
            moved_math, moved_language = share_of("math", unit), share_of("language", unit)
            if moved_math - moved_language > self.threshold:
                return "math"
            if moved_language - moved_math > self.threshold:
                return "language"
            return "blend"

        blended = {"math": self.blend, "language": 1 - self.blend}
        shares = {"math": {"math": 1.0}, "language": {"language": 1.0}, "blend": blended}
        return weights_by_owner(sites, owner, shares)
