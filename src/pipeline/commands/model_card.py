"""The model card of an export, as metadata of the Hub and as text.

It says how a model was made, and names its bases and data sets. All facts come from manifests. A
card holds names, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.commands.show import deciding_lines, parent_lines
from pipeline.hub.addresses import REPOSITORY
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import MANIFEST, Manifest, read_manifest
from pipeline.runs.run import Parent
from pipeline.text import markdown_table

CARD = "README.md"
NO_MODEL = ("data", "data_root")  # roles of parents
SOURCES = ("math", "language", "expert", "experts", "base")  # keys of merge= that hold models


@dataclass(frozen=True)
class Origin:
    """The external models and data sets that a model derives from.

    Attributes:
        bases: the nearest models on the Hub.
        sets: (name, id if it was read from the Hub, licence).
        licences: model -> licence in the Hub's spelling, if a manifest records it.
    """

    bases: tuple[str, ...] = ()
    sets: tuple[tuple[str, str | None, str], ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)


def origin_of(model: Parent, runs_dir: Path) -> Origin:
    """Return the origin of a finished run, a snapshot, or an external model."""
    if read_manifest(model.folder) is None:
        return Origin(bases=hub_models([f"hub:{getattr(model, 'hub', None)}"]))
    return origin_of_folder(model.folder, runs_dir)


def origin_of_folder(folder: Path, runs_dir: Path) -> Origin:
    manifest = made_by(folder, runs_dir)
    if manifest is None:
        return Origin()
    parents = model_folders(manifest, runs_dir).values()
    origins = [origin_of_folder(parent, runs_dir) for parent in parents]
    return origin_from_config(manifest.name, manifest.config, origins)


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


def origin_from_config(
    name: str, config: Mapping[str, Any], origins: Sequence[Origin] = ()
) -> Origin:
    """Return the origin of a training or merge, from its configuration and its parents' origins."""
    merge = config.get("merge") or {}
    model = config.get("model") or {}
    references = [model.get("path")]
    for key in SOURCES:
        sources = merge.get(key)
        if isinstance(sources, list):
            references += sources
        else:
            references.append(sources)
    bases = list(hub_models(references))
    sets = sets_of(config)
    licences: dict[str, str] = {}
    for origin in origins:
        licences |= origin.licences
        bases += origin.bases
        sets += origin.sets
    if model.get("licence"):
        licences = {name: model["licence"]}
    return Origin(
        bases=drop_duplicates(bases),
        sets=drop_duplicates(sets),
        licences=licences,
    )


def hub_models(references: Iterable[str | None]) -> tuple[str, ...]:
    """Return the names of the models on the Hub, without revisions."""
    names = []
    for reference in references:
        text = str(reference)
        name = text.removeprefix("hub:").partition("@")[0]
        if text.startswith("hub:") and re.fullmatch(REPOSITORY, name):
            names.append(name)
    return tuple(names)


def drop_duplicates(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def sets_of(config: Mapping[str, Any]) -> list[tuple[str, str | None, str]]:
    """Return the sets that a training read.

    A file below data_root need not be the data set of that name on the Hub, so it gets no
    repository and no licence.
    """
    of_run = config.get("expert") or {}
    experts = (of_run.get("union") or {}).values() or [of_run]
    excluded = (config.get("data") or {}).get("leave_out") or []
    sets = []
    for expert in experts:
        text = config.get("stage") == "cpt" and expert.get("text")
        for name, source in (text or expert.get("sources") or {}).items():
            if name in excluded:
                continue
            hub, licence = source.get("hub"), source.get("licence") or ""
            if config.get("data_root"):
                licence = "" if hub else licence
                hub = None
            sets.append((name, hub, licence))
    return sets


# --- the text ---


def render_card(
    body: str,
    made_of: Origin,
    *,
    tags: Sequence[str],
    relation: str,
    licence: str | None = None,
) -> str:
    """Return the text of a README.md: metadata and a body.

    Args:
        body: the text.
        made_of: the origin of the model.
        tags: tags for the Hub.
        relation: finetune, adapter or merge, in the Hub's terms.
        licence: the licence, or None if it is unknown.
    """
    from huggingface_hub import ModelCardData

    datasets = drop_duplicates(hub for _, hub, _ in made_of.sets)
    data = ModelCardData(
        base_model=list(made_of.bases) or None,
        base_model_relation=relation if made_of.bases else None,
        datasets=list(filter(None, datasets)) or None,
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


def data_section(made_of: Origin) -> str:
    """Return a table of the data sets with their licences, which still apply to the model."""
    if not made_of.sets:
        return ""
    rows = []
    for name, hub, licence in made_of.sets:
        rows.append((name, hub or "a local file", licence or "unknown"))
    table = markdown_table(("set", "on the Hub", "licence"), rows)
    return "\n".join(["## Trained on", "", *table]) + "\n"
