"""The stored dtype of a model's weights, which eval.dtype=auto means.

Names are torch's: float32, bfloat16, float16. This module imports no large package and only reads
headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.config.merging import Merge
from pipeline.config.stages import MergeStage, SelectStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.hub.lock import read_lock
from pipeline.models.checkpoint import DTYPES, TORCH_NAMES, is_adapter, read_header, weight_files
from pipeline.models.names import is_computed
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, without_step

ADAPTED = "float32"  # a base and its LoRA adapter are read together as float32


def stored_dtype(model: Parent, runs_dir: Path) -> str | None:
    """Return the dtype of a model, or None if it cannot be determined on this machine.

    The configuration of a run has priority, then the lock file for a model on the Hub, then the
    headers of its files.

    Raises:
        PipelineError: For unreadable headers, and for weights of several dtypes.
    """
    model = without_step(model)
    if isinstance(model, Run):
        return _dtype_of_run(model)
    hub = getattr(model, "hub", None)
    if hub:
        locked = read_lock(runs_dir).models.get(hub, {}).get("dtypes")
        if locked:
            return one_dtype(locked, model.name)
    dtypes = dtypes_in(model.folder)
    if not dtypes:  # a snapshot whose files were deleted
        manifest = read_manifest(model.folder)
        if manifest and manifest.config.get("sft"):
            return trained_dtype(manifest.config["sft"])
    return one_dtype(dtypes, model.name)


def _dtype_of_run(run: Run[Any]) -> str | None:
    if isinstance(run.config, TrainStage):
        return trained_dtype(vars(run.config.sft))
    if isinstance(run.config, MergeStage):
        return merged_dtype(run.config.merge, run.parents, run.runs_dir)
    if not isinstance(run.config, SelectStage):
        return None
    dtypes = []
    for role, parent in run.parents.items():
        if role in ("base", "model"):
            continue
        if isinstance(parent, Run) and "checkpoint" in parent.parents:
            parent = parent.parents["checkpoint"]  # the snapshot behind an evaluation
        dtype = stored_dtype(parent, run.runs_dir)
        if dtype:
            dtypes.append(dtype)
    return one_dtype(dtypes, run.label)


def trained_dtype(sft: Mapping[str, Any]) -> str:
    """Return the dtype that a training's weights have when they are loaded."""
    if sft.get("adapter", "none") != "none":
        return ADAPTED
    return str(sft.get("save_dtype") or sft.get("weights", "float32"))


def merged_dtype(merge: Merge, parents: Mapping[str, Parent], runs_dir: Path) -> str | None:
    """Return the dtype of a merge.

    `merge.dtype` has priority. Otherwise it is the experts' dtype; if they differ, the base's dtype
    if there is a base, and float32 if there is none (merge/merge.py).
    """
    if merge.result_dtype():
        return merge.result_dtype()
    of_experts = {stored_dtype(parents[role], runs_dir) for role in merge.references()}
    if len(of_experts) == 1:
        return of_experts.pop()
    if "base" in parents:
        return stored_dtype(parents["base"], runs_dir)
    return "float32"


def dtypes_in(folder: Path) -> list[str]:
    """Return the sorted dtypes in the headers of a folder's weights; empty without weights.

    Raises:
        PipelineError: For headers that cannot be read.
    """
    if is_adapter(folder):
        return [ADAPTED]
    if not any(folder.glob("model.safetensors*")):
        return []
    dtypes: set[str] = set()
    for file in weight_files(folder):
        stat = file.stat()
        dtypes.update(_float_dtypes(file, stat.st_size, stat.st_mtime_ns))
    return sorted(dtypes)


@lru_cache(maxsize=1024)
def _float_dtypes(file: Path, *_: int) -> frozenset[str]:
    """Return torch's names of the float dtypes in a file.

    Buffers that are computed from the config do not count.
    """
    names = TORCH_NAMES | {"F64": "float64"}
    dtypes = set()
    for name, info in read_header(file).items():
        if info.dtype in names and not is_computed(name):
            dtypes.add(names[info.dtype])
    return frozenset(dtypes)


def one_dtype(dtypes: Iterable[str], subject: str) -> str | None:
    """Return the only distinct dtype, or None without dtypes.

    Raises:
        PipelineError: For several dtypes, and for float64.
    """
    distinct = sorted(set(dtypes))
    if len(distinct) > 1 or not DTYPES.keys() >= set(distinct):
        raise PipelineError(
            f"eval.dtype=auto, but {subject} holds {' and '.join(distinct)}. Give"
            " eval.dtype=float32."
        )
    if distinct:
        return distinct[0]
    return None
