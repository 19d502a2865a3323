"""The builder of merges: its experts, and the base where the method, the weights or an adapter needs one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.merging import LayerSwap, Merge, Reset
from pipeline.config.stages import EvalStage, MergeStage, RunStage
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.files import sha256_of
from pipeline.merge.weights import needs_magnitudes, roles
from pipeline.runs.lineage import base_of, gives_adapter, one_base, recorded_base
from pipeline.runs.run import Folder, Parent
from pipeline.study.build.resolver import Draft, Resolver, label_of

LIMIT = 60  # characters of a label that names many experts


def build(config: MergeStage, resolver: Resolver) -> Draft:
    return config, *merge_of(config, resolver)


def merge_of(config: MergeStage | EvalStage, resolver: Resolver) -> tuple[str, dict[str, Parent]]:
    """Label and parents of the merge that a stage writes, or scores in memory."""
    assert config.merge is not None
    parents = merge_parents(config.merge, config, resolver)
    names = [label_of(expert) for role, expert in parents.items() if role != "base"]
    return merge_label(config.merge, config.partition, names), parents


def merge_parents(merge: Merge, config: RunStage, resolver: Resolver) -> dict[str, Parent]:
    """Parents by the role that they have in the merge.

    Raises:
        PipelineError: too few experts, one twice, different bases, or no base to be found where one is needed.
    """
    experts = references(merge)
    if not all(isinstance(reference, str) for _, reference in experts.values()):
        told = next(f"{key}={reference}" for key, reference in experts.values() if not isinstance(reference, str))
        raise PipelineError(f"{told} is no RUN: give the name of a finished run, or a list of them")
    parents = {role: resolver.model(reference, key) for role, (key, reference) in experts.items()}
    elsewhere = [one for one in parents.values() if isinstance(one, Folder)]
    if elsewhere:  # refused by their headers before their contents are hashed
        check_headers(parents, resolver.model(merge.base, "merge.base") if merge.base else None)
        sha256_of([file for one in elsewhere for file in one.files], Path(config.runs_dir))
    hashes = [one.hash for one in parents.values()]
    if twice := next((one.name for one in parents.values() if hashes.count(one.hash) > 1), None):
        raise PipelineError(f"merge={merge.method} was given {twice} twice: name each expert once")
    if merge.base is not None:
        parents["base"] = resolver.model(merge.base, "merge.base")
        return parents
    adapters = [role for role, one in parents.items() if gives_adapter(one)]
    if adapters or needs_magnitudes(merge) or merge.method in ("ties", "task_arithmetic", "reset"):
        of = {role: parents[role] for role in adapters} or parents
        bases = [(expert.name, base_of(expert, config, experts[role][0])) for role, expert in of.items()]
        parents["base"] = one_base(bases, "merge.experts", ", or give merge.base=RUN")
        return parents
    recorded = [(one.name, base) for one in parents.values() if (base := recorded_base(one)) is not None]
    if recorded:
        one_base(recorded, f"merge={merge.method}: the experts", ", or give merge.base=RUN if they belong together")
    return parents


def check_headers(experts: Mapping[str, Parent], base: Parent | None) -> None:
    """Refuse whole models on this disk that do not fit each other, or the base that is given."""
    from pipeline.merge.adapters import open_source
    from pipeline.merge.compatibility import check_sources

    sources = {role: open_source(one.folder) for role, one in experts.items() if _whole(one)}
    if sources:
        check_sources(sources, open_source(base.folder) if base and _whole(base) else None)


def _whole(expert: Parent) -> bool:
    return any(expert.folder.glob("*.safetensors")) and not gives_adapter(expert)


def references(merge: Merge) -> dict[str, tuple[str, Any]]:
    """role -> (key, RUN) of each expert."""
    if isinstance(merge, LayerSwap):
        values = [(key, one) for key in ("math", "language") for one in _listed(getattr(merge, key))]
        return {role: (f"merge.{key}", one) for role, (key, one) in zip(roles(merge), values, strict=True)}
    if isinstance(merge, Reset):
        return {"expert": ("merge.expert", merge.expert)}
    experts = getattr(merge, "experts", None)
    if experts is None:
        raise PipelineError(f"merge.method={merge.method} is not known")
    if len(experts) < 2 and merge.method != "task_arithmetic":
        raise PipelineError(f"merge.experts={experts}: name two runs or more")
    return {str(index): ("merge.experts", expert) for index, expert in enumerate(experts)}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list) and not value:
        raise PipelineError("merge.math and merge.language name at least one run each: give merge.language=RUN")
    return value if isinstance(value, list) else [value]


def merge_label(merge: Merge, partition: Partition | None, names: list[str]) -> str:
    """layer_swap-5-2-<math>-<language>; many experts are counted."""
    sizes = ""
    if isinstance(merge, LayerSwap):
        sizes = f"-{partition.name}" if partition else f"-{merge.bottom_layers}-{merge.top_layers}"
    if isinstance(merge, Reset):
        what = partition.name + "-" + str(merge.side) if partition else "layers" if merge.layers else "rows"
        sizes = f"-{what}"
    joined = "-".join(names)
    return f"{merge.method}{sizes}-" + (joined if len(joined) <= LIMIT or len(names) < 3 else f"{len(names)}-experts")
