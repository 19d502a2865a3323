"""Checks of sources from headers and a few rows: other models, other tokenizers, experts of another base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.formulas import refuse_not_finite, task_vectors, vector_pieces
from pipeline.merge.same_tokenizer import same_tokenizer
from pipeline.models.alike import same_architecture
from pipeline.models.arrays import matrix
from pipeline.models.checkpoint import DTYPES
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent
from pipeline.runs.unchanged import content_digest

ROWS = 8  # of a tensor, compared to detect experts of another base


def key_of(role: str) -> str:
    """The key that names a source: merge.math, merge.language[1], merge.experts[0]."""
    side, _, index = role.partition(".")
    return f"merge.experts[{role}]" if role.isdigit() else f"merge.{side}[{index}]" if index else f"merge.{role}"


def check_sources(
    sources: Mapping[str, Source],
    base: Source | None,
    key_for: Callable[[str], str] = key_of,
    vocabulary: str | None = None,
) -> None:
    """Raise PipelineError for incompatible sources, and for experts equal to `base` or not descended from it.

    vocabulary: see `same_tokenizer`.
    """
    (role, first), *further = sources.items()
    for source_role, source in (*sources.items(), *([("base", base)] if base else [])):
        if quantized := source.config.get("quantization_config"):
            quantization = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
            raise PipelineError(
                f"{key_for(source_role)}: config.json of {source.folder} has quantization_config ({quantization}), "
                "so its tensors are not the weights that it computes with: "
                "name the model before it was quantized, or dequantize it"
            )
    for name in first.names:
        if first.info(name).dtype not in DTYPES.values():
            raise PipelineError(f"{first.folder}: {name} is stored as {first.info(name).dtype}, not as a float")
    for other_role, source in further:
        same_architecture(first, source, (key_for(role), key_for(other_role)))
        same_tokenizer(first, source, (key_for(role), key_for(other_role)), vocabulary)
    if base is not None:
        same_architecture(first, base, (key_for(role), key_for("base")), dtypes=False)
        for expert_role, source in sources.items():
            check_descent(source, base, key_for(expert_role))


def refuse_another_base(expert: Adapted, base: Path, key: str) -> None:
    """Raise PipelineError for an adapter that was trained on another base than merge.base. key: of the expert."""
    if expert.base.folder.resolve() != base.resolve():
        raise PipelineError(
            f"{key}: {expert.folder} is an adapter of {expert.base.folder}, merge.base is {base}: merge experts of one "
            "base"
        )


def check_descent(expert: Source, base: Source, key: str) -> None:
    """Raise PipelineError for an expert equal to its base, and for one that shares no tensor with it and is further
    from it than zero is.

    Judged on values, so that a base in bfloat16 and an expert in float32 compare; on a few rows of each tensor, and on
    all of them before an expert is said to be equal.
    """
    if isinstance(expert, Adapted):
        refuse_another_base(expert, base.folder, key)
    moved, identical, change, size = False, 0, 0.0, 0.0
    for name in base.names:
        rows, columns = matrix(base.info(name).shape)
        distance = 0.0
        for row in sorted(set(np.linspace(0, rows - 1, ROWS).astype(int))) if columns else []:
            origin, (vector,) = task_vectors([expert], base, name, int(row), int(row) + 1)
            distance += float(np.square(vector, dtype=np.float64).sum())
            size += float(np.square(origin, dtype=np.float64).sum())
        if not np.isfinite(distance):
            refuse_not_finite([base, expert], [name])
        moved, identical, change = moved or distance > 0, identical + (distance == 0), change + distance
    if not np.isfinite(change):
        raise PipelineError(f"{key}: {expert.folder} is further from its base than float32 can tell: name another")
    if not moved and not any(
        vector.any() for name in base.names for *_, (vector,) in vector_pieces([expert], base, name)
    ):
        raise PipelineError(f"{key}: {expert.folder} is equal to its base {base.folder}: training changed nothing")
    if not identical and change > size:
        raise PipelineError(
            f"{key}: {expert.folder} does not descend from {base.folder}: no tensor is the same, and it is further "
            "from it than zeros are; give merge.base=RUN, the model it was trained from"
        )


def refuse_unmoved(parents: Mapping[str, Parent]) -> None:
    """Raise PipelineError for a run whose manifest records the weights it was trained from."""
    for role, parent in parents.items():
        manifest = read_manifest(parent.folder)
        base = manifest.parents.get("model") if manifest else None
        if role != "base" and base and base.content is not None and content_digest(parent) == base.content:
            raise PipelineError(f"{key_of(role)}: {parent.name} is equal to its base {base.name}: it learned nothing")
