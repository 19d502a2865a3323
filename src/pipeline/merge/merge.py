"""Merges: decided from headers, told as a plan, then computed a piece of a tensor at a time, to
disk or into a model.

One object serves both: `Merging.pieces(name)` is what a tensor becomes, whoever asks. Nothing needs
a whole model in memory, and nothing here imports torch: a layer swap is over before torch would be
loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source, combine_adapters, write_adapter
from pipeline.merge.compatibility import as_decoders, check_sources, settle_positions
from pipeline.merge.formulas import Formula, Rows, refuse_not_finite, squared_norm, weighted_sum
from pipeline.merge.padding import Padding, align_padding
from pipeline.merge.summary import Row, group_weights
from pipeline.merge.weights import Weights
from pipeline.merge.write import copy_files, make_readable, write_index, write_weights
from pipeline.models import arrays
from pipeline.models.anatomy import TOWER, anatomy, towers
from pipeline.models.checkpoint import DTYPES, ITEM_BYTES, TORCH_NAMES, TensorInfo

if TYPE_CHECKING:
    from pipeline.config.training import Partition


Measured = Callable[
    [int | None], dict[str, float]
]  # numbers of a merge that its run records, by that many threads


@dataclasses.dataclass
class Linear:
    """A merge in which each parameter is a weighted sum of sources: parameter -> role -> weight."""

    weights: Weights
    measured: Measured = lambda threads: {}
    formula = prepare = None

    @cached_property
    def rows(self) -> list[Row]:
        return group_weights(self.weights)

    @property
    def changes(self) -> Weights:
        return self.weights


@dataclasses.dataclass
class Computed:
    """A merge by a formula, and its plan: a text, or rows.

    `weights`: of parameters that have some all the same.

    `prepare` finds what the formula needs to know of whole models, by the number of threads.
    `changes` says how much of each expert's change from the base a parameter has, where it is a sum
    of such. `measured` gives numbers of the merge that its run records.
    """

    formula: Formula
    rows: Any  # list of Row
    weights: Weights = dataclasses.field(default_factory=dict)
    changes: Weights | None = None
    prepare: Callable[[int | None], None] | None = None
    measured: Measured = lambda threads: {}

    def __post_init__(self) -> None:
        if isinstance(self.rows, str):
            self.rows = [
                {"where": "everywhere", "what": "all", "weights": {}, "formula": self.rows}
            ]


@dataclasses.dataclass
class Merging:
    """A merge that is decided but not computed: what its method decided, of these sources by role,
    the base included where it is read. `adapter` is set where the merge is one. `lost`: what casts
    cost, tensor -> [sum of squared errors, sum of squares], filled by writing.
    """

    config: Merge
    sources: dict[str, Source]
    method: Linear | Computed
    adapter: Adapted | None = None
    padding: Padding | None = None
    base: Source | None = None  # of the experts, read or not
    note: str = ""  # on the number of positions, where the sources differ in it
    lost: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @cached_property
    def dtype(self) -> str | None:
        """Return torch's name of the dtype in which all tensors are stored, or None to store each
        as the experts do.

        merge.dtype has priority. If the experts store some tensor in several dtypes, it is the
        base's dtype, or float32 without a base or if the base has several.
        """
        experts = []
        for role, source in self.sources.items():
            if role != "base" and source is not self.base:
                experts.append(source)
        of_tensors = [
            {source.info(name).dtype for source in [self.layout, *experts]} for name in self.names
        ]
        if self.config.result_dtype() or all(len(dtypes) == 1 for dtypes in of_tensors):
            return self.config.result_dtype()
        of_base = set()
        if self.base:
            of_base = {TORCH_NAMES.get(info.dtype, info.dtype) for info in self.base.infos.values()}
        return self.config.dtype_of_several(of_base)

    @property
    def stored_as(self) -> str:
        """The dtype or dtypes of the result, in words."""
        if self.adapter:
            return "float32"
        return " and ".join(sorted({TORCH_NAMES[self.stored_dtype(name)] for name in self.names}))

    def described(self, partition: Partition | None) -> str:
        """Describe what the merge does, in the layers of its model."""
        layers = set()
        for site in anatomy(self.names).values():
            if site.layer is not None:
                layers.add(site.layer)
        return self.config.described(partition, len(layers) or None)

    @property
    def layout(self) -> Source:
        """The source whose tensor names and files the result takes over: the first."""
        return next(iter(self.sources.values()))

    @property
    def giver_role(self) -> str:
        role = self.config.files_from or (
            self.padding.role if self.padding else next(iter(self.sources))
        )
        if role not in self.sources:
            raise PipelineError(
                f"merge.files_from={role} is no source: there are {', '.join(self.sources)}"
            )
        return role

    @property
    def giver(self) -> Source:
        """The source whose tokenizer, template and configs the result takes over."""
        return (self.padding.whole if self.padding else self.sources)[self.giver_role]

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def stored_dtype(self, name: str) -> str:
        """Return the safetensors dtype that a tensor of the result is stored in."""
        if self.dtype:
            return DTYPES[self.dtype]
        return self.layout.info(name).dtype

    def _padded(self, name: str) -> Padding | None:
        """Return how a tensor's rows of padding are merged, or None for a tensor without such
        rows.
        """
        if self.padding and name in self.padding.names:
            return self.padding
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        padded, shape = self._padded(name), self.layout.info(name).shape
        if padded:
            return (padded.rows, *shape[1:])
        return shape

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shape(name)) * ITEM_BYTES[self.stored_dtype(name)]

    def copied_from(self, name: str) -> tuple[str, TensorInfo] | None:
        """Return the one source whose tensor this is, unchanged, and where its bytes are;

        None if it is to be computed.
        """
        weights = self.method.weights.get(name, {})
        if list(weights.values()) != [1.0] or self._padded(name):
            return None
        (role,) = weights
        info = self.sources[role].stored(name)
        if info is not None and info.dtype == self.stored_dtype(name):
            return (role, info)
        return None

    def reads(self, role: str, name: str) -> bool:
        """Return True if a tensor is made of this source's, or may be."""
        return bool(self.method.weights.get(name, {role: 1.0}).get(role))

    def sole_source(self) -> str | None:
        """Return the one source that the merge is, all tensors unchanged, or None."""
        rows = list(((self.method.changes or {}) if self.adapter else self.method.weights).values())
        unchanged = self.adapter is not None or all(map(self.copied_from, self.names))
        alike = (
            unchanged
            and rows
            and list(rows[0].values()) == [1.0]
            and rows.count(rows[0]) == len(rows)
        )
        if alike:
            return next(iter(rows[0]))
        return None

    def decided_by(self, name: str, of: Callable[[str, str | None], Any]) -> Any:
        """What decides a tensor: two merges of one layout that agree here agree on the tensor.

        of(role, name) identifies a tensor of a source; of(role, None) the whole source.
        """
        padded = self._padded(name)
        form = self.stored_dtype(name), [padded.common, padded.role] if padded else []
        if name in self.method.weights:
            return [
                [of(role, name), weight] for role, weight in self.method.weights[name].items()
            ], *form
        knobs = {}
        for item in dataclasses.fields(self.config):
            if not item.metadata.get("run") and item.name not in ("files_from", "dtype", "form"):
                knobs[item.name] = getattr(self.config, item.name)
        sources = {role: of(role, None) for role in self.sources}
        return [knobs, self.config.beyond_knobs(), sources, self.method.rows, name], *form

    def signature(self, name: str) -> str:
        """Return what decides a tensor, by the files of the sources."""
        states = {role: source.state for role, source in self.sources.items()}
        return json.dumps(
            self.decided_by(name, lambda role, _: states[role]), sort_keys=True, default=str
        )

    def ready(self, threads: int | None = None) -> None:
        """Find what the method needs to know of whole models, once."""
        prepare, self.method.prepare = self.method.prepare, None
        with self._naming_what_is_not_finite(self.names):
            if prepare:
                prepare(threads)

    @contextlib.contextmanager
    def _naming_what_is_not_finite(self, names: Sequence[str]) -> Iterator[None]:
        """Where merging these tensors fails and one of a source is not finite, the error names its
        file.
        """
        try:
            yield
        except PipelineError:
            refuse_not_finite(self.sources.values(), names)
            raise

    def _rows(self, name: str) -> Rows:
        """Return the rows of a tensor of the result that all sources have, in float32."""
        method, package = self.method, self.config.package
        if method.formula is None or name in method.weights:
            parts = [(weight, self.sources[role]) for role, weight in method.weights[name].items()]
            return partial(weighted_sum, parts, name)
        if not package:
            return method.formula(name)
        place = f"merge={self.config.method} of package {package}"
        computed = method.formula(name)
        columns = arrays.matrix(self.layout.info(name).shape)[1]

        def checked(start: int, stop: int) -> np.ndarray:
            values = computed(start, stop)
            got, expected = (
                (getattr(values, "dtype", type(values).__name__), np.shape(values)),
                (stop - start, columns),
            )
            if not isinstance(values, np.ndarray) or got != (np.float32, expected):
                raise PipelineError(
                    f"{place}: {name} became {got[0]} {got[1]}, not float32 {expected}: report it"
                    " to its authors"
                )
            return values

        return checked

    def _values(self, name: str) -> Iterator[np.ndarray]:
        """One tensor of the result in float32, piece by piece: the rows that all sources have, then
        padding.
        """
        rows = self._rows(name)
        yield from (rows(*piece) for piece in arrays.pieces(self.layout.info(name).shape))
        padded = self._padded(name)
        if padded:
            common, shape = padded.common, (padded.rows - padded.common, *self.shape(name)[1:])
            yield from (
                padded.giver.rows(name, common + a, common + b) for a, b in arrays.pieces(shape)
            )

    def pieces(self, name: str, copied_entries: int | None = None) -> Iterator[np.ndarray]:
        """One tensor of the result as stored, (rows, columns) by (rows, columns).

        As its source stores it, about `copied_entries` at once, or computed in float32 and cast
        once. Raises PipelineError where the result is not finite: naming the source's file where
        that is not, else float16 overflows.
        """
        dtype, info, lost = self.stored_dtype(name), self.layout.info(name), np.zeros(2)
        copied = self.copied_from(name)
        if copied:
            source = self.sources[copied[0]]
            yield from (
                source.stored_rows(name, *piece)
                for piece in arrays.pieces(info.shape, copied_entries)
            )
            return
        with self._naming_what_is_not_finite([name]):
            for values in self._values(name):
                stored = arrays.narrow(values, dtype, name)
                if dtype not in ("F32", info.dtype):
                    lost += squared_norm(stored.astype(np.float32) - values), squared_norm(values)
                yield stored
        self.lost[name] = lost

    def cast(self) -> dict[str, Any]:
        """Return what merge.dtype cost, once it is written: the relative error of the whole.

        Empty if it cost nothing.
        """
        error, size = sum((self.lost[name] for name in sorted(self.lost)), np.zeros(2))
        if error:
            return {"cast": {"to": self.dtype, "relative_error": math.sqrt(error / size)}}
        return {}

    def bytes(self) -> dict[str, int]:
        """Bytes that are copied from a source as they are, and that are written."""
        if self.adapter:
            factors = self.adapter.factors.items()
            return {
                "copied": 0,
                "written": sum(
                    4 * part.rank * sum(self.layout.info(n).shape) for n, part in factors
                ),
            }
        copied = filter(self.copied_from, self.names)
        return {
            "copied": sum(map(self.bytes_of, copied)),
            "written": sum(map(self.bytes_of, self.names)),
        }

    def write(
        self,
        folder: Path,
        recorded: Mapping[str, Mapping[str, str]] | None = None,
        threads: int | None = None,
    ) -> dict[str, str]:
        """Write the merged checkpoint, or adapter, into an existing folder; returns {tensor:
        digest}.

        Shards are laid out as in the first source. Config, generation config, tokenizer and chat
        template come from `giver`. `recorded` holds digests of sources, source -> name -> digest: a
        tensor copied from one inherits it, and is then not read at all.
        """
        self.ready(threads)
        self.lost.clear()
        if self.adapter:
            digests = write_adapter(self.adapter, folder)
        else:
            digests = write_weights(self, folder, recorded or {}, threads)
            write_index(self, folder)
        copy_files(self.giver, folder, self.dtype, bool(self.adapter))
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

    `sources` by role: see `Merge.references`. Raises PipelineError where sources do not fit each
    other or the method.
    """
    experts = {role: sources[role] for role in config.references()}
    if base is None:
        base = next(
            (source.base for source in experts.values() if isinstance(source, Adapted)), None
        )
    if base is None and (config.needs_base() or config.control):
        raise PipelineError(
            f"merge={config.method} needs merge.base, the model that the experts were trained from"
        )
    opened = as_decoders(experts | ({"base": base} if base else {}))
    opened, padding = align_padding(opened, config.files_from)
    check_sources(opened)
    sources, base = {role: opened[role] for role in experts}, opened.get("base")
    method: Linear | Computed = config.decide(sources, base, partition, threads)
    controlled = config.controlled_roles()
    if controlled:
        assert base is not None
        if method.weights:
            method = Linear(weights_on_base(method.weights, controlled))
        else:
            sources = {
                role: base if role in controlled else source for role, source in sources.items()
            }
            method = config.decide(sources, base, partition, threads)
    reads_base = (method.formula and config.needs_base()) or any(
        "base" in row for row in method.weights.values()
    )
    if base is not None and reads_base:
        sources = {**sources, "base": base}
    merge = Merging(config, dict(sources), method, padding=padding, base=base)
    giver = merge.giver_role
    merge.note = settle_positions(merge.giver, opened)
    beside = towers(merge.names)
    if beside:
        method.weights.update({name: {giver: 1.0} for name in beside})
        if method.formula:
            method.rows = [*method.rows, {"where": TOWER, "what": "all", "weights": {giver: 1.0}}]
    if padding is not None:
        method.rows = [*method.rows, padding.describe()]
    with_heads = []
    for role in experts:
        if opened[role].later_heads:
            with_heads.append(role)
    if with_heads:
        left_out = f"left out: mtp.*, a head of later tokens that {' and '.join(with_heads)} stores"
        method.rows = [
            *method.rows,
            {"where": "later tokens", "what": "all", "weights": {}, "formula": left_out},
        ]
    return _as_adapter(merge)


def weights_on_base(weights: Weights, controlled: Sequence[str]) -> Weights:
    """Return the weights of a merge's control: those of the experts in `controlled` are the
    base's.
    """

    def moved(row: Mapping[str, float]) -> dict[str, float]:
        kept = {}
        for role, weight in row.items():
            if role not in controlled:
                kept[role] = weight
        share = math.fsum(weight for role, weight in row.items() if role in controlled)
        return kept | ({"base": kept.get("base", 0.0) + share} if share else {})

    return {name: moved(row) for name, row in weights.items()}


def why_dense(merge: Merging) -> str | None:
    """Why a merge is not an adapter of the base; None where it is one exactly."""
    experts = []
    for role, source in merge.sources.items():
        if role != "base":
            experts.append(source)
    whole = []
    for expert in experts:
        if not isinstance(expert, Adapted):
            whole.append(expert)
    if whole:
        return f"{whole[0].folder.name} is a whole model, not an adapter"
    if merge.method.changes is None:
        return f"merge={merge.config.method} does not give a weighted sum of adapters"
    for expert in experts:
        if isinstance(expert, Adapted) and expert.replaced.infos:
            tensor = min(expert.replaced.infos)
            return (
                f"{expert.folder.name} holds whole tensors, of modules_to_save, bias or a trained"
                f" head ({tensor})"
            )
    if merge.dtype:
        return f"merge.dtype={merge.dtype} rounds the merged weights"
    return None


def _as_adapter(merge: Merging) -> Merging:
    """Return the same merge as an adapter on the base, where that is exact and wanted."""
    form, method, changes, why = (
        merge.config.form,
        merge.method,
        merge.method.changes,
        why_dense(merge),
    )
    if form == "adapter" and why:
        raise PipelineError(
            f"merge.form=adapter is not possible: {why}; leave it out, or give merge.form=dense"
        )
    if form == "dense" or why or changes is None:
        return merge
    merge.adapter = adapter = combine_adapters(merge.sources, changes)
    if not adapter.factors:
        raise PipelineError(
            "the merge is the base itself: no adapter is left in it; choose fewer layers"
        )
    merge.method = Computed(
        lambda name: partial(adapter.rows, name),
        method.rows,
        changes=changes,
        measured=method.measured,
    )
    return merge
