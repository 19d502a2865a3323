"""Merges that are adapters: weighted sums of LoRA factors, and the files that PEFT reads.

A weighted sum of adapters concatenates their ranks, and B alone is multiplied by weight and scale.
PEFT's add_weighted_adapter (0.21) cannot do this: `linear` multiplies sums of factors, and `cat` of
rsLoRA adapters scales their sum twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.merge.adapters import Adapted, Factors, Part, Source, is_transposed
from pipeline.models.checkpoint import digest_tensors
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def combine_adapters(
    sources: Mapping[str, Source], changes: Mapping[str, Mapping[str, float]]
) -> Adapted:
    """Return the weighted sum of adapters on one base as an adapter, with concatenated ranks.

    If a parameter has a single adapter with weight 1, its factors are kept unchanged.

    Args:
        sources: the sources by role, one of them an adapter.
        changes: for each parameter, the weight of each role.
    """
    adapted = {}
    for role, source in sources.items():
        if isinstance(source, Adapted):
            adapted[role] = source
    first = next(iter(adapted.values()))
    factors = {}
    for name, weights in changes.items():
        weighted = []
        for role, weight in weights.items():
            if role in adapted and weight and name in adapted[role].factors:
                weighted.append((weight, adapted[role].factors[name]))
        if weighted:
            factors[name] = _sum_of_factors(weighted)
    return replace(first, factors=factors)


def _sum_of_factors(weighted: Sequence[tuple[float, Factors]]) -> Factors:
    weight, first = weighted[0]
    if len(weighted) == 1 and weight == 1:
        # Rounded as on disk, where alpha is scale x rank
        return replace(first, scale=first.scale * first.rank / first.rank)
    parts: list[Part] = []
    rank = 0
    for weight, part in weighted:
        parts += part.scaled(weight)
        rank += part.rank
    return replace(first, parts=tuple(parts), rank=rank, scale=1.0)


def with_uniform_rank(adapter: Adapted) -> Adapted:
    """Return the same adapter with the largest rank and scale 1 in all modules of a name (q_proj).

    Scales are multiplied into B, and zeros fill the ranks. A module that the adapter does not
    change gets zeros if another module of its name is changed. vLLM reads r, lora_alpha and
    use_rslora (vllm/lora/peft_helper.py) but ignores rank_pattern and alpha_pattern, so it would
    silently scale modules wrongly.
    """
    base = adapter.base
    rank = max(part.rank for part in adapter.factors.values())
    targets = {module_name(name) for name in adapter.factors}
    factors = {}
    for name in base.names:
        if not name.endswith(".weight") or module_name(name) not in targets:
            continue
        parts: tuple[Part, ...] = ()
        if name in adapter.factors:
            parts = adapter.factors[name].scaled(1.0)
        transposed = is_transposed(base, name)
        factors[name] = Factors(parts, rank, base.info(name).shape, transposed=transposed)
    return replace(adapter, factors=factors, uniform=True)


def module_name(name: str) -> str:
    """Return the last part of the name of a weight's module, such as q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]


def write_adapter(adapter: Adapted, folder: Path) -> dict[str, str]:
    """Write an adapter in float32 as PEFT reads it, and return {tensor: digest}."""
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    for name, part in adapter.factors.items():
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = part.matrices()
        tensors[f"{module}.lora_A.weight"] = a
        tensors[f"{module}.lora_B.weight"] = b
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    parts = adapter.factors.values()
    rank = max(part.rank for part in parts)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "r": rank,
        "lora_alpha": rank,
        "fan_in_fan_out": any(part.transposed for part in parts),
        "base_model_name_or_path": adapter.settings.get("base_model_name_or_path"),
    }
    revision = adapter.settings.get("revision")  # the base's
    if revision:
        settings["revision"] = revision
    settings |= _target_settings(adapter)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    return digest_tensors(folder)


def _target_settings(adapter: Adapted) -> dict[str, Any]:
    """Return the keys of adapter_config.json that name modules, and their ranks and scales."""
    if adapter.uniform:
        return {"target_modules": sorted({module_name(name) for name in adapter.factors})}
    ranks = {}
    alphas = {}
    for name, part in sorted(adapter.factors.items()):
        module = name.removesuffix(".weight")
        ranks[module] = part.rank
        alphas[module] = part.scale * part.rank
    return {"target_modules": list(ranks), "rank_pattern": ranks, "alpha_pattern": alphas}
