"""Reset (`layer_swapping` 3.3, `unreasonable` table 2): the base's values given back to a part of an expert."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """The base's values given back to a side of `partition=`, to layers, or to rows that changed little."""

    method: str = "reset"
    expert: str = knob(run=True)
    side: str | None = knob(None, options=("math", "language"))
    layers: list[int] | None = knob(None, low=0)  # from 0, next to the embeddings
    threshold: float | None = knob(None, low=0)  # mean absolute change of a row
    # what a row is, as in analyze.axis
    axis: str = knob("input", options=("input", "output"), hashed=lambda merge: merge.threshold is not None)
    outside: str | None = knob(None, options=("reset", "keep"))  # null: reset with a side, else keep

    reads_partition = True
    fewest = 1

    def references(self) -> References:
        return {"expert": ("merge.expert", self.expert)}

    def needs_base(self) -> bool:
        return True

    def exact_for_adapters(self) -> bool:
        return self.threshold is None

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        given = [f"merge.{key}" for key in ("side", "layers", "threshold") if getattr(self, key) is not None]
        if len(given) != 1:
            raise PipelineError(
                "merge=reset needs one of merge.side, merge.layers and merge.threshold, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.side is not None and partition is None:
            raise PipelineError(f"merge.side={self.side} needs a partition: give partition=A, B, C or Z")
        if partition is not None:
            if self.side is None:
                raise PipelineError(f"partition={partition.name} is read with merge.side alone: leave one of them out")
            refuse_outside(partition, "a reset reads merge.outside")
            if layers is not None:
                resolve_partition(partition, layers)
        if self.layers and layers is not None and max(self.layers) >= layers:
            raise PipelineError(f"merge.layers={self.layers}: the model has layers 0 to {layers - 1}")

    def label(self, partition: Partition | None) -> str:
        return "reset-" + (f"{partition.name}-{self.side}" if partition else "layers" if self.layers else "rows")

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Linear | Computed:
        from pipeline.merge.merge import Computed, Linear
        from pipeline.merge.summary import group_weights

        assert base is not None
        weights = reset_weights(self, anatomy(base.names), partition)
        by_row = RowReset(self, sources["expert"], base, weights)
        if self.threshold is None:
            return Linear(weights, by_row.kept_shares)
        rows = group_weights(weights)
        text = f"expert, but base in rows ({self.axis} features) that changed by {self.threshold:g} or less"
        rows.insert(1, {"where": "all layers", "what": "all", "weights": {}, "formula": text})
        return Computed(by_row.formula, rows, weights, measured=by_row.kept_shares)


def reset_weights(config: Reset, sites: Mapping[str, Site], partition: Partition | None = None) -> Weights:
    """Which parameters are given back to the base whole (`layer_swapping` 3.3, `unreasonable` table 2).

    Sources are `expert` and `base`. With merge.threshold, parameters of the layers are left out: their rows are judged
    one by one. Resetting a side resets what is outside the layers too, unless merge.outside=keep, so that "frozen
    during" and "reset after" differ in nothing else. Raises PipelineError unless exactly one of side, layers and
    threshold is given, and for layers that the model does not have.
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


class RowReset:
    """Rows that changed by the threshold or less in the mean are the base's."""

    def __init__(self, config: Reset, expert: Source, base: Source, weights: Weights) -> None:
        self.config, self.expert, self.base, self.weights = config, expert, base, weights
        self.kept_rows = functools.cache(self._kept_rows)  # the formula needs them, and what is measured

    def _kept_rows(self, name: str) -> np.ndarray:
        """Which rows of a tensor stay the expert's."""
        from pipeline.merge.formulas import row_changes

        changes: np.ndarray = row_changes(self.expert, self.base, name, self.config.axis)
        return changes > (self.config.threshold or 0.0)

    def formula(self, name: str) -> Rows:
        import numpy as np

        kept = self.kept_rows(name)
        columns = self.config.axis == "input" or len(self.base.info(name).shape) < 2

        def rows(start: int, stop: int) -> np.ndarray:
            mask = kept if columns else kept[start:stop, None]
            return np.where(mask, self.expert.rows(name, start, stop), self.base.rows(name, start, stop))

        return rows

    def kept_shares(self, threads: int | None) -> dict[str, float]:
        """How much of the layers stays the expert's, in percent: of their rows (as `rows_in` has them, a vector is one)
        and of their parameters. `layer_swapping` 3.3: 70 to 80 % of the parameters are needed."""
        import numpy as np

        from pipeline.merge.formulas import by_size, rows_in
        from pipeline.models.arrays import in_threads

        def rows_and_parameters(name: str) -> list[int]:  # kept, of
            count, length = rows_in(self.base.info(name).shape, self.config.axis)
            judged = name not in self.weights
            kept = int(self.kept_rows(name).sum()) if judged else count * ("expert" in self.weights[name])
            return [kept, count, kept * length, count * length]

        sites = anatomy(self.base.names)
        names = [name for name in by_size(self.base) if sites[name].layer is not None]
        rows_kept, rows, kept, parameters = np.sum(in_threads(rows_and_parameters, names, threads), axis=0).tolist()
        return {"rows_kept": 100 * rows_kept / rows, "parameters_kept": 100 * kept / parameters}
