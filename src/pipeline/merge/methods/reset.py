"""Reset (`layer_swapping` 3.3, `unreasonable` table 2): the base's values given back to a part of an expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.weights import Weights
from pipeline.models.anatomy import OUTSIDE, Site, anatomy, num_layers
from pipeline.models.partition import resolve_partition, side_of

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.formulas import Formula, Once
    from pipeline.merge.merge import Merging


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
        given = [key for key in ("side", "layers", "threshold") if getattr(self, key) is not None]
        if len(given) != 1:
            names = " and ".join(f"merge.{key}" for key in given) or "none"
            raise PipelineError(f"merge=reset needs one of merge.side, merge.layers and merge.threshold, got {names}")
        if self.side is not None and partition is None:
            raise PipelineError(f"merge.side={self.side} needs a partition: give partition=A, B, C or Z")
        if self.side is None and partition is not None:
            raise PipelineError(f"partition={partition.name} is read with merge.side alone: leave one of them out")
        if partition is not None and partition.outside != "frozen":
            raise PipelineError(f"partition.outside={partition.outside} is of training: a reset reads merge.outside")
        if partition is not None and layers is not None:
            resolve_partition(partition, layers)
        if self.layers and layers is not None and max(self.layers) >= layers:
            raise PipelineError(f"merge.layers={self.layers}: the model has layers 0 to {layers - 1}")

    def label(self, partition: Partition | None) -> str:
        return "reset-" + (f"{partition.name}-{self.side}" if partition else "layers" if self.layers else "rows")

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Merging:
        from pipeline.merge.formulas import Once, linear_formula, row_changes
        from pipeline.merge.merge import Merging
        from pipeline.merge.summary import group_weights

        assert base is not None
        weights = reset_weights(self, anatomy(base.names), partition)
        all_sources = {**sources, "base": base}
        threshold = self.threshold or 0.0
        kept_rows = Once(lambda name: row_changes(sources["expert"], base, name, self.axis) > threshold)
        by_tensor, by_row = linear_formula(all_sources, weights), reset_rows(self, sources["expert"], base, kept_rows)
        rows, changes = group_weights(weights), weights if self.exact_for_adapters() else None
        if self.threshold is not None:
            formula_text = f"expert, but base in rows ({self.axis} features) that changed by {self.threshold:g} or less"
            rows.insert(1, {"where": "all layers", "what": "all", "weights": {}, "formula": formula_text})

        def formula(name: str, start: int, stop: int) -> np.ndarray:
            return by_tensor(name, start, stop) if name in weights else by_row(name, start, stop)

        def measure_shares(threads: int | None) -> dict[str, float]:
            return kept_shares(self, sources["expert"], base, weights, kept_rows, threads)

        return Merging(self, all_sources, formula, weights, rows, passes=2, changes=changes, measured=measure_shares)


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
    expert, base = {"expert": 1.0}, {"base": 1.0}

    def weights(site: Site) -> dict[str, float]:
        if site.layer is None or site.kind in OUTSIDE:
            return base if outside == "reset" else expert
        if partition is not None:
            return base if side_of(partition, site, layers) == config.side else expert
        return base if site.layer in (config.layers or []) else expert

    by_row = config.threshold is not None
    return {name: weights(site) for name, site in sites.items() if not (by_row and site.layer is not None)}


def reset_rows(config: Reset, expert: Source, base: Source, kept_rows: Once[np.ndarray]) -> Formula:
    """The expert's rows that changed by more than the threshold in the mean; the base's where they did not."""
    import numpy as np

    from pipeline.merge.formulas import task_vectors
    from pipeline.models.floats import buffers

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        rows = kept_rows(name)
        (vector,) = task_vectors([expert], base, name, start, stop)
        one_row = len(base.info(name).shape) < 2
        keep = rows if config.axis == "input" or one_row else rows[start:stop, None]
        out = buffers("sum", vector.shape)
        expert.rows(name, start, stop, out)
        np.copyto(out, buffers("base", out.shape), where=~keep)
        return out

    return formula


_shares: dict[Any, dict[str, float]] = {}


def kept_shares(
    config: Reset, expert: Source, base: Source, weights: Weights, kept_rows: Once[np.ndarray], threads: int | None
) -> dict[str, float]:
    """How much of the layers stays the expert's, in percent: of their rows (as `rows_in` has them, a vector is one) and
    of their parameters. `layer_swapping` 3.3: 70 to 80 % of the parameters are needed. Measured once a process.
    """
    from pipeline.merge.formulas import as_they_are, by_size, rows_in
    from pipeline.models.floats import in_threads

    key = (repr(config), tuple(name for name in weights if "base" in weights[name]), *as_they_are(expert, base))
    if key not in _shares:
        sites = anatomy(base.names)

        def count_kept(name: str) -> tuple[int, int, int, int]:
            rows, length = rows_in(base.info(name).shape, config.axis)
            rows_left = rows * ("expert" in weights[name]) if name in weights else int(kept_rows(name).sum())
            return rows_left, rows, rows_left * length, rows * length

        in_layers = [name for name in by_size(base) if sites[name].layer is not None]
        counts = in_threads([partial(count_kept, name) for name in in_layers], threads)
        rows_left, rows, entries, all_entries = map(sum, zip(*counts, strict=True))
        _shares[key] = {"rows_kept": 100 * rows_left / rows, "parameters_kept": 100 * entries / all_entries}
    return _shares[key]
