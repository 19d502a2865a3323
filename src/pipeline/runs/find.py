"""What RUN means: a folder, a name, a prefix, a snapshot, a model on the Hub or in the package."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from pipeline.errors import PipelineError, close_matches
from pipeline.hub.addresses import REPOSITORY
from pipeline.hub.lock import pinned_as, read_lock
from pipeline.models.checkpoint import read_json, refuse_pickles
from pipeline.models.files import ADAPTER_CONFIG, BESIDE_WEIGHTS, IDENTIFYING_SUFFIXES
from pipeline.runs.folders import finished_names
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import External, Folder, Parent
from pipeline.runs.state import read_state
from pipeline.text import first_few


def find_run(reference: str, runs_dir: Path, knob: str, revision: str | None = None) -> Parent:
    """Return the run or model that a RUN means: a folder (has a / or starts with .), a run's name,
    or a unique beginning.

    hub:org/name[@REVISION] is a model on the Hub, package:folder a model shipped with this package,
    RUN@STEP a snapshot. A model that stage=prefetch locked is identified by its revision.

    Raises:
        PipelineError: no match, several matches, or a folder that is neither a finished run nor a
            model.
    """
    if not reference:
        raise PipelineError(
            f"{knob} is empty: give {knob}=RUN, a finished run, a folder with a model, or"
            " hub:org/name"
        )
    if reference.startswith("hub:"):
        name_given, _, named = reference.removeprefix("hub:").partition("@")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", reference.removeprefix("hub:")):
            raise PipelineError(
                f"{knob}={reference} is not a model on the Hub: write hub:org/name, or"
                " hub:org/name@REVISION"
            )
        if named and knob == "model.path":
            raise PipelineError(
                f"{knob}={reference}: give the revision of a base as model.revision={named}"
            )
        name, hub = pinned_as(name_given, named), pinned_as(name_given, named or revision)
        pinned, folder = read_lock(runs_dir).model(hub) or (None, Path(name))
        if pinned:
            identity = f"hub:{name_given}@{pinned}"
        else:
            identity = reference
        return External(
            Path(name_given).name, hashlib.sha256(identity.encode()).hexdigest(), folder, hub
        )
    if reference.startswith("package:"):
        return from_folder(
            Path(__file__).parents[1] / reference.removeprefix("package:"), knob, runs_dir
        )
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
        raise PipelineError(
            f"{knob}={reference} means more than one run: {', '.join(first_few(names, 6))}; give"
            " more of the name"
        )
    if (runs_dir / reference).is_dir():
        return from_folder(runs_dir / reference, knob, runs_dir)
    for record in map(read_state, sorted((runs_dir / ".work").glob("*/"))):
        if str(record.get("name", "")).startswith(reference):
            raise PipelineError(
                f"{knob}={reference}: {record['name']} is not finished, it is"
                f" {record.get('state')}: see stage=show run={record['name']}"
            )
    of_data = knob == "data_root"
    candidates = [
        name for name in finished_names(runs_dir) if name.startswith("data-") or not of_data
    ]
    if of_data:
        kind = f"neither a folder nor a finished run of {runs_dir}"
    else:
        kind = f"not a finished run of {runs_dir}"
    raise PipelineError(f"{knob}={reference} is {kind}{suggest_names(reference, candidates)}")


def find_snapshot(training: Parent, step: int, knob: str) -> Parent:
    """Return the snapshot RUN@STEP.

    If stage=clean deleted it, its weights' digests still identify it.
    """
    folder = training.folder / "snapshots" / f"step-{step}"
    manifest = read_manifest(folder)
    if manifest is None:
        training_manifest = read_manifest(training.folder)
        snapshots = {}
        if training_manifest:
            snapshots = training_manifest.snapshots
        hint = "it was trained without sft.snapshot_every"
        if snapshots:
            hint = f"there are {', '.join(snapshots)}"
        raise PipelineError(
            f"{knob}={training.name}@{step}: {training.name} has no snapshot of that step; {hint}"
        )
    return External(manifest.name, manifest.hash, folder)


def suggest_names(word: str, names: list[str]) -> str:
    """'; did you mean a, b' where names are similar to the word, the scores of a model that is not
    there, else '; there are' with the first names.
    """
    scored = []
    for name in names:
        if name.startswith("eval-") and f"-{word}-" in name:
            scored.append(name)
    if scored:
        shown = ", ".join(scored[:4])
        return (
            f"; its scores are {shown}: give one of these (what was merged in memory is written by"
            " stage=merge)"
        )
    beginnings = {
        name[: len(word)]: name for name in reversed(names)
    }  # a RUN may be the beginning of a name
    close = close_matches(word, names, cutoff=0.5) or [
        beginnings[prefix] for prefix in close_matches(word, beginnings, cutoff=0.7)
    ]
    if close:
        return f"; did you mean {', '.join(close)}"
    return f"; there are {', '.join(first_few(names, 8)) or 'none'}"


def from_folder(folder: Path, knob: str, runs_dir: Path) -> Parent:
    folder = Path(os.path.normpath(folder))
    # as it is typed
    dot = "./"
    if folder.is_absolute() or folder.parts[:1] == ("..",):
        dot = ""
    if not folder.is_dir():
        could_be_hub = re.fullmatch(REPOSITORY, str(folder)) and not Path(folder.parts[0]).is_dir()
        hint = ""
        if could_be_hub:
            hint = f", or hub:{folder} for a model on the Hub"
        if folder.is_absolute():
            where = ""
        else:
            where = f" of {Path.cwd()}"
        raise PipelineError(
            f"{knob}={dot}{folder} is not a folder{where}: name a finished run, or a folder with a"
            f" model{hint}"
        )
    manifest = read_manifest(folder)
    if manifest is not None:
        return External(manifest.name, manifest.hash, folder)
    texts = (
        () if (folder / "tokenizer.json").is_file() else BESIDE_WEIGHTS
    )  # then merges.txt and vocab.txt are read
    files = []
    for path in folder.iterdir():
        if path.suffix in IDENTIFYING_SUFFIXES or path.name in texts:
            files.append(path)
    has_config = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if not has_config or not any(path.suffix == ".safetensors" for path in files):
        refuse_pickles(folder)
        raise PipelineError(
            f"{knob}={dot}{folder} has no {MANIFEST}, so it is not a finished run, "
            f"and no config.json or {ADAPTER_CONFIG} with *.safetensors, so it is not a model"
        )
    for path in files:
        if path.name.endswith(
            "config.json"
        ):  # which libraries read, whatever they make of half a file
            read_json(path)
    return Folder(folder, tuple(files), runs_dir)
