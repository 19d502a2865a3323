"""The meaning of RUN: a folder, a name, a prefix, a snapshot, or a model on the Hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError, first_few, suggest
from pipeline.hub.lock import pinned_as, read_lock
from pipeline.models.checkpoint import read_json, refuse_pickles
from pipeline.models.files import ADAPTER_CONFIG, BESIDE_WEIGHTS, IDENTIFYING_SUFFIXES
from pipeline.runs.folders import finished_names, label_in
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import External, Folder, Parent
from pipeline.runs.state import read_state


def find_run(reference: str, runs_dir: Path, knob: str, revision: str | None = None) -> Parent:
    """Return the run or model that a RUN means.

    A RUN is a folder (has a / or starts with .), a run's name, or its unique beginning.
    hub:org/name[@REVISION] is a model on the Hub, package:folder a model of this package, and
    RUN@STEP a snapshot. A model that stage=prefetch locked is identified by its revision.

    Args:
        reference: The RUN.
        runs_dir: The folder of runs.
        knob: The key that has the RUN, for errors.
        revision: The revision of a model on the Hub, if the RUN has none.

    Raises:
        PipelineError: For no match, several matches, or a folder that is neither a finished run nor
            a model.
    """
    if not reference:
        raise PipelineError(
            f"{knob} is empty. Give {knob}=RUN, a finished run, a folder with a model, or"
            " hub:org/name."
        )
    if reference.startswith("hub:"):
        return find_on_hub(reference, runs_dir, knob, revision)
    if reference.startswith("package:"):
        folder = Path(__file__).parents[1] / reference.removeprefix("package:")
        return from_folder(folder, knob, runs_dir)
    name, at, step = reference.rpartition("@")
    if at and step.isdigit() and not Path(reference).is_dir():
        return find_snapshot(find_run(name, runs_dir, knob), int(step), knob)
    if "/" in reference or reference.startswith("."):
        return from_folder(Path(reference), knob, runs_dir)
    names = finished_names(runs_dir, reference)
    if reference in names:
        names = [reference]
    if len(names) == 1:
        return from_folder(runs_dir / names[0], knob, runs_dir)
    if names:
        matches = first_few(names, 6)
        raise PipelineError(
            f"{knob}={reference} means more than one run: {matches}. Give more of the name."
        )
    if (runs_dir / reference).is_dir():
        return from_folder(runs_dir / reference, knob, runs_dir)
    raise PipelineError(f"{knob}={reference}{why_not_found(reference, runs_dir, knob)}")


def find_on_hub(reference: str, runs_dir: Path, knob: str, revision: str | None) -> External:
    """Return the model that hub:org/name or hub:org/name@REVISION means."""
    address = reference.removeprefix("hub:")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", address):
        raise PipelineError(
            f"{knob}={reference} is not a model on the Hub. Write hub:org/name, or"
            " hub:org/name@REVISION."
        )
    model, _, named = address.partition("@")
    if named and knob == "model.path":
        raise PipelineError(
            f"{knob}={reference}: give the revision of a base as model.revision={named}."
        )
    hub = pinned_as(model, named or revision)
    identity, folder = reference, Path(pinned_as(model, named))
    locked = read_lock(runs_dir).model(hub)
    if locked:
        pinned, folder = locked
        if pinned:
            identity = f"hub:{model}@{pinned}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return External(Path(model).name, digest, folder, hub)


def why_not_found(reference: str, runs_dir: Path, knob: str) -> str:
    """Return why a RUN names no finished run, with similar names."""
    for record in map(read_state, sorted((runs_dir / ".work").glob("*/"))):
        name = str(record.get("name", ""))
        if name.startswith(reference):
            state = record.get("state")
            return f": {name} is not finished, it is {state}: see stage=status"
    names = finished_names(runs_dir)
    kind = "not a finished run"
    if knob == "data_root":
        names = [name for name in names if name.startswith("data-")]
        kind = "neither a folder nor a finished run"
    labels = dict.fromkeys(map(label_in, names))
    return f" is {kind} of {runs_dir}: {suggest(reference, labels)}"


def find_snapshot(training: Parent, step: int, knob: str) -> Parent:
    """Return the snapshot RUN@STEP.

    If stage=clean deleted it, its weights' digests still identify it.
    """
    folder = training.folder / "snapshots" / f"step-{step}"
    manifest = read_manifest(folder)
    if manifest is not None:
        return External(manifest.name, manifest.hash, folder)
    of_training = read_manifest(training.folder)
    hint = "it was trained without sft.snapshot_every"
    if of_training and of_training.snapshots:
        hint = f"there are {', '.join(of_training.snapshots)}"
    name = training.name
    raise PipelineError(f"{knob}={name}@{step}: {name} has no snapshot of that step; {hint}")


def from_folder(folder: Path, knob: str, runs_dir: Path) -> Parent:
    """Return the finished run, the snapshot or the model in a folder.

    Raises:
        PipelineError: If the folder has neither.
    """
    folder = Path(os.path.normpath(folder))
    if not folder.is_dir():
        raise PipelineError(
            f"{knob}={folder} is not a folder of {Path.cwd()}. Name a finished run, a folder with a"
            " model, or hub:org/name."
        )
    manifest = read_manifest(folder)
    if manifest is not None:
        return External(manifest.name, manifest.hash, folder)
    files = identifying_files(folder)
    has_config = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    has_weights = any(path.suffix == ".safetensors" for path in files)
    if not has_config or not has_weights:
        refuse_pickles(folder)
        raise PipelineError(
            f"{knob}={folder} has no {MANIFEST}, so it is not a finished run, "
            f"and no config.json or {ADAPTER_CONFIG} with *.safetensors, so it is not a model. Name"
            " a finished run, or a folder that save_pretrained wrote."
        )
    for path in files:
        if path.name.endswith("config.json"):
            read_json(path)  # raises for half a file, which libraries might accept
    return Folder(folder, tuple(files), runs_dir)


def identifying_files(folder: Path) -> list[Path]:
    """Return the files that identify a model.

    merges.txt and vocab.txt are only read without tokenizer.json.
    """
    texts: Sequence[str] = BESIDE_WEIGHTS
    if (folder / "tokenizer.json").is_file():
        texts = ()
    files = []
    for path in folder.iterdir():
        if path.suffix in IDENTIFYING_SUFFIXES or path.name in texts:
            files.append(path)
    return files
