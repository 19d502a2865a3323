"""The model card of an export: how a model was made, its bases and its data sets, as metadata of
the Hub and as text.

Everything comes from manifests and from the licences on the cards of external models. A card holds
names, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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

    bases: the nearest models on the Hub. sets: (name, id on the Hub if it was read from there,
    licence). languages: ISO 639. licences: model -> licence as the Hub spells it, where it is
    known.
    """

    bases: tuple[str, ...] = ()
    sets: tuple[tuple[str, str | None, str], ...] = ()
    languages: tuple[str, ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)


def origin_of(model: Parent, runs_dir: Path, ask: bool = False) -> Origin:
    """Return the origin of a finished run, a snapshot, or an external model.

    Args: ask: whether the Hub may be asked for cards.
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
    """Return the origin of a training or a merge, from its configuration and its finished
    parents.
    """
    models = {}
    for role, parent in parents.items():
        if role not in NO_MODEL and not role.startswith("language "):
            models[role] = parent
    origins = [origin_of(parent, runs_dir, ask) for parent in models.values()]
    licences = {}
    for origin in origins:
        for owner, licence in origin.licences.items():
            licences[owner] = licence
    inherited, stated = set(licences.values()), (config.get("model") or {}).get("licence")
    if stated or (
        config.get("expert") and len(inherited) == 1
    ):  # a training has the licence of its base
        licences = {name: stated or inherited.pop()}
    sets, codes = sets_and_languages(config)
    return Origin(
        bases=drop_duplicates(base for origin in origins for base in origin.bases),
        sets=drop_duplicates(
            [*sets, *(data_set for origin in origins for data_set in origin.sets)]
        ),
        languages=drop_duplicates(
            [*codes, *(code for origin in origins for code in origin.languages)]
        ),
        licences=licences,
    )


def drop_duplicates(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def origin_from_card(model: Parent, ask: bool) -> Origin:
    """Return the origin of an external model: itself if it is on the Hub, with the licence of its
    card.
    """
    licence = read_metadata(model.folder, ask=ask).get("license")
    hub = (getattr(model, "hub", None) or "").partition("@")[0]
    return Origin(
        bases=(hub,) if re.fullmatch(REPOSITORY, hub) else (),
        licences={model.name: str(licence)} if licence else {},
    )


def sets_and_languages(
    config: Mapping[str, Any],
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """Return the sets that a training read, and their languages.

    A file below data_root need not be the data set of that name on the Hub, so neither a repository
    nor a licence is named for it.
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
            sets.append(
                (name, None, "" if hub else licence)
                if config.get("data_root")
                else (name, hub, licence)
            )
            if of_iso_639(source.get("language")):
                codes += [source["language"]]
    return sets, codes


def of_iso_639(code: str | None) -> bool:
    """Whether the Hub knows a language by this code; it does not know constructed ones."""
    if code is None or not re.fullmatch("[a-z]{2,3}", code):
        return False
    with suppress(PipelineError):
        return not language(code).constructed
    return False


def find_ancestors(manifest: Manifest, runs_dir: Path) -> dict[str, Parent]:
    """Role -> parent named in a manifest, for those that still exist."""
    merge = manifest.config.get("merge") or {}
    parents = {}
    for role, ancestor in manifest.parents.items():
        key, _, index = role.partition(".")
        if role.isdigit():
            reference: Any = (merge.get("experts") or [])[int(role) :][:1]
        else:
            reference = merge.get(key)
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

    Args: reference: RUN as it was requested.
    """
    run_folder = folder_of(ancestor.hash, runs_dir)
    if run_folder:
        return External(ancestor.name, ancestor.hash, run_folder)
    for name in (
        ancestor.name,
        reference,
    ):  # a snapshot has a name, an external model only its reference
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
    """Return the text of a README.md: metadata, the given body, how to load the model.

    Args:
        name: the argument for from_pretrained.
        relation: to the bases, in the Hub's terms: finetune, adapter or merge.
    """
    from huggingface_hub import ModelCardData

    licences = set(made_of.licences.values())
    data = ModelCardData(
        base_model=list(made_of.bases) or None,
        base_model_relation=relation if made_of.bases else None,
        datasets=list(drop_duplicates(hub for _, hub, _ in made_of.sets if hub)) or None,
        language=list(made_of.languages) or None,
        license=licence or (licences.pop() if len(licences) == 1 else None),
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
    )
    loading = loading_section(name, made_of, relation)
    return f"---\n{data.to_yaml()}\n---\n\n{body.rstrip()}\n\n{loading}"


def describe_run(model: Parent, runs_dir: Path) -> str:
    """Return how a finished run was made, as Markdown; of a selection, how the chosen model was
    made.

    Settings are listed that differ from this program's defaults.
    """
    manifest = read_manifest(model.folder)
    if manifest and manifest.stage == "select":
        selected = selected_model(manifest, runs_dir)
        if selected:
            return describe_run(selected, runs_dir)
        return ""
    if manifest is None:
        return f"The weights of {model.name}."
    parents = ", ".join(
        f"{role} = {parent.name}"
        for role, parent in manifest.parents.items()
        if role not in NO_MODEL
    )
    settings = flatten_dict(manifest.decided_by["config"])
    rows = [(key, format_value(value)) for key, value in sorted(settings.items())]
    if manifest.stage == "merge":
        heading = f"Merged from {parents}."
    else:
        names = {key: manifest.config[key]["name"] for key in ("expert", "sft")}
        heading = (
            f"Trained from {parents or 'random weights'} with `expert={names['expert']}"
            f" sft={names['sft']}`."
        )
    lines = [heading, "", *markdown_table(("setting", "value"), rows), ""]
    if manifest.stage == "merge":
        done = str(manifest.facts["merge"])
        lines += [
            f"{done[:1].upper()}{done[1:]}.",
            "",
            *markdown_table(("where", "what", "weights"), plan_rows(manifest)),
        ]
    return "\n".join(lines) + "\n"


def plan_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return where, what and the weights of each part of a merge."""
    rows = []
    for row in manifest.facts["plan"]:
        weights = " + ".join(f"{weight:g} {source}" for source, weight in row["weights"].items())
        rows.append((row["where"], row["what"], row.get("formula", weights)))
    return rows


def relation_of(made_of: Origin, merged: bool) -> str:
    """merge or finetune: the relation of a whole model to its bases.

    Merged local experts are a finetune of theirs.
    """
    if merged and len(made_of.bases) > 1:
        return "merge"
    return "finetune"


def data_section(made_of: Origin) -> str:
    """Return a table of the sets, each with its licence, which still holds under the model's
    licence.
    """
    if not made_of.sets:
        return ""
    rows = [
        (name, hub or "a local file", licence or "unknown") for name, hub, licence in made_of.sets
    ]
    return (
        "\n".join(["## Trained on", "", *markdown_table(("set", "on the Hub", "licence"), rows)])
        + "\n"
    )


def loading_section(name: str, made_of: Origin, relation: str) -> str:
    """How transformers loads the model, or PEFT an adapter."""
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
