"""The dtype in which a model's weights are, or will be, stored: what eval.dtype=auto means.

Torch's names: float32, bfloat16, float16. Imports nothing heavy; reads headers alone.
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

    Raises PipelineError for unreadable headers, and for weights of several dtypes.
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
    # a snapshot whose files were deleted
    if dtypes:
        manifest = None
    else:
        manifest = read_manifest(model.folder)
    sft = None
    if manifest:
        sft = manifest.config.get("sft")
    if sft:
        return trained_dtype(sft)
    return one_dtype(dtypes, model.name)


def _dtype_of_run(run: Run[Any]) -> str | None:
    if isinstance(run.config, TrainStage):
        return trained_dtype(vars(run.config.sft))
    if isinstance(run.config, MergeStage):
        return merged_dtype(run.config.merge, run.parents, run.runs_dir)
    if isinstance(run.config, SelectStage):  # a snapshot itself, or the evaluation of one
        candidates = []
        for role, parent in run.parents.items():
            if role not in ("base", "model"):
                candidates.append(parent)
        models = [
            (
                parent.parents["checkpoint"]
                if isinstance(parent, Run) and "checkpoint" in parent.parents
                else parent
            )
            for parent in candidates
        ]
        return one_dtype(
            filter(None, [stored_dtype(parent, run.runs_dir) for parent in models]), run.label
        )
    return None


def trained_dtype(sft: Mapping[str, Any]) -> str:
    """Return the dtype that a training's weights have when they are loaded."""
    adapted = sft.get("adapter", "none") != "none"
    if adapted:
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
    of_base = stored_dtype(parents["base"], runs_dir) if "base" in parents else "float32"
    if of_base:
        return merge.dtype_of_several([of_base])
    return None


def dtypes_in(folder: Path) -> list[str]:
    """Return the sorted dtypes of a folder's weights from the headers of its files; empty without
    weights.

    Raises PipelineError for headers that cannot be read.
    """
    if is_adapter(folder):
        return [ADAPTED]
    if not any(folder.glob("model.safetensors*")):
        return []
    stats = [(file, file.stat()) for file in weight_files(folder)]
    return sorted(
        {
            dtype
            for file, stat in stats
            for dtype in _float_dtypes(file, stat.st_size, stat.st_mtime_ns)
        }
    )


@lru_cache(maxsize=1024)
def _float_dtypes(file: Path, *_: int) -> frozenset[str]:
    """Torch's names of the float dtypes in a file.

    Buffers that are computed from the config do not count.
    """
    names = TORCH_NAMES | {"F64": "float64"}
    stored = set()
    for name, info in read_header(file).items():
        if not is_computed(name):
            stored.add(info.dtype)
    return frozenset(names[dtype] for dtype in stored if dtype in names)


def one_dtype(dtypes: Iterable[str], subject: str) -> str | None:
    """Return the only one of `dtypes`;

    None if there is none. Raises PipelineError for several, and for float64.
    """
    distinct = sorted(set(dtypes))
    if len(distinct) > 1 or not DTYPES.keys() >= set(distinct):
        raise PipelineError(
            f"eval.dtype=auto, but {subject} holds {' and '.join(distinct)}: give"
            " eval.dtype=float32"
        )
    if distinct:
        return distinct[0]
    return None
