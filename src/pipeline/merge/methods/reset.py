"""Reset (`layer_swapping` 3.3, `unreasonable` table 2): a part of an expert is the base's again."""

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

    from pipeline.merge.adapters import Opened, Source
    from pipeline.merge.formulas import Rows
    from pipeline.merge.merge import Computed, Linear


@dataclass
class Reset(Merge):
    """Restore the base in a side of `partition=`, in layers, or in rows that changed little."""

    method: str = "reset"
    expert: str = knob(run=True)
    side: str | None = knob(None, options=("math", "language"))
    layers: list[NonNegativeInt] | None = knob(None)  # from 0, next to the embeddings
    threshold: float | None = knob(None, ge=0)  # mean absolute change of a row
    # rows are input or output features, as in analyze.axis
    axis: str = knob(
        "input", options=("input", "output"), hashed=lambda merge: merge.threshold is not None
    )
    # null: reset with a side, otherwise keep
    outside: str | None = knob(None, options=("reset", "keep"))

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
            listed = " and ".join(given) or "no part to reset"
            raise PipelineError(
                f"merge=reset has {listed}. Give one of merge.side, merge.layers and"
                " merge.threshold."
            )
        if partition is not None:
            if self.side is None:
                raise PipelineError(
                    f"partition={partition.name} is read only with merge.side. Leave it out, or"
                    " give merge.side alone."
                )
            refuse_outside(partition, "a reset reads merge.outside")
            if layers is not None:
                resolve_partition(partition, layers)
        elif self.side is not None:
            raise PipelineError(
                f"merge.side={self.side} needs a partition. Give partition=A, B, C or Z."
            )
        if self.layers and layers is not None and max(self.layers) >= layers:
            raise PipelineError(
                f"merge.layers={self.layers}: the model has layers 0 to {layers - 1}. Name some of"
                " them."
            )

    def label(self, partition: Partition | None, layers: int | None) -> str:
        if partition:
            return f"reset-{partition.name}-{self.side}"
        if self.layers:
            return "reset-layers"
        return "reset-rows"

    def decide(self, opened: Opened) -> Linear | Computed:
        from pipeline.merge.merge import Computed, Linear

        sites = anatomy(opened.base.names)
        weights = reset_weights(self, sites, opened.partition)
        reset = _ResetRows(self, opened.experts["expert"], opened.base, sites, weights)
        if self.threshold is None:
            return Linear(weights, reset.kept_shares)
        return Computed(reset.formula, weights, measured=reset.kept_shares)


class _ResetRows:
    """An expert whose rows are reset unless they changed by more than the threshold."""

    def __init__(
        self,
        config: Reset,
        expert: Source,
        base: Source,
        sites: Mapping[str, Site],
        weights: Weights,
    ) -> None:
        self.config, self.expert, self.base = config, expert, base
        self.sites, self.weights = sites, weights
        self.kept_rows = functools.cache(self._kept_rows)  # used by the formula and the shares

    def _kept_rows(self, name: str) -> np.ndarray:
        """Return which rows of a tensor changed by more than the threshold in the mean."""
        from pipeline.merge.formulas import row_changes

        changes: np.ndarray = row_changes(self.expert, self.base, name, self.config.axis)
        return changes > self.config.threshold

    def formula(self, name: str) -> Rows:
        import numpy as np

        from pipeline.merge.formulas import are_columns

        kept = self.kept_rows(name)
        by_column = are_columns(self.base, name, self.config.axis)

        def rows(start: int, stop: int) -> np.ndarray:
            mask = kept
            if not by_column:
                mask = kept[start:stop, None]
            of_expert = self.expert.rows(name, start, stop)
            return np.where(mask, of_expert, self.base.rows(name, start, stop))

        return rows

    def counts(self, name: str) -> list[int]:
        """Return a tensor's rows kept, rows, parameters kept, and parameters."""
        from pipeline.merge.formulas import rows_in

        count, length = rows_in(self.base, name, self.config.axis)
        if name not in self.weights:
            kept = int(self.kept_rows(name).sum())
        elif "expert" in self.weights[name]:
            kept = count
        else:
            kept = 0
        return [kept, count, kept * length, count * length]

    def kept_shares(self, threads: int | None) -> dict[str, float]:
        """Return the percentages of rows and parameters of the layers that stay the expert's.

        A vector is one row (`rows_in`). `layer_swapping` 3.3: 70 to 80 % of the parameters are
        needed.
        """
        import numpy as np

        from pipeline.merge.formulas import by_size
        from pipeline.models.arrays import in_threads

        names = []
        for name in by_size(self.base):
            if self.sites[name].layer is not None:
                names.append(name)
        counts = np.sum(in_threads(self.counts, names, threads), axis=0)
        kept_rows, rows, kept_parameters, parameters = counts
        return {
            "rows_kept": 100 * kept_rows / rows,
            "parameters_kept": 100 * kept_parameters / parameters,
        }


def reset_weights(
    config: Reset, sites: Mapping[str, Site], partition: Partition | None = None
) -> Weights:
    """Return which whole parameters are reset (`layer_swapping` 3.3, `unreasonable` table 2).

    Sources are `expert` and `base`. With merge.threshold, parameters of the layers are left out,
    because their rows are judged separately. Resetting a side also resets what is outside the
    layers, unless merge.outside=keep. Then "frozen during" and "reset after" training treat the
    same parameters.

    Raises:
        PipelineError: not exactly one of side, layers and threshold is given, or the model does not
            have the layers.
    """
    layers = num_layers(sites)
    config.refuse(partition, layers)
    outside = config.outside
    if outside is None:
        outside = "keep" if config.side is None else "reset"

    def is_reset(site: Site) -> bool:
        if site.layer is None or site.kind in OUTSIDE:
            return outside == "reset"
        if partition is not None:
            return side_of(partition, site, layers) == config.side
        return site.layer in (config.layers or [])

    weights = {}
    for name, site in sites.items():
        if config.threshold is not None and site.layer is not None:
            continue
        source = "base" if is_reset(site) else "expert"
        weights[name] = {source: 1.0}
    return weights
