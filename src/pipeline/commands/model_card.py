"""The model card of an export, as metadata of the Hub and as text.

It says how a model was made, and names its bases. All facts come from manifests. A card holds
names, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.show import deciding_lines, parent_lines
from pipeline.hub.addresses import REPOSITORY
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import MANIFEST, Manifest, read_manifest
from pipeline.runs.run import Parent

CARD = "README.md"
NO_MODEL = ("data", "data_root")  # roles of parents
SOURCES = ("math", "language", "expert", "experts", "base")  # keys of merge= that hold models


def configs_behind(folder: Path, runs_dir: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the configurations of a model and of the runs that it was made from, nearest first."""
    manifest = made_by(folder, runs_dir)
    if manifest is None:
        return
    yield manifest.config
    for parent in model_folders(manifest, runs_dir).values():
        yield from configs_behind(parent, runs_dir)


def hub_bases(model: Parent, configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the models on the Hub that a model derives from, without revisions.

    Args:
        model: the model.
        configs: its configurations, from `configs_behind`.
    """
    references: list[str | None] = [f"hub:{getattr(model, 'hub', None)}"]
    for config in configs:
        merge = config.get("merge") or {}
        references.append((config.get("model") or {}).get("path"))
        for key in SOURCES:
            sources = merge.get(key)
            if isinstance(sources, list):
                references += sources
            else:
                references.append(sources)
    names = []
    for reference in references:
        text = str(reference)
        name = text.removeprefix("hub:").partition("@")[0]
        if text.startswith("hub:") and re.fullmatch(REPOSITORY, name):
            names.append(name)
    return list(dict.fromkeys(names))


def recorded_licence(configs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the licence of the nearest model that a training began with, or None."""
    for config in configs:
        licence = (config.get("model") or {}).get("licence")
        if licence:
            return str(licence)
    return None


def made_by(folder: Path, runs_dir: Path) -> Manifest | None:
    """Return the manifest of a model. For a selection it is the manifest of the chosen model."""
    manifest = read_manifest(folder)
    if manifest and manifest.stage == "select":
        name = manifest.facts["choice"]["checkpoint"].partition("@")[0]
        return read_manifest(runs_dir / name)
    return manifest


def model_folders(manifest: Manifest, runs_dir: Path) -> dict[str, Path]:
    """Return role -> folder of the runs that gave a run its weights, if they still exist."""
    folders = {}
    for role, ancestor in manifest.parents.items():
        if role in NO_MODEL or role.startswith("language "):
            continue
        folder = folder_of(ancestor.hash, runs_dir)
        if folder is None:
            folder = runs_dir / ancestor.name.partition("@")[0]  # of a snapshot
        if (folder / MANIFEST).is_file():
            folders[role] = folder
    return folders


# --- the text ---


def render_card(
    body: str,
    bases: Sequence[str],
    *,
    tags: Sequence[str],
    relation: str,
    licence: str | None = None,
) -> str:
    """Return the text of a README.md: metadata and a body.

    Args:
        body: the text.
        bases: the models on the Hub that the model derives from.
        tags: tags for the Hub.
        relation: finetune, adapter or merge, in the Hub's terms.
        licence: the licence, or None if it is unknown.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=list(bases) or None,
        base_model_relation=relation if bases else None,
        license=licence,
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body.rstrip()}\n"


def describe_run(model: Parent, runs_dir: Path) -> str:
    """Return how a finished run was made, as Markdown.

    For a selection this is how the chosen model was made. Only settings that differ from the
    defaults are listed.
    """
    manifest = made_by(model.folder, runs_dir)
    if manifest is None:
        return f"The weights of {model.name}.\n"
    made = manifest.facts.get("merge")
    if made is None:
        expert, method = manifest.config["expert"]["name"], manifest.config["sft"]["name"]
        made = f"trained with `expert={expert} sft={method}`"
    lines = [*deciding_lines(manifest), *parent_lines(manifest)]
    return "\n".join([f"{made[:1].upper()}{made[1:]}.", "", "```text", *lines, "```"]) + "\n"
