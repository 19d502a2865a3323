"""The base that a model was trained from, and adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.stages import MergeStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import is_adapter, read_json
from pipeline.models.files import ADAPTER_CONFIG
from pipeline.runs.find import find_run, from_folder
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import Ancestor, home_of, read_manifest
from pipeline.runs.run import External, Parent, Run, without_step
from pipeline.runs.unchanged import content_digest


def one_base(bases: Sequence[tuple[str, Parent | None]], owner: str, remedy: str = "") -> Any:
    """Return the base that all experts were trained from; None if they were randomly initialised.

    Args:
        bases: (name, base) of each expert.
        owner: The owner of the experts, for errors.
        remedy: A further remedy, for errors.

    Raises:
        PipelineError: If the experts have different bases.
    """
    if len({base and base.hash for _, base in bases}) == 1:
        return bases[0][1]
    texts = []
    for name, base in bases:
        texts.append(f"{name} from {base.name if base else 'nothing'}")
    raise PipelineError(
        f"{owner} have different bases ({', '.join(texts)}). Name experts of one base{remedy}."
    )


def recorded_base(expert: Parent) -> Parent | None:
    """Return the base that a planned or finished training records, or None."""
    expert = without_step(expert)
    if isinstance(expert, Run):
        return expert.parents.get("model")
    manifest = read_manifest(expert.folder)
    base = manifest.parents.get("model") if manifest else None
    if base:
        return External(base.name, base.hash, expert.folder)
    return None


def declared_side(expert: Parent) -> str | None:
    """Return the side of a planned or finished training; None for other models."""
    expert = without_step(expert)
    if isinstance(expert, Run):
        if isinstance(expert.config, TrainStage):
            return expert.config.expert.side
        return None
    manifest = read_manifest(expert.folder)
    if manifest:
        return (manifest.config.get("expert") or {}).get("side")
    return None


def gives_adapter(expert: Parent) -> bool:
    """Return True if a run has, or will have, a LoRA adapter and not a whole model."""
    if isinstance(expert, Run) and isinstance(expert.config, TrainStage):
        return getattr(expert.config.sft, "adapter", "none") != "none"
    if isinstance(expert, Run) and isinstance(expert.config, MergeStage):
        merge = expert.config.merge
        exact = merge.exact_for_adapters() and merge.dtype is None
        experts = []
        for role, parent in expert.parents.items():
            if role != "base":
                experts.append(parent)
        return merge.form != "dense" and exact and all(map(gives_adapter, experts))
    return is_adapter(expert.folder)


def base_of(expert: Parent, runs_dir: Path, key: str = "merge.experts") -> Parent:
    """Return the base of an expert, by its plan, its manifest or its adapter_config.json.

    `key` is the key of the expert, for errors.
    """
    expert = without_step(expert)
    if isinstance(expert, Run):
        planned = expert.parents.get("model") or expert.parents.get("base")
        if planned is not None:
            return planned
    manifest = read_manifest(expert.folder)
    recorded = None
    path = revision = None
    if manifest and manifest.base:
        recorded = manifest.base
        run_folder = folder_of(recorded.hash, runs_dir)
        if run_folder:
            return as_recorded(from_folder(run_folder, key, runs_dir), recorded, expert.name)
        # a select run has the base in its facts
        model = manifest.config.get("model") or {"path": manifest.facts.get("base")}
        path, revision = model.get("path"), model.get("revision")
    if not path:
        knob = "base" if key == "checkpoint" else "merge.base"
        owner = f"{key}: {expert.name}"
        path, revision = _base_reference(expert, recorded, owner, f"{knob}=RUN")
    base = find_run(path, runs_dir, key, revision)
    if recorded:
        as_recorded(base, recorded, expert.name, path)
    if isinstance(base, External) and revision and not base.folder.is_dir():
        return replace(base, folder=Path(f"{base.folder}@{revision}"))
    return base


def base_folder(adapter: Path) -> Path:
    """Return the folder of an adapter's base (see `base_of`), or its name on the Hub."""
    expert = External(adapter.name, "", adapter)
    runs_dir = home_of(adapter).parent
    return base_of(expert, runs_dir, f"the base of {adapter.name}").folder


def as_recorded(base: Parent, recorded: Ancestor, owner: str, reference: str = "") -> Parent:
    """Return the base if it equals the base that a training or merge recorded.

    For a model on the Hub that was not locked, only the reference is compared. Digests of earlier
    versions are of another kind and are not compared.

    Args:
        base: The base.
        recorded: The recorded base.
        owner: The training or merge, for errors.
        reference: The RUN that the base was found by.

    Raises:
        PipelineError: If the base was changed since.
    """
    hashes = (base.hash, recorded.hash)
    kinds = {name.partition(":")[0] if ":" in name else "" for name in hashes}
    unlocked = hashlib.sha256(reference.encode()).hexdigest()
    is_comparable = len(kinds) == 1 and unlocked not in hashes
    content = content_digest(base)
    has_changed = content and recorded.content and content != recorded.content
    if has_changed or (is_comparable and base.hash != recorded.hash):
        raise PipelineError(
            f"{owner} was made from {recorded.name}, and {base.folder} has changed since. Restore"
            f" it, or make {owner} again with redo=true."
        )
    return base


def _base_reference(
    expert: Parent, recorded: Ancestor | None, owner: str, remedy: str
) -> tuple[str, str | None]:
    """Return the RUN of the base that an expert's adapter_config.json names, and its revision."""
    if (expert.folder / ADAPTER_CONFIG).is_file():
        base, revision = named_base(expert.folder)
        if base.is_dir():
            return (str(base.resolve()), None)
        return (f"hub:{base}", revision)
    if recorded:
        raise PipelineError(f"{owner}: its base {recorded.name} is not in runs_dir. Give {remedy}.")
    raise PipelineError(
        f"{owner}: its base is unknown, because it has no manifest and no {ADAPTER_CONFIG} (model"
        f" cards are not read). Name an sft run, or give {remedy}."
    )


def named_base(folder: Path) -> tuple[Path, str | None]:
    """Return the base that an adapter_config.json names.

    It is a folder, or org/name on the Hub with its revision.
    """
    settings = adapter_settings(folder)
    name = Path(settings.get("base_model_name_or_path") or "")
    for path in (name, folder / name):
        if str(name) != "." and (path / "config.json").is_file():
            return path, None
    if len(name.parts) == 2 and not name.is_absolute():
        return name, settings.get("revision")
    raise PipelineError(
        f"{folder} is an adapter whose base {name} is not here. Put it there, or correct"
        f" base_model_name_or_path in its {ADAPTER_CONFIG}; an evaluation takes eval.base=FOLDER"
        " too, a merge merge.base=RUN, a study base: FOLDER."
    )


def adapter_settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / ADAPTER_CONFIG)


def another_base(adapter: Path, base: str) -> str:
    """Return the base that an adapter names if it is not `base`, such as a copy in four bits.

    Otherwise return "".
    """
    named = str(adapter_settings(adapter).get("base_model_name_or_path") or "")
    if named == base.removeprefix("hub:") or Path(named).resolve() == Path(base).resolve():
        return ""
    return named
