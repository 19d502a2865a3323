"""Checks of sources from headers and a few rows: other models, other tokenizers, experts of another base."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.formulas import refuse_not_finite, squared_norm, vector_pieces
from pipeline.merge.same_tokenizer import same_tokenizer
from pipeline.models.alike import POSITIONS, same_architecture
from pipeline.models.anatomy import towers
from pipeline.models.checkpoint import DTYPES, text_settings
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent
from pipeline.runs.unchanged import content_digest


def key_of(role: str) -> str:
    """The key that names a source: merge.math, merge.language[1], merge.experts[0]."""
    side, _, index = role.partition(".")
    return f"merge.experts[{role}]" if role.isdigit() else f"merge.{side}[{index}]" if index else f"merge.{role}"


def check_sources(
    sources: Mapping[str, Source], key_for: Callable[[str], str] = key_of, vocabulary: str | None = None
) -> None:
    """Raise PipelineError for sources that do not fit, and for experts equal to the source `base`, or of another base.

    vocabulary: see `same_tokenizer`.
    """
    for role, source in sources.items():
        if quantized := source.config.get("quantization_config"):
            quantization = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
            raise PipelineError(
                f"{key_for(role)}: config.json of {source.folder} has quantization_config ({quantization}), "
                "so its tensors are not the weights that it computes with: "
                "name the model before it was quantized, or dequantize it"
            )
        for name, info in source.infos.items():
            if info.dtype not in DTYPES.values():
                raise PipelineError(f"{source.folder}: {name} is stored as {info.dtype}, not as a float")
    experts = {role: source for role, source in sources.items() if role != "base"}
    first_role, first = next(iter(experts.items()))
    for role, source in sources.items():
        keys = key_for(first_role), key_for(role)
        same_architecture(first, source, keys)
        if role in experts:
            same_tokenizer(first, source, keys, vocabulary)
    for role, source in experts.items() if "base" in sources else ():
        check_descent(source, sources["base"], key_for(role))


def as_decoders(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return models that also see as their decoders if another source is a decoder alone, as trained from one."""
    opened = dict(sources)
    if all("text_config" in source.config for source in opened.values()):
        return opened
    for role, source in sources.items():
        if "text_config" in source.config and not isinstance(source, Adapted):
            beside = set(towers(source.names))
            infos = {name: info for name, info in source.infos.items() if name not in beside}
            opened[role] = replace(source, infos=infos, config=source.config["text_config"])
    return opened


def settle_positions(giver: Source, sources: Mapping[str, Source]) -> str:
    """Give a merge's configuration the base's number of positions, without a base the smallest of its experts.

    Returns:
        A sentence for the plan and the card if the sources differ in it, otherwise nothing.
    """
    counts = {role: text_settings(source.config).get(POSITIONS) for role, source in sources.items()}
    known = {role: count for role, count in counts.items() if isinstance(count, int)}
    if len(set(known.values())) < 2:
        return ""
    chosen = known.get("base", min(known.values()))
    giver.config = copy.deepcopy(giver.config)
    giver.config.get("text_config", giver.config)[POSITIONS] = chosen
    listed = ", ".join(f"{role} {count}" for role, count in known.items())
    return f"  {POSITIONS}={chosen}: the sources have {listed}"


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

    Judged on values, so that a base in bfloat16 and an expert in float32 compare; on the first rows of each tensor, and
    on all of them before an expert is said to be equal.
    """
    if isinstance(expert, Adapted):
        refuse_another_base(expert, base.folder, key)
    changes, size = [], 0.0
    for name in base.names:
        for *_, origin, (vector,) in itertools.islice(vector_pieces([expert], base, name), 1):
            changes.append(squared_norm(vector))
            size += squared_norm(origin)
            if not np.isfinite(changes[-1]):
                refuse_not_finite([base, expert], [name])
                raise PipelineError(f"{key}: {expert.folder} is further from its base than float32 can tell: {name}")
    if not any(changes) and not any(
        vector.any() for name in base.names for *_, (vector,) in vector_pieces([expert], base, name)
    ):
        raise PipelineError(f"{key}: {expert.folder} is equal to its base {base.folder}: training changed nothing")
    if all(changes) and sum(changes) > size:
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
