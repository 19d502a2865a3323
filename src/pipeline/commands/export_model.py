"""Stage export of a checkpoint: writes a folder that transformers loads, with a model card.

The target is a local folder, which `hf upload` publishes. An adapter is merged into its base. With
export.adapter=true a merge of adapters is written as one adapter for PEFT. The export holds no
manifest, log or local path.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.commands.model_card import (
    CARD,
    configs_behind,
    describe_run,
    hub_bases,
    recorded_licence,
    render_card,
)
from pipeline.config.extensions import EXPORTS, outside_core
from pipeline.config.stages import ExportStage
from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.compatibility import check_sources
from pipeline.merge.merge import Merging
from pipeline.merge.methods.soup import Soup
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import DTYPES, is_adapter, read_json
from pipeline.models.load import has_tokenizer
from pipeline.models.skeleton import check_shapes
from pipeline.progress import say, warn
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import Parent
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.resolver import Resolver
from pipeline.stages.rows import build

HUB = "hub:"
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
LOCAL_KEYS = ("name_or_path", "_file")  # suffixes of the keys in which libraries store paths


def export_model(config: ExportStage) -> str:
    """Write the checkpoint to export.to. Return the folder.

    Raises:
        PipelineError: the target exists or cannot be written, or the run was changed.
    """
    target = str(config.export.to)
    assert config.checkpoint is not None
    if target.startswith(HUB):
        name = target.removeprefix(HUB)
        raise PipelineError(
            f"export.to={target} is not a folder. Set export.to=./FOLDER, then run"
            f" hf upload {name} ./FOLDER."
        )
    check_place(Path(target), "folder")
    model = Resolver(config.runs_path, build).model(config.checkpoint, "checkpoint")
    check_unchanged(model.folder)
    if config.export.adapter:
        opened = outside_core(EXPORTS, "adapter")
    else:
        opened = open_as_merge
    merge = opened(model, config)
    if not any(map(has_tokenizer, (merge.layout.folder, merge.layout.model.folder))):
        raise PipelineError(
            f"checkpoint={config.checkpoint} has no tokenizer. Copy the tokenizer of its base into"
            f" {model.name}."
        )
    place = Path(target).resolve()
    # next to the target, so that a rename publishes it
    with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        write_model(merge, folder, config)
        text = card_text(place.name, model, merge, config)
        (folder / CARD).write_text(text, encoding="utf-8")
        (folder / CARD).chmod(0o644)
        os.rename(folder, place)  # also replaces an empty folder
    return target


def check_place(target: Path, kind: str) -> None:
    """Check that a file or folder can be created at the target.

    Raises:
        PipelineError: the target exists as the other kind, is a folder with files, has no parent
            folder, or is inside a run.
    """
    if target.exists() and target.is_dir() != (kind == "folder"):
        raise PipelineError(
            f"export.to={target} exists and is not a {kind}. Give the {kind} another name."
        )
    if target.is_dir() and any(target.iterdir()):
        raise PipelineError(f"export.to={target} holds files. Name a new or empty folder.")
    if not target.resolve().parent.is_dir():
        raise PipelineError(
            f"export.to={target} cannot hold a {kind}. Name a {kind} in an existing folder."
        )
    for above in target.resolve().parents:
        if (above / MANIFEST).is_file():
            raise PipelineError(
                f"export.to={target} is inside the run {above.name}. Name a {kind} outside of it."
            )


# --- what is written ---


def open_as_merge(model: Parent, config: ExportStage) -> Merging:
    """Open the model as a merge of one source, in the requested dtype.

    Weights that already have this dtype are copied. Others are cast once.
    """
    source = open_source(model.folder, base_given(model, config))
    check_sources({"0": source}, lambda _: "checkpoint")
    if read_manifest(source.model.folder) is None:
        check_shapes(source.model.folder, "checkpoint")
    return open_merge(
        Soup(experts=[model.name], dtype=config.export.dtype, form="dense"), {"0": source}
    )


def base_given(model: Parent, config: ExportStage) -> Path | None:
    """Return the folder of export.base.

    Raises:
        PipelineError: export.base is set, but the model is not an external adapter.
    """
    if config.export.base is None:
        return None
    if read_manifest(model.folder) is not None or not is_adapter(model.folder):
        raise PipelineError(
            f"export.base={config.export.base} applies to an external adapter, but {model.name} is"
            " none. Remove export.base."
        )
    return Resolver(config.runs_path, build).model(config.export.base, "export.base").folder


def write_model(merge: Merging, folder: Path, config: ExportStage) -> None:
    """Write weights, configurations and tokenizer."""
    merge.write(folder, threads=config.threads)
    for name in CONFIGS:
        path = folder / name
        if path.is_file():
            text = json.dumps(without_paths(read_json(path)), indent=2, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")


def without_paths(value: Any) -> Any:
    """Return the JSON value without the local paths of libraries."""
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    public = {}
    for key, item in value.items():
        if not (str(key).endswith(LOCAL_KEYS) and isinstance(item, str | None)):
            public[key] = without_paths(item)
    return public


# --- the model card ---


def card_text(name: str, model: Parent, merge: Merging, config: ExportStage) -> str:
    """Return the model card.

    It says how the model was made, and the rounding error of the cast. The licence is
    export.licence, or that of the trained models.
    """
    runs_dir, manifest = config.runs_path, read_manifest(model.folder)
    configs = list(configs_behind(model.folder, runs_dir))
    bases = hub_bases(model, configs)
    licence = config.export.licence or recorded_licence(configs)
    if licence is None:
        warn("The licence is unknown, so the model card has none. Set it with export.licence=NAME.")
    sections = [f"# {name}\n\n{describe_run(model, runs_dir)}"]
    rounding = describe_cast(merge, config)
    if rounding:
        say(rounding)
        sections.append(f"## Weights\n\nThey were {rounding}.\n")
    tags: list[str] = []
    relation = "finetune"  # also a merge of local experts, of their base
    if manifest:
        method = (manifest.config.get("merge") or {}).get("method")
        recipe = (manifest.config.get("sft") or {}).get("name")
        tags = [str(tag) for tag in (manifest.stage, method, recipe) if tag]
        if manifest.stage == "merge" and len(bases) > 1:
            relation = "merge"
    if merge.adapter:
        relation = "adapter"
        base = merge.adapter.settings["base_model_name_or_path"]
        bases = [base] if base else []  # PEFT adds the adapter to this model
    body = "\n".join(sections)
    return render_card(body, bases, tags=tags, licence=licence, relation=relation)


def describe_cast(merge: Merging, config: ExportStage) -> str | None:
    """Describe the rounding error of the cast. Return None if no value was rounded."""
    source = merge.layout
    if not merge.cast():
        return None
    stored = "+".join(sorted({source.info(name).dtype for name in merge.names}))
    error = merge.cast()["cast"]["relative_error"]
    return f"cast from {stored} to {DTYPES[str(config.export.dtype)]}: relative error {error:.2g}"
