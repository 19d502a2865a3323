"""Check that sources fit each other: architecture, shapes, tokenizer and the base of adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.same_tokenizer import same_tokenizer
from pipeline.models.alike import POSITIONS, same_architecture
from pipeline.models.anatomy import towers
from pipeline.models.checkpoint import DTYPES, text_settings


def key_of(role: str) -> str:
    """Return the key that names a source: merge.math, merge.language[1], merge.experts[0]."""
    side, _, index = role.partition(".")
    if role.isdigit():
        return f"merge.experts[{role}]"
    if index:
        return f"merge.{side}[{index}]"
    return f"merge.{role}"


def check_sources(sources: Mapping[str, Source], key_for: Callable[[str], str] = key_of) -> None:
    """Raise PipelineError for sources whose tensors or tokenizers do not fit each other."""
    for role, source in sources.items():
        quantized = source.config.get("quantization_config")
        if quantized:
            if isinstance(quantized, dict):
                quantization = quantized.get("quant_method", quantized)
            else:
                quantization = quantized
            raise PipelineError(
                f"{key_for(role)}: config.json of {source.folder} has quantization_config"
                f" ({quantization}), so its tensors are not the weights that it computes with: name"
                " the model before it was quantized, or dequantize it"
            )
        for name, info in source.infos.items():
            if info.dtype not in DTYPES.values():
                raise PipelineError(
                    f"{source.folder}: {name} is stored as {info.dtype}, not as a float"
                )
    experts = {}
    for role, source in sources.items():
        if role != "base":
            experts[role] = source
    first_role, first = next(iter(experts.items()))
    for role, source in sources.items():
        keys = key_for(first_role), key_for(role)
        same_architecture(first, source, keys)
        if role in experts:
            same_tokenizer(first, source, keys)
        if "base" in sources and isinstance(source, Adapted):
            refuse_another_base(source, sources["base"].folder, key_for(role))


def as_decoders(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return models that also see as their decoders if another source is a decoder alone, as
    trained from one.
    """
    opened = dict(sources)
    if all("text_config" in source.config for source in opened.values()):
        return opened
    for role, source in sources.items():
        if "text_config" in source.config and not isinstance(source, Adapted):
            beside = set(towers(source.names))
            infos = {}
            for name, info in source.infos.items():
                if name not in beside:
                    infos[name] = info
            opened[role] = replace(source, infos=infos, config=source.config["text_config"])
    return opened


def settle_positions(giver: Source, sources: Mapping[str, Source]) -> str:
    """Give a merge's configuration the base's number of positions, without a base the smallest of
    its experts.

    Returns:
        A sentence for the plan and the card if the sources differ in it, otherwise nothing.
    """
    counts = {role: text_settings(source.config).get(POSITIONS) for role, source in sources.items()}
    known = {}
    for role, count in counts.items():
        if isinstance(count, int):
            known[role] = count
    if len(set(known.values())) < 2:
        return ""
    chosen = known.get("base", min(known.values()))
    giver.config = copy.deepcopy(giver.config)
    giver.config.get("text_config", giver.config)[POSITIONS] = chosen
    listed = ", ".join(f"{role} {count}" for role, count in known.items())
    return f"  {POSITIONS}={chosen}: the sources have {listed}"


def refuse_another_base(expert: Adapted, base: Path, key: str) -> None:
    """Raise PipelineError for an adapter that was trained on another base than merge.base.

    key: of the expert.
    """
    if expert.base.folder.resolve() != base.resolve():
        raise PipelineError(
            f"{key}: {expert.folder} is an adapter of {expert.base.folder}, merge.base is {base}:"
            " merge experts of one base"
        )
