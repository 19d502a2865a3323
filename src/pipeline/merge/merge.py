"""Merges, computed a piece of a tensor at a time, to disk or into a model.

`Merging.pieces(name)` computes a tensor for both. A whole model is never in memory. This module
does not import torch, because a layer swap finishes before torch would be imported.
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
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.formulas import Formula, Rows, refuse_not_finite, squared_norm, weighted_sum
from pipeline.merge.padding import Padding
from pipeline.merge.weights import Weights
from pipeline.merge.write import copy_files, make_readable, write_index, write_weights
from pipeline.merge.write_adapter import write_adapter
from pipeline.models import arrays
from pipeline.models.anatomy import anatomy, num_layers
from pipeline.models.checkpoint import DTYPES, ITEM_BYTES, TORCH_NAMES, TensorInfo

if TYPE_CHECKING:
    from pipeline.config.training import Partition


# Takes a number of threads, and returns the numbers of a merge that its run records
Measured = Callable[[int | None], dict[str, float]]


@dataclasses.dataclass
class Linear:
    """A merge whose parameters are weighted sums of sources: parameter -> role -> weight."""

    weights: Weights
    measured: Measured = lambda threads: {}
    formula = prepare = None

    @property
    def changes(self) -> Weights:
        return self.weights


@dataclasses.dataclass
class Computed:
    """A merge that a formula computes.

    Args:
        formula: returns the rows of a parameter.
        weights: the weights of parameters that are weighted sums nevertheless.
        changes: for each parameter, the weight of each expert's change from the base, if the
            parameter is such a sum.
        prepare: computes the values of whole models that the formula needs, with a number of
            threads.
        measured: returns the numbers of the merge that its run records.
    """

    formula: Formula
    weights: Weights = dataclasses.field(default_factory=dict)
    changes: Weights | None = None
    prepare: Callable[[int | None], None] | None = None
    measured: Measured = lambda threads: {}


@dataclasses.dataclass
class Merging:
    """A merge that is decided but not yet computed.

    Args:
        config: the configuration of the method.
        sources: the sources by role, with the base if the merge reads it.
        method: the decisions of the method.
        adapter: the merge itself if it is an adapter.
        padding: how rows of padding are merged.
        base: the base of the experts, even if the merge does not read it.
        notes: what the method does not decide: positions, padding, heads of later tokens.
        lost: the cost of casts, tensor -> [sum of squared errors, sum of squares]. Writing fills
            it.
    """

    config: Merge
    sources: dict[str, Source]
    method: Linear | Computed
    adapter: Adapted | None = None
    padding: Padding | None = None
    base: Source | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    lost: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype of all tensors (torch's name), or None to store each tensor as the experts do.

        merge.dtype has priority. If the experts store some tensor in several dtypes, it is the
        base's dtype, or float32 without a base or if the base has several.
        """
        chosen = self.config.result_dtype()
        experts = [source for source in self.sources.values() if source is not self.base]
        sources = [self.layout, *experts]
        is_mixed = any(
            len({source.info(name).dtype for source in sources}) > 1 for name in self.names
        )
        if chosen or not is_mixed:
            return chosen
        if self.base:
            of_base = {info.dtype for info in self.base.infos.values()}
            if len(of_base) == 1:
                return TORCH_NAMES[of_base.pop()]
        return "float32"

    @property
    def stored_as(self) -> str:
        """The dtypes of the result, in words."""
        if self.adapter:
            return "float32"
        dtypes = {TORCH_NAMES[self.stored_dtype(name)] for name in self.names}
        return " and ".join(sorted(dtypes))

    def described(self, partition: Partition | None) -> str:
        """Describe what the merge does, in terms of its model's layers."""
        return self.config.described(partition, num_layers(anatomy(self.names)))

    @property
    def layout(self) -> Source:
        """The first source, whose tensor names and files the result has."""
        return next(iter(self.sources.values()))

    @property
    def giver_role(self) -> str:
        default = self.padding.role if self.padding else next(iter(self.sources))
        role = self.config.files_from or default
        if role not in self.sources:
            raise PipelineError(
                f"merge.files_from={role} is not a source. Choose from {', '.join(self.sources)}."
            )
        return role

    @property
    def giver(self) -> Source:
        """The source whose tokenizer, template and configs the result has."""
        if self.padding:
            return self.padding.whole[self.giver_role]
        return self.sources[self.giver_role]

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def stored_dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor of the result."""
        if self.dtype:
            return DTYPES[self.dtype]
        return self.layout.info(name).dtype

    def _padded(self, name: str) -> Padding | None:
        """Return how a tensor's rows of padding are merged, or None if it has no such rows."""
        if self.padding and name in self.padding.names:
            return self.padding
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.layout.info(name).shape
        padded = self._padded(name)
        if padded:
            return (padded.rows, *shape[1:])
        return shape

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shape(name)) * ITEM_BYTES[self.stored_dtype(name)]

    def copied_from(self, name: str) -> tuple[str, TensorInfo] | None:
        """Return the role of the source whose unchanged tensor this is, and its bytes, or None."""
        weights = self.method.weights.get(name, {})
        if list(weights.values()) != [1.0] or self._padded(name):
            return None
        (role,) = weights
        info = self.sources[role].stored(name)
        if info is not None and info.dtype == self.stored_dtype(name):
            return (role, info)
        return None

    def reads(self, role: str, name: str) -> bool:
        """Return True if the merge may read this source's tensor."""
        weights = self.method.weights.get(name)
        if weights is None:
            return True
        return bool(weights.get(role))

    def sole_source(self) -> str | None:
        """Return the role of the source that the whole merge equals, or None."""
        if self.adapter:
            weights = self.method.changes or {}
        elif all(map(self.copied_from, self.names)):
            weights = self.method.weights
        else:
            return None
        rows = {tuple(row.items()) for row in weights.values()}
        for role in self.sources:
            if rows == {((role, 1.0),)}:
                return role
        return None

    def decided_by(self, name: str, of: Callable[[str, str | None], Any]) -> Any:
        """Return what decides a tensor.

        If this value is equal for two merges of one layout, they have the same tensor.

        Args:
            name: the tensor.
            of: of(role, name) identifies a tensor of a source, and of(role, None) a whole source.
        """
        dtype = self.stored_dtype(name)
        padding: list[Any] = []
        padded = self._padded(name)
        if padded:
            padding = [padded.common, padded.role]
        if name in self.method.weights:
            weights = self.method.weights[name]
            return [[of(role, name), weight] for role, weight in weights.items()], dtype, padding
        knobs = {}
        for item in dataclasses.fields(self.config):
            if not item.metadata.get("run") and item.name not in ("files_from", "dtype", "form"):
                knobs[item.name] = getattr(self.config, item.name)
        sources = {role: of(role, None) for role in self.sources}
        changes = (self.method.changes or {}).get(name)
        parts = [knobs, self.config.beyond_knobs(), sources, changes, name]
        return parts, dtype, padding

    def signature(self, name: str) -> str:
        """Return what decides a tensor, with sources identified by their files."""
        decided = self.decided_by(name, lambda role, _: self.sources[role].state)
        return json.dumps(decided, sort_keys=True, default=str)

    def ready(self, threads: int | None = None) -> None:
        """Run the method's preparation, which reads whole models, once."""
        prepare = self.method.prepare
        self.method.prepare = None
        if prepare is None:
            return
        with self._naming_what_is_not_finite(self.names):
            prepare(threads)

    @contextlib.contextmanager
    def _naming_what_is_not_finite(self, names: Sequence[str]) -> Iterator[None]:
        """On an error, raise an error with the file of a source whose tensors are not finite."""
        try:
            yield
        except PipelineError:
            refuse_not_finite(self.sources.values(), names)
            raise

    def _rows(self, name: str) -> Rows:
        """Return the float32 rows of a tensor of the result, without padding."""
        method = self.method
        if method.formula is None or name in method.weights:
            parts = [(weight, self.sources[role]) for role, weight in method.weights[name].items()]
            return partial(weighted_sum, parts, name)
        return method.formula(name)

    def _values(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor of the result in float32, piece by piece, padding last."""
        rows = self._rows(name)
        for piece in arrays.pieces(self.layout.info(name).shape):
            yield rows(*piece)
        padded = self._padded(name)
        if padded is None:
            return
        first = padded.common
        further = padded.rows - first
        for start, stop in arrays.pieces((further, *self.shape(name)[1:])):
            yield padded.giver.rows(name, first + start, first + stop)

    def pieces(self, name: str, copied_entries: int | None = None) -> Iterator[np.ndarray]:
        """Yield a tensor of the result in its stored dtype, in pieces of (rows, columns).

        A copied tensor comes in pieces of about `copied_entries` entries. Other tensors are
        computed in float32 and cast once.

        Raises:
            PipelineError: the result is not finite. The error names the source's file if the source
                is not finite; otherwise float16 overflows.
        """
        info = self.layout.info(name)
        copied = self.copied_from(name)
        if copied:
            source = self.sources[copied[0]]
            for piece in arrays.pieces(info.shape, copied_entries):
                yield source.stored_rows(name, *piece)
            return
        dtype = self.stored_dtype(name)
        loses_precision = dtype not in ("F32", info.dtype)
        lost = np.zeros(2)
        with self._naming_what_is_not_finite([name]):
            for values in self._values(name):
                stored = arrays.narrow(values, dtype, name)
                if loses_precision:
                    error = stored.astype(np.float32) - values
                    lost += squared_norm(error), squared_norm(values)
                yield stored
        self.lost[name] = lost

    def cast(self) -> dict[str, Any]:
        """Return the relative error of the written merge that merge.dtype causes.

        Empty if there is no error.
        """
        error, size = sum((self.lost[name] for name in sorted(self.lost)), np.zeros(2))
        if not error:
            return {}
        return {"cast": {"to": self.dtype, "relative_error": math.sqrt(error / size)}}

    def write(
        self,
        folder: Path,
        recorded: Mapping[str, Mapping[str, str]] | None = None,
        threads: int | None = None,
    ) -> dict[str, str]:
        """Write the merged checkpoint or adapter into a folder, and return {tensor: digest}.

        Shards are laid out as in the first source. Config, generation config, tokenizer and chat
        template come from `giver`.

        Args:
            folder: where to write.
            recorded: digests on record, source -> tensor -> digest. A copied tensor inherits its
                digest, and is then not read.
            threads: the number of threads.
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
