"""A finished run's folder compared with its manifest: its contents, and whether a file was changed
since.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.models.checkpoint import read_header
from pipeline.runs.manifest import Malformed, Manifest, read_manifest
from pipeline.runs.run import Parent, Run

SMALL_BYTES = 2**26  # reports read files up to this size to compare digests


def content_digest(parent: Parent) -> str | None:
    """Return the content digest of a finished parent: over its tensors, or over the files of a data
    run.

    None for an unfinished run, and for an external model, whose hash already covers its content.
    """
    manifest = read_manifest(parent.folder)
    if manifest:
        return manifest.content
    return None


def next_attempt(run: Run) -> int:
    """Return the number of the next attempt: 1 for a run that was never finished. redo=true repeats
    a finished one.
    """
    manifest = read_manifest(run.folder)
    if manifest:
        return manifest.attempt + 1
    return 1


def check_unchanged(folder: Path, weights: bool = True) -> None:
    """Raise PipelineError for a finished run whose files are not those that its manifest lists.

    weights: whether its weights are needed; else they may have been deleted.
    """
    remedy = "rerun it with redo=true, or restore the file"
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if weights and manifest.weights.get("freed"):
        problem = "was deleted by stage=clean or a table with free_snapshots"
        raise PipelineError(f"{manifest.name} {problem}: train it again with redo=true")
    problem = describe_change(folder, manifest, weights=weights)
    if problem:
        raise PipelineError(f"{folder.name} was changed after it was finished: {problem}; {remedy}")


def describe_change(
    folder: Path, manifest: Manifest, up_to: float = math.inf, weights: bool = True
) -> str:
    """Which file of a finished run is missing or differs from its manifest; empty if none does.

    weights: whether weights that were deleted count.

    A file whose mtime changed but size did not, as after copying, is hashed again, if it has at
    most `up_to` bytes.
    """
    digests = manifest.weights.get("digests", {})
    for name, recorded in manifest.files.items():
        try:
            stat = (folder / name).stat()
        except OSError:
            if (manifest.weights.get("freed") or not weights) and name.endswith(".safetensors"):
                continue
            return f"{name} is gone"
        touched = stat.st_mtime_ns != recorded["mtime_ns"] and stat.st_size <= up_to
        if (
            stat.st_size != recorded["bytes"]
            or touched
            and not _same_file(folder / name, recorded, digests)
        ):
            return f"{name} differs"
    return ""


def damage_of(folder: Path) -> str:
    """Return what of a finished run is not as it was written: its manifest or a file with a digest;
    else empty.

    Every such file is read. Weights have no digest of the whole file: a merge verifies those of
    their tensors.
    """
    try:
        manifest = read_manifest(folder)
    except Malformed as error:
        return f"{folder.name}: {error}"
    for name, recorded in manifest.files.items() if manifest else ():
        file, problem = folder / name, ""
        if not file.is_file():
            problem = "gone"
        elif (
            "sha256" in recorded
            and recorded["bytes"] <= SMALL_BYTES
            and sha256(file) != recorded["sha256"]
        ):
            problem = "not the file that the run wrote"
        if problem and not name.endswith(".safetensors"):
            return (
                f"{folder.name}: {name} is {problem}; restore it, or rerun the run with redo=true"
            )
    return ""


def _same_file(path: Path, recorded: dict[str, Any], digests: dict[str, str]) -> bool:
    """Whether a file is the one in the manifest: by its sha256, or for weights by the digests of
    its tensors.
    """
    if "sha256" in recorded:
        return sha256(path) == recorded["sha256"]
    try:
        return all(digests.get(name) == info.digest() for name, info in read_header(path).items())
    except PipelineError:  # its header is broken, or it holds NaN
        return False


def known_by_tensors(folder: Path, digests: dict[str, str]) -> list[str]:
    """Names of the weight files whose tensors all have recorded digests, and so need no sha256 of
    the file.
    """
    files = folder.glob("*.safetensors")
    found = []
    for path in files:
        if digests.keys() >= read_header(path).keys():
            found.append(path.name)
    return found
