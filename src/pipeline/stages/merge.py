"""The builder of merges: the experts, and the base if it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pipeline.config.merging import Merge
from pipeline.config.stages import EvalStage, MergeStage
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import is_adapter, read_json, text_settings
from pipeline.models.shape import common_settings
from pipeline.runs.lineage import (
    base_folder,
    base_of,
    declared_side,
    gives_adapter,
    one_base,
    recorded_base,
)
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot
from pipeline.stages.resolver import Draft, Resolver, label_of

LIMIT = 60  # characters of the experts' names in a label


def build(config: MergeStage, resolver: Resolver) -> Draft:
    config = replace(config, merge=config.merge.settled(config.partition))
    return config, *label_and_parents(config, resolver)


def label_and_parents(
    config: MergeStage | EvalStage, resolver: Resolver
) -> tuple[str, dict[str, Parent]]:
    """Return the label and the parents of a merge, written or in memory.

    A label is layer_swap-5-2-<math>-<language>, or has the number of experts if there are many.
    """
    assert config.merge is not None
    if config.partition is not None and not config.merge.reads_partition:
        raise PipelineError(
            f"merge={config.merge.method} does not use a partition. Leave"
            f" partition={config.partition.name} out."
        )
    parents = merge_parents(config.merge, resolver)
    layers = layers_of(parents)
    config.merge.refuse(config.partition, layers)
    prefix = "control-" if config.merge.controlled_roles() else ""
    names = [label_of(expert) for role, expert in parents.items() if role != "base"]
    joined = "-".join(names)
    if len(joined) > LIMIT and len(names) > 2:
        joined = f"{len(names)}-experts"
    label = config.merge.label(config.partition, layers)
    return f"{prefix}{label}-{joined}", parents


def merge_parents(merge: Merge, resolver: Resolver) -> dict[str, Parent]:
    """Return the parents of a merge by their roles.

    Raises:
        PipelineError: There are too few experts, a duplicate, or different bases, or a base is
            needed and missing.
    """
    experts = merge.references()
    _check_references(merge)
    parents = {role: resolver.model(reference, key) for role, (key, reference) in experts.items()}
    named_base = None
    if merge.base is not None:
        named_base = resolver.model(merge.base, "merge.base")
    if not merge.writes_folder and any(map(is_external, parents.values())):
        _check_whole_models(parents, named_base)  # before contents are hashed
    hashes = set()
    for parent in parents.values():
        if parent.hash in hashes:
            raise PipelineError(
                f"merge={merge.method} has {parent.name} twice. Name each expert once."
            )
        hashes.add(parent.hash)
    merge.refuse_sides({role: declared_side(parent) for role, parent in parents.items()})
    adapters = [role for role, parent in parents.items() if gives_adapter(parent)]
    if named_base is not None:
        parents["base"] = named_base
    else:
        is_needed = adapters or merge.needs_base() or merge.control
        bases = []
        for role in adapters or list(parents):
            key, _ = experts[role]
            base = recorded_base(parents[role])
            if is_needed:
                base = base_of(parents[role], resolver.runs_dir, key)
            if base is not None:
                bases.append((parents[role].name, base))
        if bases:
            common = one_base(bases, "merge.experts", ", or give merge.base=RUN")
            if is_needed:
                parents["base"] = common
    for role in adapters:
        check_adapter(role, parents[role].folder, parents["base"].folder)
    return parents


def _check_references(merge: Merge) -> None:
    experts = merge.references()
    if len(experts) < merge.fewest:
        names = [reference for _, reference in experts.values()]
        raise PipelineError(f"merge.experts={names}: too few runs. Name at least {merge.fewest}.")
    for key, reference in experts.values():
        if not isinstance(reference, str):
            raise PipelineError(
                f"{key}={reference} is not a RUN. Name a finished run, or a list of them."
            )


def _check_whole_models(parents: Mapping[str, Parent], base: Parent | None) -> None:
    """Check the headers of the models that are complete on this disk."""
    models = dict(parents)
    if base is not None:
        models["base"] = base
    whole = []
    for role, model in models.items():
        if has_full_weights(model):
            whole.append((role, model.folder, is_external(model)))
    check_headers(tuple(whole))


@lru_cache(maxsize=1024)  # called for each merge of a table
def check_adapter(role: str, adapter: Path, base: Path) -> None:
    """Raise PipelineError for an adapter of another base, if both are on this disk."""
    if not (is_adapter(adapter) and base.is_dir()):
        return
    from pipeline.merge.adapters import open_adapter
    from pipeline.merge.compatibility import key_of, refuse_another_base

    own_base = base_folder(adapter) if read_manifest(adapter) else base
    if own_base.is_dir():
        refuse_another_base(open_adapter(adapter, own_base), base, key_of(role))


def layers_of(parents: Mapping[str, Parent]) -> int | None:
    """Return the number of layers of the merged models.

    The result is None if no expert and no base is on this machine.
    """
    # bases are only looked up if no merged model is here
    bases = filter(None, map(recorded_base, parents.values()))
    for model in chain(parents.values(), bases):
        file = model.folder / "config.json"
        if file.is_file():
            return _layers_in(file, file.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=256)
def _layers_in(file: Path, _: int) -> int | None:
    config, key = read_json(file), "num_hidden_layers"
    return text_settings(config).get(key) or common_settings(config).get(key)


@lru_cache(maxsize=1024)
def check_headers(whole: tuple[tuple[str, Path, bool], ...]) -> None:
    """Raise PipelineError if complete models on this disk do not fit each other, or the base.

    `whole` has the role and folder of each model, and whether it is external.
    """
    from pipeline.merge.adapters import open_source
    from pipeline.merge.compatibility import as_decoders, check_sources, key_of
    from pipeline.merge.padding import align_padding
    from pipeline.models.skeleton import check_shapes

    sources = {role: open_source(folder) for role, folder, _ in whole}
    for role, folder, external in whole:
        if external:
            check_shapes(folder, key_of(role))
    sources = as_decoders(sources)
    if sources.keys() - {"base"}:
        sources, _ = align_padding(sources)
        check_sources(sources)


def is_external(model: Parent) -> bool:
    """Return True if a model is a folder or on the Hub, and not a planned or finished run."""
    return not isinstance(model, Run | Snapshot) and read_manifest(model.folder) is None


def has_full_weights(expert: Parent) -> bool:
    return any(expert.folder.glob("*.safetensors")) and not gives_adapter(expert)
