"""A finished run's folder compared with its manifest: its contents, and changed files."""

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
    """Return the content digest of a finished parent: over its tensors, or the files of a data run.

    None for an unfinished run, and for an external model, whose hash already covers its content.
    """
    manifest = read_manifest(parent.folder)
    if manifest:
        return manifest.content
    return None


def next_attempt(run: Run) -> int:
    """Return the number of the next attempt: 1 for a run that was never finished.

    redo=true repeats a finished run.
    """
    manifest = read_manifest(run.folder)
    if manifest:
        return manifest.attempt + 1
    return 1


def check_unchanged(folder: Path, weights: bool = True) -> None:
    """Raise PipelineError for a finished run whose files differ from its manifest.

    Without `weights`, deleted weights are accepted.
    """
    remedy = "rerun it with redo=true, or restore the file"
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if weights and manifest.weights.get("freed"):
        problem = "was deleted by stage=clean or a table with free_snapshots"
        raise PipelineError(f"{manifest.name} {problem}. Train it again with redo=true.")
    problem = describe_change(folder, manifest, weights=weights)
    if problem:
        raise PipelineError(f"{folder.name} was changed after it was finished: {problem}; {remedy}")


def describe_change(
    folder: Path,
    manifest: Manifest,
    up_to: float = math.inf,
    weights: bool = True,
    all_files: bool = False,
) -> str:
    """Return which file of a finished run is missing or differs from its manifest, or "".

    A file with another mtime and the same size, as after copying, is hashed again.

    Args:
        folder: The folder of the run.
        manifest: Its manifest.
        up_to: The largest size of a file that is hashed, in bytes.
        weights: True if deleted weights count.
        all_files: True to hash files of the same mtime, too.
    """
    digests = manifest.weights.get("digests", {})
    may_be_deleted = not weights or manifest.weights.get("freed")
    for name, recorded in manifest.files.items():
        try:
            stat = (folder / name).stat()
        except OSError:
            if may_be_deleted and name.endswith(".safetensors"):
                continue
            return f"{name} is gone"
        if stat.st_size != recorded["bytes"]:
            return f"{name} differs"
        is_read = all_files or stat.st_mtime_ns != recorded["mtime_ns"]
        if is_read and stat.st_size <= up_to and not _same_file(folder / name, recorded, digests):
            return f"{name} differs"
    return ""


def damage_of(folder: Path) -> str:
    """Return what was changed in a finished run after it was written, or "".

    Its manifest and every small file are read. A merge verifies the digests of large weights.
    """
    try:
        manifest = read_manifest(folder)
    except Malformed as error:
        return f"{folder.name}: {error}"
    if manifest is None:
        return ""
    problem = describe_change(folder, manifest, SMALL_BYTES, weights=False, all_files=True)
    if problem:
        problem = f"{folder.name}: {problem}. Restore it, or rerun the run with redo=true."
    return problem


def _same_file(path: Path, recorded: dict[str, Any], digests: dict[str, str]) -> bool:
    """Return True if a file has the content that the manifest records.

    The sha256 decides, or for weights the digests of the tensors.
    """
    if "sha256" in recorded:
        return sha256(path) == recorded["sha256"]
    try:
        header = read_header(path)
        return all(digests.get(name) == info.digest() for name, info in header.items())
    except PipelineError:  # its header is broken, or it has NaN
        return False


def known_by_tensors(folder: Path, digests: dict[str, str]) -> list[str]:
    """Return the weight files whose tensors all have recorded digests.

    These files need no sha256.
    """
    names = []
    for path in folder.glob("*.safetensors"):
        if digests.keys() >= read_header(path).keys():
            names.append(path.name)
    return names
