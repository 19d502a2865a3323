"""Decide a merge from the headers of its sources: what each parameter is computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Opened, Source
from pipeline.merge.compatibility import (
    as_decoders,
    check_sources,
    experts_of,
    settle_positions,
)
from pipeline.merge.merge import Computed, Linear, Merging
from pipeline.merge.padding import align_padding
from pipeline.merge.weights import Weights
from pipeline.merge.write_adapter import combine_adapters
from pipeline.models.anatomy import towers

if TYPE_CHECKING:
    from pipeline.config.training import Partition


def open_merge(
    config: Merge,
    sources: Mapping[str, Source],
    base: Source | None = None,
    partition: Partition | None = None,
    threads: int | None = None,
) -> Merging:
    """Decide a merge by reading headers only; weights by magnitude also read the experts.

    Args:
        config: the configuration of the method.
        sources: the sources by role (`Merge.references`).
        base: the model that the experts were trained from. By default it is an adapter's base.
        partition: the layers of the sides.
        threads: the number of threads.

    Raises:
        PipelineError: the sources do not fit each other or the method.
    """
    opened = {role: sources[role] for role in config.references()}
    adapters = [source for source in opened.values() if isinstance(source, Adapted)]
    if base is None and adapters:
        base = adapters[0].base
    if base is not None:
        opened["base"] = base
    elif config.needs_base() or config.control:
        raise PipelineError(
            f"merge={config.method} needs merge.base, the model that the experts were trained from."
        )
    opened, padding = align_padding(as_decoders(opened), config.files_from)
    check_sources(opened)
    base = opened.get("base")
    experts = experts_of(opened)
    method: Linear | Computed = config.decide(Opened(experts, base, partition, threads))
    controlled = config.controlled_roles()
    if controlled:
        assert base is not None
        if method.weights:
            method = Linear(weights_on_base(method.weights, controlled))
        else:
            experts |= dict.fromkeys(controlled, base)
            method = config.decide(Opened(experts, base, partition, threads))
    merge = Merging(config, experts, method, padding=padding, base=base)
    computes_with_base = method.formula is not None and config.needs_base()
    if computes_with_base or any("base" in weights for weights in method.weights.values()):
        assert base is not None
        merge.sources = {**experts, "base": base}
    merge.method.weights.update({name: {merge.giver_role: 1.0} for name in towers(merge.names)})
    merge.notes = settle_positions(merge.giver, opened)
    if padding is not None:
        merge.notes.append(padding.described())
    merge.notes += later_heads(experts_of(opened))
    return _as_adapter(merge)


def later_heads(experts: Mapping[str, Source]) -> list[str]:
    """Return a note on the experts whose heads of later tokens are left out, if there are any."""
    roles = [role for role, source in experts.items() if source.later_heads]
    if not roles:
        return []
    return [f"left out: mtp.*, a head of later tokens that {' and '.join(roles)} stores"]


def weights_on_base(weights: Weights, controlled: Sequence[str]) -> Weights:
    """Return a merge's weights with the `controlled` experts' weights moved to the base."""
    moved = {}
    for name, row in weights.items():
        kept = dict(row)
        share = math.fsum(kept.pop(role) for role in row if role in controlled)
        if share:
            kept["base"] = kept.get("base", 0.0) + share
        moved[name] = kept
    return moved


def why_dense(merge: Merging) -> str | None:
    """Return why a merge is not an adapter of the base, or None if it is exactly one."""
    adapters = []
    for source in experts_of(merge.sources).values():
        if not isinstance(source, Adapted):
            return f"{source.folder.name} is a whole model, not an adapter"
        adapters.append(source)
    if merge.method.changes is None:
        return f"merge={merge.config.method} does not give a weighted sum of adapters"
    for adapter in adapters:
        if adapter.replaced.infos:
            tensor = min(adapter.replaced.infos)
            return (
                f"{adapter.folder.name} holds whole tensors, from modules_to_save, bias or a"
                f" trained head ({tensor})"
            )
    if merge.dtype:
        return f"merge.dtype={merge.dtype} rounds the merged weights"
    return None


def _as_adapter(merge: Merging) -> Merging:
    """Return the same merge as an adapter on the base, if that is exact and wanted."""
    form, method = merge.config.form, merge.method
    why = why_dense(merge)
    if form == "adapter" and why:
        raise PipelineError(
            f"merge.form=adapter is not possible: {why}. Leave it out, or set merge.form=dense."
        )
    if form == "dense" or why or method.changes is None:
        return merge
    adapter = combine_adapters(merge.sources, method.changes)
    if not adapter.factors:
        raise PipelineError(
            "The merge equals the base, so the adapter would be empty. Choose fewer layers."
        )
    merge.adapter = adapter
    merge.method = Computed(
        lambda name: partial(adapter.rows, name),
        changes=method.changes,
        measured=method.measured,
    )
    return merge
