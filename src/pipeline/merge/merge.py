"""Merges: decided from headers, told as a plan, then computed a piece of a tensor at a time, to disk or into a model.

One object serves both: `Merging.pieces(name)` is what a tensor becomes, whoever asks. Nothing needs a whole model in
memory, and nothing here imports torch: a layer swap is over before torch would be loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.extensions import guarded
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source, combine_adapters, write_adapter
from pipeline.merge.compatibility import check_sources
from pipeline.merge.formulas import Formula, linear_formula, refuse_not_finite
from pipeline.merge.summary import Row, group_weights
from pipeline.merge.weights import Weights
from pipeline.merge.write import copy_files, make_readable, write_index, write_weights
from pipeline.models import floats
from pipeline.models.checkpoint import DTYPES, TensorInfo

if TYPE_CHECKING:
    import torch

    from pipeline.config.training import Partition


@dataclasses.dataclass
class Merging:
    """A merge that is decided but not computed.

    `weights` holds the linear weights of the parameters that have some; `formula` computes rows of any parameter;
    `rows` is the plan to show. `prepare` finds what methods need to know of whole models. `changes` says how much of
    each source's change from the base a parameter has, where it is a sum of such; `adapter` is set where the merge is
    one. `measured` gives numbers of the merge that its run records.
    """

    config: Merge
    sources: dict[str, Source]
    formula: Formula
    weights: Weights
    rows: list[Row]
    prepare: Callable[[int | None], None] | None = None
    passes: int = 1  # over the sources of a computed tensor
    changes: Weights | None = None
    adapter: Adapted | None = None
    measured: Callable[[int | None], dict[str, float]] = lambda threads: {}
    lost: dict[str, np.ndarray] | None = None  # floats.squared_rounding_error by tensor, filled by writing

    @property
    def dtype(self) -> str | None:
        """torch's name; None stores every tensor in the dtype of the sources."""
        return self.config.result_dtype()

    @property
    def layout(self) -> Source:
        """The source whose tensor names and files the result takes over: the first."""
        return next(iter(self.sources.values()))

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def stored_dtype(self, name: str) -> str:
        """The safetensors dtype in which a tensor of the result is stored."""
        return DTYPES[self.dtype] if self.dtype else self.layout.info(name).dtype

    def stored_info(self, name: str) -> TensorInfo:
        """A tensor of the result as it will be stored; its place is not decided."""
        dtype, info = self.stored_dtype(name), self.layout.info(name)
        return TensorInfo(dtype, info.shape, math.prod(info.shape) * (4 if dtype == "F32" else 2), info.file, 0)

    def copied_from(self, name: str) -> str | None:
        """The one source whose tensor this is, unchanged, or None where it has to be computed."""
        weights = self.weights.get(name, {})
        if list(weights.values()) != [1.0] or self.adapter:
            return None
        role = next(iter(weights))
        info = self.sources[role].stored(name)
        return role if info is not None and info.dtype == self.stored_dtype(name) else None

    def signature(self, name: str) -> Any:
        """What decides a tensor: two merges of one layout that agree here agree on the tensor."""
        dtype = self.stored_dtype(name)
        if self.adapter is None and name in self.weights:
            return tuple((str(self.sources[role].folder), weight) for role, weight in self.weights[name].items()), dtype
        folders = {role: str(source.folder) for role, source in self.sources.items()}
        return json.dumps([dataclasses.asdict(self.config), folders, self.rows], sort_keys=True, default=str), dtype

    def ready(self, threads: int | None = None) -> None:
        """Find what the method needs to know of whole models, once."""
        if self.prepare:
            prepare, self.prepare = self.prepare, None
            prepare(threads)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """One tensor of the result as stored, (rows, columns) by (rows, columns); a piece lasts until the next.

        Computed in float32 and cast once. Raises PipelineError where the result is not finite: naming the source's file
        where that is not, else float16 overflows.
        """
        dtype, lost = self.stored_dtype(name), np.zeros(2)
        casts = self.lost is not None and dtype not in ("F32", self.layout.info(name).dtype)
        for start, stop in floats.pieces(self.layout.info(name).shape):
            values = self.formula(name, start, stop)
            exact = values.copy() if casts else None
            try:
                stored = floats.narrow(values, dtype, name)
            except PipelineError:
                refuse_not_finite(self.sources.values(), [name])
                raise
            if exact is not None:
                lost += floats.squared_rounding_error(exact, stored, dtype)
            yield stored
        if self.lost is not None and casts:
            self.lost[name] = lost

    def merged(self, name: str) -> torch.Tensor:
        """One tensor of the result, whole."""
        import torch

        from pipeline.models.checkpoint import torch_dtype

        self.ready()
        dtype, shape = self.stored_dtype(name), self.layout.info(name).shape
        values = np.concatenate(
            [np.empty(0, floats.STORED[dtype]), *(part.reshape(-1).copy() for part in self.pieces(name))]
        )
        return torch.from_numpy(values).view(torch_dtype(dtype)).reshape(shape)

    def cast(self) -> dict[str, Any]:
        """What merge.dtype cost, once it is written: the relative error of the whole. Empty where it cost nothing."""
        if not self.lost:
            return {}
        error, size = sum((self.lost[name] for name in sorted(self.lost)), np.zeros(2))
        return {"cast": {"to": self.dtype, "relative_error": math.sqrt(error / size)}} if error else {}

    def plan_rows(self) -> list[Row]:
        """The plan: `where` (layers a-b, embedding, ...), `what` (kinds), `weights` (source -> weight)."""
        return self.rows

    def bytes(self) -> dict[str, int]:
        """Bytes to copy as they are, to read for what is computed, and to write."""
        byte_counts = {"copied": 0, "read": 0, "written": 0}
        if self.adapter:
            entries = [part.rank * sum(self.adapter.base.info(n).shape) for n, part in self.adapter.factors.items()]
            return {"copied": 0, "read": 4 * sum(entries), "written": 4 * sum(entries)}
        for name in self.names:
            size = self.stored_info(name).nbytes
            byte_counts["written"] += size
            if self.copied_from(name):
                byte_counts["copied"] += size
            else:
                roles = self.weights.get(name, self.sources)
                byte_counts["read"] += self.passes * sum(self.sources[role].info(name).nbytes for role in roles)
        return byte_counts

    def write(
        self,
        folder: Path,
        files_from: str | None = None,
        recorded: Mapping[str, Mapping[str, str]] | None = None,
        threads: int | None = None,
    ) -> dict[str, str]:
        """Write the merged checkpoint, or adapter, into an existing folder; returns {tensor: digest}.

        Shards are laid out as in the first source. Config, generation config, tokenizer and chat template
        come from the source `files_from` (default: the first). `known` holds digests of sources on record,
        source -> name -> digest: a tensor copied from one inherits it, and is then not read at all.
        """
        refuse_unknown_role(files_from, self)
        self.ready(threads)
        self.lost = {}
        if self.adapter:
            digests = write_adapter(self.adapter, folder)
        else:
            digests = write_weights(self, folder, recorded or {}, threads)
            write_index(self, folder)
        copy_files(self.sources[files_from] if files_from else self.layout, folder, self.dtype, bool(self.adapter))
        make_readable(folder)
        return digests


def open_merge(
    config: Merge,
    sources: Mapping[str, Source],
    base: Source | None = None,
    partition: Partition | None = None,
    threads: int | None = None,
) -> Merging:
    """Decide a merge from headers; weights by magnitude then also read the experts.

    `sources` by role: see `Merge.references`. Raises PipelineError where sources do not fit each other or the method.
    """
    if config.dtype is not None and config.dtype not in DTYPES:
        raise PipelineError(f"merge.dtype must be one of {', '.join(DTYPES)}, got {config.dtype!r}")
    roles = list(config.references())
    if not roles:
        raise PipelineError("merge.experts is empty: give at least one run")
    if set(sources) != set(roles):
        raise PipelineError(f"merge={config.method} needs the sources {roles}, got {list(sources)}")
    sources = {role: sources[role] for role in roles}
    if base is None:
        base = next((source.base for source in sources.values() if isinstance(source, Adapted)), None)
    if base is None and (config.needs_base() or config.control):
        raise PipelineError(f"merge={config.method} needs merge.base, the model that the experts were trained from")
    if partition is not None and not config.reads_partition:
        raise PipelineError(f"merge={config.method} reads no partition: leave partition={partition.name} out")
    check_sources(sources, base)
    merge: Merging = config.decide(sources, base, partition, threads)
    if controlled := config.controlled_roles():
        assert base is not None
        if merge.weights:
            merge = linear_merge(config, {**sources, "base": base}, weights_on_base(merge.weights, controlled))
        else:
            in_place = {role: base if role in controlled else source for role, source in sources.items()}
            merge = config.decide(in_place, base, partition, threads)
    refuse_unknown_role(config.files_from, merge)
    return _as_adapter(with_checked_formula(merge) if config.package else merge)


def with_checked_formula(merge: Merging) -> Merging:
    """The merge of another package's method, whose formula raises PipelineError for what is no float32 of the shape."""
    place = f"merge={merge.config.method} of package {merge.config.package}"
    formula = guarded(merge.formula, place)

    def computed(name: str, start: int, stop: int) -> np.ndarray:
        values, expected = formula(name, start, stop), (stop - start, floats.matrix(merge.layout.info(name).shape)[1])
        if not isinstance(values, np.ndarray) or (values.shape, values.dtype) != (expected, np.float32):
            got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise PipelineError(f"{place}: {name} became {got}, not float32 {expected}: report it to its authors")
        return values

    return dataclasses.replace(merge, formula=computed)


def refuse_unknown_role(role: str | None, merge: Merging) -> None:
    if role is not None and role not in merge.sources:
        raise PipelineError(f"merge.files_from={role} is no source: there are {', '.join(merge.sources)}")


def weights_on_base(weights: Weights, controlled: Sequence[str]) -> Weights:
    """The weights of a merge's control: those of the experts in `controlled` are the base's."""

    def moved(row: Mapping[str, float]) -> dict[str, float]:
        kept = {role: weight for role, weight in row.items() if role not in controlled}
        share = math.fsum(weight for role, weight in row.items() if role in controlled)
        return kept | ({"base": kept.get("base", 0.0) + share} if share else {})

    return {name: moved(row) for name, row in weights.items()}


def linear_merge(config: Merge, sources: dict[str, Source], weights: Weights) -> Merging:
    """The merge that weights of all parameters decide: parameter -> source -> weight."""
    return Merging(config, sources, linear_formula(sources, weights), weights, group_weights(weights), changes=weights)


def why_dense(merge: Merging) -> str | None:
    """Why a merge is not an adapter of the base; None where it is one exactly."""
    experts = [source for role, source in merge.sources.items() if role != "base"]
    for expert in experts:
        if not isinstance(expert, Adapted):
            return f"{expert.folder.name} is a whole model, not an adapter"
    if merge.changes is None:
        return f"merge={merge.config.method} does not give a weighted sum of adapters"
    for expert in experts:
        if isinstance(expert, Adapted) and expert.replaced:
            tensor = min(expert.replaced.infos)
            return f"{expert.folder.name} holds whole tensors, of modules_to_save, bias or a trained head ({tensor})"
    return f"merge.dtype={merge.dtype} rounds the merged weights" if merge.dtype else None


def _as_adapter(merge: Merging) -> Merging:
    """The same merge as an adapter on the base, where that is exact and wanted."""
    form, changes = merge.config.form, merge.changes
    why = why_dense(merge)
    if form == "adapter" and why:
        raise PipelineError(f"merge.form=adapter is not possible: {why}; leave it out, or give merge.form=dense")
    if form == "dense" or why:
        return merge
    assert changes is not None
    adapter = combine_adapters(merge.sources, changes)
    if not adapter.factors:
        raise PipelineError("the merge is the base itself: no adapter is left in it; choose fewer layers")

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        out = floats.buffers("sum", (stop - start, floats.matrix(adapter.info(name).shape)[1]))
        adapter.rows(name, start, stop, out)
        return out

    return dataclasses.replace(merge, formula=formula, adapter=adapter)
