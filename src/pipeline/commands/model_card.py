"""The model card of an export, as metadata of the Hub and as text.

It says how a model was made, and names its bases and data sets. All facts come from manifests and
from the licences on the cards of external models. A card holds names, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.knob import format_value
from pipeline.errors import PipelineError
from pipeline.hub.addresses import REPOSITORY
from pipeline.hub.models import read_metadata
from pipeline.languages import language
from pipeline.runs.find import find_run
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import Ancestor, Manifest, read_manifest
from pipeline.runs.run import External, Parent, flatten_dict
from pipeline.text import markdown_table

CARD = "README.md"
NO_MODEL = ("data", "data_root")  # roles of parents


@dataclass(frozen=True)
class Origin:
    """The external models and data sets that a model derives from.

    Attributes:
        bases: the nearest models on the Hub.
        sets: (name, id if it was read from the Hub, licence).
        languages: ISO 639 codes.
        licences: model -> licence in the Hub's spelling, if known.
    """

    bases: tuple[str, ...] = ()
    sets: tuple[tuple[str, str | None, str], ...] = ()
    languages: tuple[str, ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)


def origin_of(model: Parent, runs_dir: Path, ask: bool = False) -> Origin:
    """Return the origin of a finished run, a snapshot, or an external model.

    With `ask`, the Hub is asked for cards.
    """
    manifest = read_manifest(model.folder)
    if manifest is None:
        return origin_from_card(model, ask)
    if manifest.stage == "select":
        selected = selected_model(manifest, runs_dir)
        if selected:
            return origin_of(selected, runs_dir, ask)
        return Origin()
    return origin_from_config(
        model.name, manifest.config, find_ancestors(manifest, runs_dir), runs_dir, ask
    )


def origin_from_config(
    name: str,
    config: Mapping[str, Any],
    parents: Mapping[str, Parent],
    runs_dir: Path,
    ask: bool = False,
) -> Origin:
    """Return the origin of a training or merge, from its configuration and finished parents."""
    models = {}
    for role, parent in parents.items():
        if role not in NO_MODEL and not role.startswith("language "):
            models[role] = parent
    origins = [origin_of(parent, runs_dir, ask) for parent in models.values()]
    licences: dict[str, str] = {}
    bases: list[str] = []
    sets, codes = sets_and_languages(config)
    for origin in origins:
        licences |= origin.licences
        bases += origin.bases
        sets += origin.sets
        codes += origin.languages
    inherited = set(licences.values())
    stated = (config.get("model") or {}).get("licence")
    if stated:
        licences = {name: stated}
    elif config.get("expert") and len(inherited) == 1:
        # a training inherits the licence of its base
        licences = {name: inherited.pop()}
    return Origin(
        bases=drop_duplicates(bases),
        sets=drop_duplicates(sets),
        languages=drop_duplicates(codes),
        licences=licences,
    )


def drop_duplicates(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def origin_from_card(model: Parent, ask: bool) -> Origin:
    """Return the origin of an external model.

    It is the model itself if the model is on the Hub, with the licence of its card.
    """
    licence = read_metadata(model.folder, ask=ask).get("license")
    hub = (getattr(model, "hub", None) or "").partition("@")[0]
    origin = Origin()
    if re.fullmatch(REPOSITORY, hub):
        origin = replace(origin, bases=(hub,))
    if licence:
        origin = replace(origin, licences={model.name: str(licence)})
    return origin


def sets_and_languages(
    config: Mapping[str, Any],
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """Return the sets that a training read, and their languages.

    A file below data_root need not be the data set of that name on the Hub, so it gets no
    repository and no licence.
    """
    of_run = config.get("expert") or {}
    experts = (of_run.get("union") or {}).values() or [of_run]
    excluded = (config.get("data") or {}).get("leave_out") or []
    sets, codes = [], []
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
            if of_iso_639(source.get("language")):
                codes += [source["language"]]
    return sets, codes


def of_iso_639(code: str | None) -> bool:
    """Return True if the Hub knows a language code.

    It does not know codes of constructed languages.
    """
    if code is None or not re.fullmatch("[a-z]{2,3}", code):
        return False
    with suppress(PipelineError):
        return not language(code).constructed
    return False


def find_ancestors(manifest: Manifest, runs_dir: Path) -> dict[str, Parent]:
    """Return role -> parent for the parents in a manifest that still exist."""
    merge = manifest.config.get("merge") or {}
    parents = {}
    for role, ancestor in manifest.parents.items():
        key, _, index = role.partition(".")
        reference: Any = merge.get(key)
        if role.isdigit():
            reference = (merge.get("experts") or [])[int(role) :][:1]
        if isinstance(reference, list) and reference:
            reference = reference[int(index or 0)]
        if role == "model":
            reference = (manifest.config.get("model") or {}).get("path")
        parent = find_ancestor(ancestor, reference, runs_dir)
        if parent:
            parents[role] = parent
    return parents


def find_ancestor(ancestor: Ancestor, reference: str | None, runs_dir: Path) -> Parent | None:
    """Return the run or model of a recorded ancestor, or None if it no longer exists.

    `reference` is the RUN as it was requested.
    """
    run_folder = folder_of(ancestor.hash, runs_dir)
    if run_folder:
        return External(ancestor.name, ancestor.hash, run_folder)
    for name in (
        ancestor.name,
        reference,
    ):  # a snapshot has a name, an external model only a reference
        with suppress(PipelineError):
            if name:
                return find_run(name, runs_dir, "checkpoint")
    return None


def selected_model(selection: Manifest, runs_dir: Path) -> Parent | None:
    """Return the model that a select run chose, or None if it no longer exists."""
    return find_ancestor(Ancestor(selection.facts["choice"]["checkpoint"], ""), None, runs_dir)


# --- the text ---


def render_card(
    name: str,
    body: str,
    made_of: Origin,
    *,
    tags: Sequence[str],
    relation: str,
    licence: str | None = None,
) -> str:
    """Return the text of a README.md: metadata, a body, and how to load the model.

    Args:
        name: the argument for from_pretrained.
        body: the text.
        made_of: the origin of the model.
        tags: tags for the Hub.
        relation: finetune, adapter or merge, in the Hub's terms.
        licence: the licence, or None to use the bases' licence.
    """
    from huggingface_hub import ModelCardData

    licences = set(made_of.licences.values())
    if licence is None and len(licences) == 1:
        licence = licences.pop()
    datasets = drop_duplicates(hub for _, hub, _ in made_of.sets)
    data = ModelCardData(
        base_model=list(made_of.bases) or None,
        base_model_relation=relation if made_of.bases else None,
        datasets=list(filter(None, datasets)) or None,
        language=list(made_of.languages) or None,
        license=licence,
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
    )
    loading = loading_section(name, made_of, relation)
    return f"---\n{data.to_yaml()}\n---\n\n{body.rstrip()}\n\n{loading}"


def describe_run(model: Parent, runs_dir: Path) -> str:
    """Return how a finished run was made, as Markdown.

    For a selection this is how the chosen model was made. Only settings that differ from the
    defaults are listed.
    """
    manifest = read_manifest(model.folder)
    if manifest and manifest.stage == "select":
        selected = selected_model(manifest, runs_dir)
        if selected:
            return describe_run(selected, runs_dir)
        return ""
    if manifest is None:
        return f"The weights of {model.name}."
    models = []
    for role, parent in manifest.parents.items():
        if role not in NO_MODEL:
            models.append(f"{role} = {parent.name}")
    parents = ", ".join(models)
    settings = flatten_dict(manifest.decided_by["config"])
    rows = [(key, format_value(value)) for key, value in sorted(settings.items())]
    lines = ["", *markdown_table(("setting", "value"), rows), ""]
    if manifest.stage != "merge":
        expert, recipe = manifest.config["expert"]["name"], manifest.config["sft"]["name"]
        trained_from = parents or "random weights"
        heading = f"Trained from {trained_from} with `expert={expert} sft={recipe}`."
        return "\n".join([heading, *lines]) + "\n"
    done = str(manifest.facts["merge"])
    lines += [f"{done[:1].upper()}{done[1:]}.", ""]
    lines += markdown_table(("where", "what", "weights"), plan_rows(manifest))
    return "\n".join([f"Merged from {parents}.", *lines]) + "\n"


def plan_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return (where, what, weights) of each part of a merge."""
    rows = []
    for row in manifest.facts["plan"]:
        terms = [f"{weight:g} {source}" for source, weight in row["weights"].items()]
        rows.append((row["where"], row["what"], row.get("formula", " + ".join(terms))))
    return rows


def relation_of(made_of: Origin, merged: bool) -> str:
    """Return "merge" or "finetune", the relation of a whole model to its bases.

    A merge of local experts is a finetune of their base.
    """
    if merged and len(made_of.bases) > 1:
        return "merge"
    return "finetune"


def data_section(made_of: Origin) -> str:
    """Return a table of the data sets with their licences, which still apply to the model."""
    if not made_of.sets:
        return ""
    rows = []
    for name, hub, licence in made_of.sets:
        rows.append((name, hub or "a local file", licence or "unknown"))
    table = markdown_table(("set", "on the Hub", "licence"), rows)
    return "\n".join(["## Trained on", "", *table]) + "\n"


def loading_section(name: str, made_of: Origin, relation: str) -> str:
    """Return how transformers loads the model, or how PEFT loads the adapter."""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")',
    ]
    if relation == "adapter":
        base = "BASE"
        if len(made_of.bases) == 1:
            base = made_of.bases[0]
        lines = ["from peft import PeftModel", *lines[:2]]
        lines += [
            f'base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")'
            + ("  # see above" * (base == "BASE"))
        ]
        lines += [f'model = PeftModel.from_pretrained(base, "{name}")']
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    return "\n".join(["## Load it", "", "```python", *lines, "```"]) + "\n"
