"""Adopting a finished run: one whose parents differ, but whose inputs, as far as its stage reads them, are the same.

The hash of a run covers those of its parents, so a data set that is built again because one more benchmark was added
gives all runs below it new hashes, though its rows may be the same. Such a run need not be computed again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.files import link_or_copy
from pipeline.hub.addresses import without_credentials
from pipeline.models.files import ADAPTER_CONFIG, DECIDING
from pipeline.runs.folders import finished_names
from pipeline.runs.manifest import SNAPSHOTS, Ancestor, Malformed, Manifest, read_manifest
from pipeline.runs.run import Parent, Run, Snapshot, recorded_config
from pipeline.runs.unchanged import content_digest, describe_change

STAGES = ("cpt", "sft", "merge", "eval")  # runs of other stages take no time and are not adopted
ROWS = ("train.jsonl", "validation.jsonl")  # what a training reads of its data run


def adoptable_run(run: Run) -> Manifest | None:
    """The finished run whose files `run` may adopt; None where it has to be computed, or with redo=true."""
    return equal_run(run) if run.config.stage in STAGES and not run.config.redo else None


def equal_run(run: Run, assumed: Collection[str] = ()) -> Manifest | None:
    """A finished run that `run` would repeat: same stage, version and configuration, and equal inputs. Inputs are the
    rows of a data run, the weights of a model and the files that decide its answers; any other parent must have the
    same hash.

    assumed: hashes of parents that are not finished yet and count as equal. Whether a data run with other parents
    equals a finished one is known once it is computed.
    """
    for name in finished_names(run.runs_dir, f"{run.label}-"):
        folder = run.runs_dir / name
        with suppress(Malformed):  # reported where runs are listed
            manifest = read_manifest(folder)
            if manifest is None or manifest.hash == run.hash or not _same_configuration(run, manifest):
                continue
            if run.config.stage == "data":
                return manifest
            is_equal = all(_same_input(role, parent, manifest, run, assumed) for role, parent in run.parents.items())
            if is_equal and not _has_freed_weights(manifest) and not describe_change(folder, manifest):
                return manifest
    return None


def adopt_run(run: Run, manifest: Manifest, attempt: int) -> None:
    """Fill the run's work folder with hard links to the files of a finished run, and a manifest with adopted_from.

    Costs, versions and machine stay those of the run that computed the files.
    """
    shutil.rmtree(run.work)
    run.work.mkdir()
    for name in manifest.files:
        (run.work / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(run.runs_dir / manifest.name / name, run.work / name)
    source = manifest.adopted_from or {"name": manifest.name, "hash": manifest.hash}
    replace(
        manifest, name=run.name, hash=run.hash, decided_by=run.decided_by, config=recorded_config(run.config),
        parents={
            role: Ancestor(parent.name, parent.hash, content_digest(parent)) for role, parent in run.parents.items()
        },
        attempt=attempt, adopted_from=source,
    ).write(run.work)  # fmt: skip


def _same_configuration(run: Run, manifest: Manifest) -> bool:
    """Whether a finished run differs from `run` at most in the hashes of its parents."""
    requested, finished = (
        {**decided, "parents": sorted(decided.get("parents", ()))} for decided in (run.decided_by, manifest.decided_by)
    )
    return json.dumps(without_credentials(requested), sort_keys=True) == json.dumps(finished, sort_keys=True)


def _same_input(role: str, parent: Parent, manifest: Manifest, run: Run, assumed: Collection[str]) -> bool:
    recorded_parent = manifest.parents[role]
    if (parent.run.hash if isinstance(parent, Snapshot) else parent.hash) in assumed:
        return True
    if parent.hash == recorded_parent.hash:
        return content_digest(parent, recorded_parent.content) == recorded_parent.content
    current = read_manifest(parent.folder)
    earlier = read_manifest(_ancestor_folder(recorded_parent, run.runs_dir))
    if current is None or earlier is None:
        return False
    if earlier.hash != recorded_parent.hash or earlier.content != recorded_parent.content:
        return False
    digests = _digests_read(role, current)
    return bool(digests) and digests == _digests_read(role, earlier)


def _ancestor_folder(parent: Ancestor, runs_dir: Path) -> Path:
    name, at, step = parent.name.rpartition("@")
    return runs_dir / name / SNAPSHOTS / f"step-{step}" if at else runs_dir / parent.name


def _digests_read(role: str, parent: Manifest) -> dict[str, Any]:
    """Digests of what a stage reads of a parent; empty where the parent counts as a whole."""
    if role == "data":
        return {name: parent.files[name]["sha256"] for name in ROWS if name in parent.files}
    if parent.weights_root is None:
        return {}
    digests = {name: parent.files[name]["sha256"] for name in DECIDING if name in parent.files}
    if ADAPTER_CONFIG in digests:
        digests["base"] = parent.base and parent.base.hash
    return {"weights": parent.weights_root, **digests}


def _has_freed_weights(manifest: Manifest) -> bool:
    return any(weights.get("freed") for weights in (manifest.weights, *manifest.snapshots.values()))
