"""What a finished run's folder holds, against its manifest: its contents, and whether a file was changed since."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.models.checkpoint import KIND, digest_tensors, digests_in, kind_of, read_header, weights_root
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Parent, Run


def content(parent: Parent, comparable: str | None = None) -> str | None:
    """The second identity of a finished parent: the digest over its tensors, of a data run over its files.

    None for what is not made yet, and for what no run of ours made, which is known by its content alone. `like`: what
    it is to be compared with; where that is of another kind, as runs of earlier versions have sha256, the tensors are
    hashed again in that kind, and None stands for weights that are not there, as freed ones.
    """
    manifest = read_manifest(parent.folder)
    if manifest and comparable and manifest.weights_root and kind_of(manifest.content) != kind_of(comparable):
        return _root(parent.folder, kind_of(comparable), manifest.content)
    return manifest.content if manifest else None


@lru_cache(maxsize=256)
def _root(folder: Path, kind: str, _content: str) -> str | None:
    """The root over the tensors of a run in a kind that is not the one on record, `_content`."""
    adapter = (folder / ADAPTER_CONFIG).is_file()
    try:
        digests = digests_in(folder / ADAPTER_WEIGHTS, kind) if adapter else digest_tensors(folder, kind)
    except PipelineError:
        return None
    return weights_root(digests, kind)


def next_attempt(run: Run) -> int:
    """1 for a run that was never finished; redo=true makes a finished one again, as a new attempt."""
    manifest = read_manifest(run.folder)
    return manifest.attempt + 1 if manifest else 1


def check_unchanged(folder: Path) -> None:
    """Refuse a finished run whose files are not those that its manifest lists."""
    remedy = "make it again with redo=true, or restore the file"
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if manifest.weights.get("freed"):
        by = "was freed by stage=clean or a table with free_snapshots"
        raise PipelineError(f"{manifest.name} {by}: train it again with redo=true")
    if problem := changed(folder, manifest):
        raise PipelineError(f"{folder.name} was changed after it was finished: {problem}; {remedy}")


def changed(folder: Path, manifest: Manifest, up_to: float = math.inf) -> str:
    """Which file of a finished run is gone or differs from its manifest; empty where none does.

    A file whose time alone moved, as copying does, is read again, if it has `up_to` bytes at most.
    """
    for name, was in manifest.files.items():
        try:
            stat = (folder / name).stat()
        except OSError:
            if manifest.weights.get("freed") and name.endswith(".safetensors"):
                continue
            return f"{name} is gone"
        moved = stat.st_mtime_ns != was["mtime_ns"] and stat.st_size <= up_to
        if stat.st_size != was["bytes"] or moved and not _same(folder / name, was, manifest.weights.get("digests", {})):
            return f"{name} differs"
    return ""


def _same(path: Path, was: dict[str, Any], digests: dict[str, str]) -> bool:
    """Whether a file is what a manifest lists: by its sha256, or a file of weights by the digests of its tensors."""
    if "sha256" in was:
        return sha256(path) == was["sha256"]
    try:
        kind = kind_of(next(iter(digests.values()), KIND))
        return all(digests.get(name) == digest for name, digest in digests_in(path, kind).items())
    except PipelineError:  # its header is broken, or it holds NaN
        return False


def known_by_tensors(folder: Path, digests: dict[str, str]) -> list[str]:
    """The files of weights all of whose tensors have a digest on record: they need none of their own."""
    files = folder.glob("*.safetensors")
    return [path.name for path in files if digests.keys() >= read_header(path).keys()]
