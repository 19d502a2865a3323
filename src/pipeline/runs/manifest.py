"""The manifest of a finished run: written last, read here and nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

MANIFEST = "manifest.json"


def snapshot_hash(run_hash: str, step: int) -> str:
    return hashlib.sha256(f"{run_hash}@{step}".encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------- manifests


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, or None. A broken one is refused: nobody but us writes it.

    A snapshot's is that of its training, with the snapshot's own name, weights and files.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return _snapshot_manifest(folder) if folder.parent.name == "snapshots" else None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PipelineError(f"{path} is not readable JSON: remove the folder or restore it") from error
    if not isinstance(manifest, dict) or "facts" not in manifest:
        raise PipelineError(f"{path} is no manifest of this program: name another folder, or move this one away")
    return manifest


def _snapshot_manifest(folder: Path) -> dict[str, Any] | None:
    training, step = read_manifest(folder.parent.parent), folder.name.removeprefix("step-")
    if training is None or step not in training["facts"].get("snapshots", {}):
        return None
    inside = f"{folder.parent.name}/{folder.name}/"
    files = {name.removeprefix(inside): file for name, file in training["files"].items() if name.startswith(inside)}
    return {
        **training, "name": f"{training['name']}@{step}", "hash": snapshot_hash(training["hash"], int(step)),
        "facts": {**training["facts"], "weights": training["facts"]["snapshots"][step]}, "files": files,
    }  # fmt: skip


def finished(runs_dir: Path) -> Iterator[dict[str, Any]]:
    """The manifests of all finished runs, oldest first."""
    found = [read_manifest(path.parent) for path in runs_dir.glob(f"*/{MANIFEST}")]
    yield from sorted((manifest for manifest in found if manifest), key=lambda manifest: manifest["started"])
