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
    """Return the key that names a source, such as merge.math or merge.experts[0]."""
    if role.isdigit():
        return f"merge.experts[{role}]"
    side, _, index = role.partition(".")
    if index:
        return f"merge.{side}[{index}]"
    return f"merge.{role}"


def check_sources(sources: Mapping[str, Source], key_for: Callable[[str], str] = key_of) -> None:
    """Raise PipelineError if the sources' tensors or tokenizers do not fit each other."""
    for role, source in sources.items():
        _refuse_quantized(source, key_for(role))
    experts = experts_of(sources)
    first_role, first = next(iter(experts.items()))
    for role, source in sources.items():
        keys = key_for(first_role), key_for(role)
        same_architecture(first, source, keys)
        if role in experts:
            same_tokenizer(first, source, keys)
        if "base" in sources and isinstance(source, Adapted):
            refuse_another_base(source, sources["base"].folder, key_for(role))


def experts_of(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources without the base."""
    experts = dict(sources)
    experts.pop("base", None)
    return experts


def _refuse_quantized(source: Source, key: str) -> None:
    quantization = source.config.get("quantization_config")
    if quantization:
        if isinstance(quantization, dict):
            quantization = quantization.get("quant_method", quantization)
        raise PipelineError(
            f"{key}: config.json of {source.folder} has quantization_config ({quantization}), so"
            " its tensors are not its weights. Name the model before it was quantized, or"
            " dequantize it."
        )
    for name, info in source.infos.items():
        if info.dtype not in DTYPES.values():
            raise PipelineError(
                f"{source.folder}: {name} is stored as {info.dtype}, which is not supported. Save"
                f" it as {', '.join(DTYPES)}."
            )


def as_decoders(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return models that also see as their decoders, if another source is only a decoder."""
    opened = dict(sources)
    if all("text_config" in source.config for source in opened.values()):
        return opened
    for role, source in sources.items():
        if "text_config" not in source.config or isinstance(source, Adapted):
            continue
        infos = dict(source.infos)
        for name in towers(source.names):
            del infos[name]
        opened[role] = replace(source, infos=infos, config=source.config["text_config"])
    return opened


def settle_positions(giver: Source, sources: Mapping[str, Source]) -> list[str]:
    """Set the number of positions in the configuration of a merge.

    It is the base's number. Without a base it is the smallest number of the experts.

    Returns:
        A note if the sources differ in the number.
    """
    known = {}
    for role, source in sources.items():
        count = text_settings(source.config).get(POSITIONS)
        if isinstance(count, int):
            known[role] = count
    if len(set(known.values())) < 2:
        return []
    chosen = known.get("base", min(known.values()))
    giver.config = copy.deepcopy(giver.config)
    giver.config.get("text_config", giver.config)[POSITIONS] = chosen
    listed = ", ".join(f"{role} {count}" for role, count in known.items())
    return [f"{POSITIONS}={chosen}: the sources have {listed}"]


def refuse_another_base(expert: Adapted, base: Path, key: str) -> None:
    """Raise PipelineError if an adapter was trained on another base than merge.base.

    `key` is the configuration key of the expert.
    """
    trained_on = expert.base.folder
    if trained_on.resolve() != base.resolve():
        raise PipelineError(
            f"{key}: {expert.folder} is an adapter of {trained_on}, but merge.base is {base}. Merge"
            " experts of one base."
        )
