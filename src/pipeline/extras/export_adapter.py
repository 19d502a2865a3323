"""export.adapter=true: a LoRA training, or a merge of LoRA experts, as an adapter of their base
that PEFT loads.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.commands.export_model import base_given
from pipeline.commands.model_card import find_ancestors
from pipeline.config.stages import ExportStage
from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source, with_uniform_rank
from pipeline.merge.merge import Merging, open_merge, why_dense
from pipeline.merge.methods.soup import Soup
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent


def open_as_adapter(model: Parent, config: ExportStage) -> Merging:
    """Open the model as a merge whose adapter has one rank (`with_uniform_rank`), by headers alone.

    The adapter names its base only if that is on the Hub.

    Raises: PipelineError: the model is not exactly an adapter of its base.
    """
    merge = open_merge(
        Soup(experts=[model.name]), {"0": open_source(model.folder, base_given(model, config))}
    )
    if merge.adapter is None:
        raise PipelineError(
            f"export.adapter=true: {model.name} is not exactly an adapter of its base:"
            f" {why_dense(merge)}; remove export.adapter to write the whole model, or merge LoRA"
            " experts with merge.form=adapter"
        )
    name, _, revision = hub_id_of_base(model, Path(config.runs_dir)).partition("@")
    settings = {"base_model_name_or_path": name or None, "revision": revision}
    return replace(merge, adapter=replace(with_uniform_rank(merge.adapter), settings=settings))


def hub_id_of_base(model: Parent, runs_dir: Path) -> str:
    """Return the Hub id and revision of the base of a LoRA training; for a merge that of its first
    expert.

    Empty for a base that only its folder names.
    """
    manifest = read_manifest(model.folder)
    if manifest and manifest.stage == "merge":
        experts = []
        for role, parent in find_ancestors(manifest, runs_dir).items():
            if role != "base":
                experts.append(parent)
        if experts:
            return hub_id_of_base(experts[0], runs_dir)
        return ""
    with suppress(PipelineError):
        return getattr(base_of(model, runs_dir, "checkpoint"), "hub", None) or ""
    return ""
