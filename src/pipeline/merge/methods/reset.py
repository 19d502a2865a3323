"""Reset (`layer_swapping` 3.3, `unreasonable` table 2): the base's values given back to a part of
an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.weights import Weights
from pipeline.models.anatomy import OUTSIDE, Site, anatomy, num_layers
from pipeline.models.partition import refuse_outside, resolve_partition, side_of

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.formulas import Rows
    from pipeline.merge.merge import Computed, Linear


@dataclass
class Reset(Merge):
    """The base's values given back to a side of `partition=`, to layers, or to rows that changed
    little.
    """

    method: str = "reset"
    expert: str = knob(run=True)
    side: str | None = knob(None, options=("math", "language"))
    layers: list[NonNegativeInt] | None = knob(None)  # from 0, next to the embeddings
    threshold: float | None = knob(None, ge=0)  # mean absolute change of a row
    # what a row is, as in analyze.axis
    axis: str = knob(
        "input", options=("input", "output"), hashed=lambda merge: merge.threshold is not None
    )
    outside: str | None = knob(
        None, options=("reset", "keep")
    )  # null: reset with a side, else keep

    reads_partition = True
    fewest = 1

    def references(self) -> References:
        return {"expert": ("merge.expert", self.expert)}

    def needs_base(self) -> bool:
        return True

    def exact_for_adapters(self) -> bool:
        return self.threshold is None

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        given = []
        for key in ("side", "layers", "threshold"):
            if getattr(self, key) is not None:
                given.append(f"merge.{key}")
        if len(given) != 1:
            raise PipelineError(
                "merge=reset needs one of merge.side, merge.layers and merge.threshold, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.side is not None and partition is None:
            raise PipelineError(
                f"merge.side={self.side} needs a partition: give partition=A, B, C or Z"
            )
        if partition is not None:
            if self.side is None:
                raise PipelineError(
                    f"partition={partition.name} is read with merge.side alone: leave one of"
                    " them out"
                )
            refuse_outside(partition, "a reset reads merge.outside")
            if layers is not None:
                resolve_partition(partition, layers)
        if self.layers and layers is not None and max(self.layers) >= layers:
            raise PipelineError(
                f"merge.layers={self.layers}: the model has layers 0 to {layers - 1}"
            )

    def label(self, partition: Partition | None, layers: int | None) -> str:
        return "reset-" + (
            f"{partition.name}-{self.side}" if partition else "layers" if self.layers else "rows"
        )

    def decide(
        self,
        sources: dict[str, Source],
        base: Source | None,
        partition: Partition | None,
        threads: int | None,
    ) -> Linear | Computed:
        import numpy as np

        from pipeline.merge.formulas import are_columns, by_size, row_changes, rows_in
        from pipeline.merge.merge import Computed, Linear
        from pipeline.merge.summary import group_weights
        from pipeline.models.arrays import in_threads

        assert base is not None
        expert, origin, sites = sources["expert"], base, anatomy(base.names)
        weights, threshold = reset_weights(self, sites, partition), self.threshold

        @functools.cache  # the formula needs them, and what is measured
        def kept_rows(name: str) -> np.ndarray:
            """Which rows of a tensor stay the expert's: those that changed by more than the
            threshold in the mean.
            """
            changes: np.ndarray = row_changes(expert, origin, name, self.axis)
            return changes > threshold

        def formula(name: str) -> Rows:
            kept = kept_rows(name)
            by_column = are_columns(origin, name, self.axis)

            def rows(start: int, stop: int) -> np.ndarray:
                mask = kept if by_column else kept[start:stop, None]
                return np.where(
                    mask, expert.rows(name, start, stop), origin.rows(name, start, stop)
                )

            return rows

        def rows_and_parameters(name: str) -> list[int]:  # kept, of
            count, length = rows_in(origin, name, self.axis)
            if name in weights:
                kept = count * ("expert" in weights[name])
            else:
                kept = int(kept_rows(name).sum())
            return [kept, count, kept * length, count * length]

        def kept_shares(threads: int | None) -> dict[str, float]:
            """How much of the layers stays the expert's, in percent: of their rows (as `rows_in`
            has them, a vector is one) and of their parameters. `layer_swapping` 3.3: 70 to 80 % of
            the parameters are needed.
            """
            names = []
            for name in by_size(origin):
                if sites[name].layer is not None:
                    names.append(name)
            counts = np.sum(in_threads(rows_and_parameters, names, threads), axis=0)
            return {
                "rows_kept": 100 * counts[0] / counts[1],
                "parameters_kept": 100 * counts[2] / counts[3],
            }

        if threshold is None:
            return Linear(weights, kept_shares)
        rows = group_weights(weights)
        text = (
            f"expert, but base in rows ({self.axis} features) that changed by {threshold:g} or less"
        )
        rows.insert(1, {"where": "all layers", "what": "all", "weights": {}, "formula": text})
        return Computed(formula, rows, weights, measured=kept_shares)


def reset_weights(
    config: Reset, sites: Mapping[str, Site], partition: Partition | None = None
) -> Weights:
    """Which parameters are given back to the base whole (`layer_swapping` 3.3, `unreasonable` table
    2).

    Sources are `expert` and `base`. With merge.threshold, parameters of the layers are left out:
    their rows are judged one by one. Resetting a side resets what is outside the layers too, unless
    merge.outside=keep, so that "frozen during" and "reset after" differ in nothing else. Raises
    PipelineError unless exactly one of side, layers and threshold is given, and for layers that the
    model does not have.
    """
    layers = num_layers(sites)
    config.refuse(partition, layers)
    outside = config.outside or ("reset" if config.side is not None else "keep")

    def is_reset(site: Site) -> bool:
        if site.layer is None or site.kind in OUTSIDE:
            return outside == "reset"
        if partition is not None:
            return side_of(partition, site, layers) == config.side
        return site.layer in (config.layers or [])

    by_row = config.threshold is not None
    judged = {name: site for name, site in sites.items() if not (by_row and site.layer is not None)}
    return {name: {"base" if is_reset(site) else "expert": 1.0} for name, site in judged.items()}
