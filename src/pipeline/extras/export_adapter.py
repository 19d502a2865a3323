"""The option export.adapter=true: LoRA trainings and their merges as adapters for PEFT."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.commands.export_model import base_given
from pipeline.commands.model_card import model_folders
from pipeline.config.stages import ExportStage
from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.merge import Merging
from pipeline.merge.methods.soup import Soup
from pipeline.merge.open_merge import open_merge, why_dense
from pipeline.merge.write_adapter import with_uniform_rank
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import External, Parent


def open_as_adapter(model: Parent, config: ExportStage) -> Merging:
    """Open a model as a merge whose adapter has one rank (`with_uniform_rank`), by headers only.

    The adapter names its base only if the base is on the Hub.

    Raises:
        PipelineError: the model is not exactly an adapter of its base.
    """
    source = open_source(model.folder, base_given(model, config))
    merge = open_merge(Soup(experts=[model.name]), {"0": source})
    if merge.adapter is None:
        raise PipelineError(
            f"export.adapter=true: {model.name} is not exactly an adapter of its base:"
            f" {why_dense(merge)}. Remove export.adapter to write the whole model, or merge LoRA"
            " experts with merge.form=adapter."
        )
    hub_id = hub_id_of_base(model, Path(config.runs_dir))
    name, _, revision = hub_id.partition("@")
    settings = {"base_model_name_or_path": name or None, "revision": revision}
    adapter = with_uniform_rank(merge.adapter)
    return replace(merge, adapter=replace(adapter, settings=settings))


def hub_id_of_base(model: Parent, runs_dir: Path) -> str:
    """Return the Hub id and revision of a LoRA training's base, or an empty text.

    For a merge it is the base of its first expert.
    """
    manifest = read_manifest(model.folder)
    if manifest and manifest.stage == "merge":
        for role, folder in model_folders(manifest, runs_dir).items():
            if role != "base":
                return hub_id_of_base(External(folder.name, "", folder), runs_dir)
        return ""
    with suppress(PipelineError):
        return getattr(base_of(model, runs_dir, "checkpoint"), "hub", None) or ""
    return ""
