"""The builder of merges: its experts, and the base where the method, the weights or an adapter need
one.
"""

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

LIMIT = 60  # characters of a label that names many experts


def build(config: MergeStage, resolver: Resolver) -> Draft:
    config = replace(config, merge=config.merge.settled(config.partition))
    return config, *label_and_parents(config, resolver)


def label_and_parents(
    config: MergeStage | EvalStage, resolver: Resolver
) -> tuple[str, dict[str, Parent]]:
    """Label (layer_swap-5-2-<math>-<language>; many experts: their number) and parents of a merge,
    written or not.
    """
    assert config.merge is not None
    if config.partition is not None and not config.merge.reads_partition:
        raise PipelineError(
            f"merge={config.merge.method} reads no partition: leave"
            f" partition={config.partition.name} out"
        )
    parents = merge_parents(config.merge, resolver)
    layers = layers_of(parents)
    config.merge.refuse(config.partition, layers)
    prefix = ""
    if config.merge.controlled_roles():
        prefix = "control-"
    names = []
    for role, expert in parents.items():
        if role != "base":
            names.append(label_of(expert))
    joined = "-".join(names)
    if not (len(joined) <= LIMIT or len(names) < 3):
        joined = f"{len(names)}-experts"
    return f"{prefix}{config.merge.label(config.partition, layers)}-{joined}", parents


def merge_parents(merge: Merge, resolver: Resolver) -> dict[str, Parent]:
    """Role in the merge -> parent.

    Raises:
        PipelineError: too few experts, a duplicate, different bases, or no base where one is
            needed.
    """
    experts, named_base = merge.references(), merge.base
    if len(experts) < merge.fewest:
        raise PipelineError(
            f"merge.experts={[run for _, run in experts.values()]}: name two runs or more"
        )
    wrong = []
    for key, reference in experts.values():
        if not isinstance(reference, str):
            wrong.append(f"{key}={reference}")
    if wrong:
        raise PipelineError(
            f"{wrong[0]} is not a RUN: give the name of a finished run, or a list of them"
        )
    parents = {role: resolver.model(reference, key) for role, (key, reference) in experts.items()}
    adapters = []
    for role, parent in parents.items():
        if gives_adapter(parent):
            adapters.append(role)
    if (
        any(map(is_external, parents.values())) and not merge.writes_folder
    ):  # before contents are hashed
        models = {
            **parents,
            **({"base": resolver.model(named_base, "merge.base")} if named_base else {}),
        }
        whole_models = {}
        for role, parent in models.items():
            if has_full_weights(parent):
                whole_models[role] = parent
        check_headers(
            tuple(
                (role, parent.folder, is_external(parent)) for role, parent in whole_models.items()
            )
        )
    hashes = [parent.hash for parent in parents.values()]
    duplicate = next(
        (parent.name for parent in parents.values() if hashes.count(parent.hash) > 1), None
    )
    if duplicate:
        raise PipelineError(
            f"merge={merge.method} was given {duplicate} twice: name each expert once"
        )
    merge.refuse_sides({role: declared_side(parent) for role, parent in parents.items()})
    if named_base is not None:
        parents["base"] = resolver.model(named_base, "merge.base")
    elif adapters or merge.needs_base() or merge.control:
        sources = {role: parents[role] for role in adapters} or parents
        bases = [
            (expert.name, base_of(expert, resolver.runs_dir, experts[role][0]))
            for role, expert in sources.items()
        ]
        parents["base"] = one_base(bases, "merge.experts", ", or give merge.base=RUN")
    elif recorded := [
        (parent.name, base)
        for parent in parents.values()
        if (base := recorded_base(parent)) is not None
    ]:
        one_base(
            recorded,
            f"merge={merge.method}: the experts",
            ", or give merge.base=RUN if they belong together",
        )
    for role in adapters:
        check_adapter(role, parents[role].folder, parents["base"].folder)
    return parents


@lru_cache(maxsize=1024)  # asked by each merge of a table
def check_adapter(role: str, adapter: Path, base: Path) -> None:
    """Raise PipelineError for an adapter of another base, where both are on this disk."""
    if not (is_adapter(adapter) and base.is_dir()):
        return
    from pipeline.merge.adapters import open_adapter
    from pipeline.merge.compatibility import key_of, refuse_another_base

    if read_manifest(adapter):
        own_base = base_folder(adapter)
    else:
        own_base = base
    if own_base.is_dir():
        refuse_another_base(open_adapter(adapter, own_base), base, key_of(role))


def layers_of(parents: Mapping[str, Parent]) -> int | None:
    """Return the number of layers of the merged models;

    None if no expert and no base is on this machine.
    """
    bases = filter(
        None, map(recorded_base, parents.values())
    )  # read only where no merged model is here
    files = (model.folder / "config.json" for model in chain(parents.values(), bases))
    file = next((file for file in files if file.is_file()), None)
    if file:
        return _layers_in(file, file.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=256)
def _layers_in(file: Path, _: int) -> int | None:
    config = read_json(file)
    return text_settings(config).get("num_hidden_layers") or common_settings(config).get(
        "num_hidden_layers"
    )


@lru_cache(maxsize=1024)
def check_headers(whole: tuple[tuple[str, Path, bool], ...]) -> None:
    """Raise PipelineError where complete models on this disk do not fit each other, or the given
    base. whole: role, folder, and whether no run made it, of each.
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
    """Whether a model is neither planned nor a finished run: a folder, or one of the Hub."""
    return not isinstance(model, Run | Snapshot) and read_manifest(model.folder) is None


def has_full_weights(expert: Parent) -> bool:
    return any(expert.folder.glob("*.safetensors")) and not gives_adapter(expert)
