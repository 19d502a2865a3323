"""The model card that stands beside weights: what a model was made of, as the Hub's metadata have it and in words.

Everything comes from manifests and from the cards of models that no run made, so that a card says the same wherever and
whenever it is written. It holds names, never paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.hub.addresses import REPOSITORY
from pipeline.hub.models import bases_named, read_metadata
from pipeline.languages import language
from pipeline.runs.find import find
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import SNAPSHOTS, Ancestor, Manifest, read_manifest
from pipeline.runs.run import External, Parent

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARD = "README.md"
LOAD = "## Load it"
NO_MODEL = ("data", "data_root")  # roles of parents


@dataclass(frozen=True)
class Origin:
    """What a model was made of, back to what no run made.

    bases: the nearest models on the Hub. sets: (name, id on the Hub where it was read from there, licence). languages:
    ISO 639. licences: of each model that it was made of, as the Hub spells them, where they are known.
    """

    bases: tuple[str, ...] = ()
    sets: tuple[tuple[str, str | None, str], ...] = ()
    languages: tuple[str, ...] = ()
    licences: Mapping[str, str] = field(default_factory=dict)


def origin_of(model: Parent, runs_dir: Path, ask: bool = False) -> Origin:
    """Of a finished run, a snapshot, or a model that no run made. ask: whether the Hub may be asked for cards."""
    manifest = read_manifest(model.folder)
    if manifest is None:
        return elsewhere(model, ask)
    if manifest.stage == "select":
        selected = chosen_by(manifest, runs_dir)
        return origin_of(selected, runs_dir, ask) if selected else Origin()
    return origin(model.name, manifest.config, ancestors(manifest, runs_dir), runs_dir, ask)


def origin(
    name: str, config: Mapping[str, Any], parents: Mapping[str, Parent], runs_dir: Path, ask: bool = False
) -> Origin:
    """Of a training or a merge, by its configuration and its parents, which are finished."""
    models = {
        role: parent for role, parent in parents.items() if role not in NO_MODEL and not role.startswith("language ")
    }
    below = {role: origin_of(parent, runs_dir, ask) for role, parent in models.items()}
    licences = {owner: licence for parent in below.values() for owner, licence in parent.licences.items()}
    inherited, stated = set(licences.values()), (config.get("model") or {}).get("licence")
    if stated or (config.get("expert") and len(inherited) == 1):  # a training has the licence of its base
        licences = {name: stated or inherited.pop()}
    sets, codes = taught(config)
    return Origin(
        bases=once(base for parent in below.values() for base in parent.bases),
        sets=once([*sets, *(parent for source in below.values() for parent in source.sets)]),
        languages=once([*codes, *(code for parent in below.values() for code in parent.languages)]),
        licences=licences,
    )


def once(words: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(words))


def elsewhere(model: Parent, ask: bool) -> Origin:
    """Of a model that no run made: itself where it is the Hub's, else what its card says."""
    card_data = read_metadata(model.folder, ask=ask)
    of_hub = getattr(model, "hub", None)
    bases = [of_hub.partition("@")[0]] if of_hub else bases_named(card_data)
    licence = card_data.get("license")
    return Origin(
        bases=tuple(base for base in bases if re.fullmatch(REPOSITORY, base)),
        licences={model.name: str(licence)} if licence else {},
    )


def taught(config: Mapping[str, Any]) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """The sets that a training read, and their languages. Of a file below data_root nothing says that it is what the
    Hub has under that name: no repository is named, and no licence of one."""
    experts: list[Any] = [config["expert"]] if config.get("expert") else []
    experts = [inner for one in experts for inner in ((one.get("union") or {}).values() or [one])]
    left_out = (config.get("data") or {}).get("leave_out") or []
    sets, codes = [], []
    for expert in experts:
        text = config.get("stage") == "cpt" and expert.get("text")
        for name, source in (text or expert.get("sources") or {}).items():
            if name in left_out:
                continue
            hub, licence = source.get("hub"), source.get("licence") or ""
            sets.append((name, None, "" if hub else licence) if config.get("data_root") else (name, hub, licence))
            codes += [source["language"]] if of_iso_639(source.get("language")) else []
    return sets, codes


def of_iso_639(code: str | None) -> bool:
    """Whether the Hub knows a language by this code: constructed ones it does not."""
    if code is None or not re.fullmatch("[a-z]{2,3}", code):
        return False
    with suppress(PipelineError):
        return not language(code).constructed
    return False


def ancestors(manifest: Manifest, runs_dir: Path) -> dict[str, Parent]:
    """The parents that a manifest names, where they can still be found."""
    merge = manifest.config.get("merge") or {}
    manifests = {}
    for role, parent in manifest.parents.items():
        key, _, index = role.partition(".")
        references: Any = (merge.get("experts") or [])[int(role) :][:1] if role.isdigit() else merge.get(key)
        references = references[int(index or 0)] if isinstance(references, list) and references else references
        if role == "model":
            references = (manifest.config.get("model") or {}).get("path")
        if ancestor_manifest := ancestor(parent, references, runs_dir):
            manifests[role] = ancestor_manifest
    return manifests


def ancestor(parent: Ancestor, reference: str | None, runs_dir: Path) -> Parent | None:
    run_folder = folder_of(parent.hash, runs_dir)
    if run_folder:
        return External(parent.name, parent.hash, run_folder)
    for word in (parent.name, reference):  # a snapshot by its name, what no run made as it was asked for
        with suppress(PipelineError):
            if word:
                return find(word, runs_dir, "checkpoint")
    return None


def chosen_by(selection: Manifest, runs_dir: Path) -> Parent | None:
    return ancestor(Ancestor(selection.facts["choice"]["checkpoint"], ""), None, runs_dir)


# ------------------------------------------------------------------------------------------------ the text


def card(
    name: str,
    body: str,
    made_of: Origin,
    *,
    tags: Sequence[str],
    relation: str,
    licence: str | None = None,
    results: Sequence[EvalResult] = (),
) -> str:
    """The text of a README.md: metadata, what is said of the model, how to load it.

    name: as from_pretrained is to be given it. relation: to the bases, as the Hub has it: finetune, adapter, merge.
    """
    from huggingface_hub import ModelCardData

    licences = set(made_of.licences.values())
    data = ModelCardData(
        base_model=list(made_of.bases) or None,
        base_model_relation=relation if made_of.bases else None,
        datasets=list(once(hub for _, hub, _ in made_of.sets if hub)) or None,
        language=list(made_of.languages) or None,
        license=licence or (licences.pop() if len(licences) == 1 else None),
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=list(tags),
        eval_results=list(results) or None,
        model_name=name if results else None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body.rstrip()}\n\n{loading(name, made_of, relation)}"


def relation_of(made_of: Origin, merged: bool) -> str:
    """What a whole model is to its bases: where experts that are on no Hub were merged, it descends from their base."""
    return "merge" if merged and len(made_of.bases) > 1 else "finetune"


def data_section(made_of: Origin) -> str:
    """The sets, each with its licence, which a licence of the model does not lift."""
    if not made_of.sets:
        return ""
    rows = [f"| {name} | {hub or 'a local file'} | {licence or 'not known'} |" for name, hub, licence in made_of.sets]
    return "\n".join(["## Trained on", "", "| set | on the Hub | licence |", "|---|---|---|", *rows]) + "\n"


def loading(name: str, made_of: Origin, relation: str) -> str:
    """How plain transformers loads it; of an adapter, PEFT."""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")',
    ]
    if relation == "adapter":
        base = made_of.bases[0] if len(made_of.bases) == 1 else "BASE"
        lines = ["from peft import PeftModel", *lines[:2]]
        lines += [
            f'base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")'
            + ("  # see above" * (base == "BASE"))
        ]
        lines += [f'model = PeftModel.from_pretrained(base, "{name}")']
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    return "\n".join([LOAD, "", "```python", *lines, "```"]) + "\n"


def body_of(model: Parent, runs_dir: Path) -> str | None:
    """What the card of a run says between its metadata and how to load it; a snapshot has its training's, a selection
    that of what it chose. None where there is none."""
    manifest = read_manifest(model.folder)
    if manifest and manifest.stage == "select":
        selected = chosen_by(manifest, runs_dir)
        return body_of(selected, runs_dir) if selected else None
    home = model.folder.parents[1] if model.folder.parent.name == SNAPSHOTS else model.folder
    if not (home / CARD).is_file():
        return None
    text = (home / CARD).read_text(encoding="utf-8")
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL).partition(LOAD)[0].strip() + "\n"
