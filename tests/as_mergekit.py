"""A merge as a configuration of mergekit 0.1.5, so that mergekit can be asked for the same weights.

Linear merges (swaps, soups, resets) are its `linear` with a weight for each layer. Task arithmetic
and SLERP are its methods of those names.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.merge.merge import Merging
from pipeline.models.checkpoint import DTYPES


def mergekit_config(merge: Merging, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration as plain data."""
    config: Any = merge.config
    stored = merge.stored_dtype(merge.names[0])
    dtypes = {
        "dtype": "float32",
        "out_dtype": next(long for long, short in DTYPES.items() if short == stored),
    }
    experts = [role for role in merge.sources if role != "base"]
    models: list[dict[str, Any]] = [{"model": names[role]} for role in experts]
    if config.method == "slerp":
        return {
            "merge_method": "slerp",
            "base_model": names[experts[0]],
            "models": models,
            "parameters": {"t": config.t},
            **dtypes,
        }
    if config.method == "task_arithmetic":
        weights = config.weights or [1.0] * len(experts)
        for model, weight in zip(models, weights, strict=True):
            model["parameters"] = {"weight": weight}
        return {
            "merge_method": config.method,
            "base_model": names["base"],
            "models": models,
            "parameters": {"lambda": config.scale, "normalize": False},
            **dtypes,
        }
    if config.method == "soup" and any(isinstance(weight, list) for weight in config.weights or []):
        for model, weight in zip(models, config.weights, strict=True):
            model["parameters"] = {"weight": weight}  # a list is a gradient of mergekit
        return {
            "merge_method": "linear",
            "models": models,
            "parameters": {"normalize": False},
            **dtypes,
        }
    models = [
        {
            "model": names[role],
            "parameters": {
                "weight": weight_setting(
                    {n: w.get(role, 0.0) for n, w in merge.method.weights.items()}
                )
            },
        }
        for role in merge.sources
    ]
    return {
        "merge_method": "linear",
        "models": models,
        "parameters": {"normalize": False},
        **dtypes,
    }


def weight_setting(weights: Mapping[str, float]) -> Any:
    """Return one source's weight in each parameter, as mergekit takes it.

    It is a number, or filters. The first filter that is part of a parameter's name decides, and the
    most frequent number is last.
    """
    commonest = Counter(weights.values()).most_common(1)[0][0]
    filters = [
        {"filter": part, "value": value}
        for part, value in weight_filters(weights, sorted(weights), 0)
        if value != commonest
    ]
    return [*filters, {"value": commonest}] if filters else commonest


def weight_filters(
    weights: Mapping[str, float], names: Sequence[str], depth: int
) -> Iterator[tuple[str, float]]:
    """Return the shortest prefixes of names below which all parameters have one weight.

    They end in a dot, so that the prefix of layer 1 does not match layer 10.
    """
    values = {weights[name] for name in names}
    words = names[0].split(".")
    if len(values) == 1:
        yield (".".join([*words[:depth], ""]) if depth < len(words) else names[0]), values.pop()
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.split(".")[depth], []).append(name)
    for group in sorted(
        groups, key=lambda word: (word.isdigit(), int(word) if word.isdigit() else 0, word)
    ):
        yield from weight_filters(weights, groups[group], depth + 1)
