"""export.adapter=true: a LoRA training, or a merge of LoRA experts, as an adapter of their base that PEFT loads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.commands.export_model import base_given
from pipeline.config.compose import read_stage
from pipeline.config.stages import ExportStage, MergeStage
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, open_source, with_uniform_rank
from pipeline.merge.merge import Merging, open_merge, why_dense
from pipeline.merge.methods.soup import Soup
from pipeline.merge.stage import merge_of
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.model_card import find_ancestors
from pipeline.runs.run import Parent, Run
from pipeline.runs.unchanged import check_unchanged, content_digest
from pipeline.stages.rows import RUN_STAGES


def open_as_adapter(model: Parent, config: ExportStage) -> Merging:
    """The model as a merge whose adapter has one rank (`with_uniform_rank`) and names its base only if that is on the
    Hub. A merge that was written as a whole model is decided again from its experts; reads headers alone.

    Raises:
        PipelineError: the model is not exactly an adapter of its base, or its experts are gone or were changed.
    """
    source, manifest = open_source(model.folder, base_given(model, config)), read_manifest(model.folder)
    if isinstance(source, Adapted):
        merge = open_merge(Soup(experts=[model.name]), {"0": source})
    elif manifest and manifest.stage == "merge":
        merge = merge_of(recorded_merge(model, manifest, config))
    else:
        raise not_an_adapter(model, "it is a whole model, and not a merge of LoRA experts")
    if merge.adapter is None:
        raise not_an_adapter(model, str(why_dense(merge)))
    hub = None
    with suppress(PipelineError):  # a base that only its folder names
        hub = getattr(base_of_adapter(model, config), "hub", None)
    name, _, revision = (hub or "").partition("@")
    settings = {"base_model_name_or_path": name or None, "revision": revision}
    return replace(merge, adapter=replace(with_uniform_rank(merge.adapter), settings=settings))


def not_an_adapter(model: Parent, why: str) -> PipelineError:
    return PipelineError(
        f"export.adapter=true: {model.name} is not exactly an adapter of its base: {why}; remove export.adapter to "
        "write the whole model"
    )


def recorded_merge(model: Parent, manifest: Manifest, config: ExportStage) -> Run[MergeStage]:
    """A finished merge as a run that writes an adapter where that is exact, with the parents of its manifest."""
    parents = find_ancestors(manifest, Path(config.runs_dir))
    base = manifest.parents.get("base")
    if base and getattr(parents.get("base"), "hash", None) != base.hash:  # a folder that the experts name
        parents["base"] = base_of_adapter(model, config)
    for role, recorded in manifest.parents.items():
        parent = parents.get(role)
        if parent is None:
            raise not_an_adapter(model, f"its parent {recorded.name} ({role}) no longer exists")
        check_unchanged(parent.folder)
        if (parent.hash, content_digest(parent)) != (recorded.hash, recorded.content):
            raise not_an_adapter(model, f"its parent {recorded.name} ({role}) has changed since it was merged")
    stage = read_stage(MergeStage, manifest.config, extra="ignore")
    stage.merge.form = "auto"
    return Run(stage, model.name, parents, version=RUN_STAGES["merge"].version)


def base_of_adapter(model: Parent, config: ExportStage) -> Parent:
    """The base of a LoRA training; of a merge, that of its first expert unless the merge found one in runs_dir.

    Raises:
        PipelineError: it no longer exists.
    """
    manifest = read_manifest(model.folder)
    if manifest is None or manifest.stage != "merge":
        return base_of(model, Path(config.runs_dir), "checkpoint")
    parents, recorded = find_ancestors(manifest, Path(config.runs_dir)), manifest.parents.get("base")
    base = parents.pop("base", None)
    if base and recorded and base.hash == recorded.hash:
        return base
    if not parents:
        raise not_an_adapter(model, "its experts no longer exist")
    return base_of_adapter(next(iter(parents.values())), config)
