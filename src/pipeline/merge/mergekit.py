"""A merge as a configuration of mergekit 0.1.5, where it can express the merge; else why it cannot.

Linear merges (swaps, soups, resets) are its `linear` with a weight for each layer; task arithmetic, TIES by its own
definition and SLERP are its methods of those names. Imports nothing heavy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.merge.adapters import Adapted
from pipeline.models.checkpoint import DTYPES

if TYPE_CHECKING:
    from pipeline.config.merging import Merge
    from pipeline.merge.merge import Merging

FILE = "mergekit_config.yml"  # the name under which mergekit stores it with its output
TIES = {"trim": "tensor", "zero_sum": "plus"}  # mergekit's definition, and with weights:
WEIGHED = {"weigh": "before", "divisor": "weights"}
SAME = "the same weights"
DIFFERENCES = {  # a method, of TIES also what becomes of ties at the threshold
    ("ties", "keep_all"): "the same weights, but where entries are tied with the threshold: mergekit keeps as many of "
    "them as the density asks for, this program keeps all",
    ("ties", "exact"): "the same weights with the same torch on the same processor, whose sort chooses among entries "
    "that are tied with the threshold",
    ("slerp", None): "the same weights up to rounding",
}


def why_inexpressible(merge: Merging) -> str | None:
    """Why mergekit cannot express a merge; None where it can."""
    config: Any = merge.config
    if any(isinstance(source, Adapted) for source in merge.sources.values()):
        return "its experts are LoRA adapters on their base, which this program reads together as float32"
    if len({merge.stored_dtype(name) for name in merge.names}) > 1:
        return "its tensors are stored in several dtypes"
    if config.method == "ties":
        expected = TIES | (WEIGHED if config.weights else {})
        different = {key: getattr(config, key) for key, value in expected.items() if getattr(config, key) != value}
        text = ", ".join(f"{key}={value} (there {expected[key]})" for key, value in different.items())
        return f"its TIES is another definition: {text}; merge=ties_mergekit is of mergekit's" if different else None
    if config.method == "dare_linear":
        return "its random numbers are this program's own, the same for any number of threads"
    if config.method in ("task_arithmetic", "slerp", "mergekit") or all(name in merge.weights for name in merge.names):
        return None
    return f"merge={config.method} decides rows one by one here, and mergekit whole tensors"


def describe_difference(config: Merge) -> str:
    """How mergekit's result from the YAML differs from this program's."""
    return DIFFERENCES.get((config.method, getattr(config, "ties_at_threshold", None)), SAME)


def yaml_of(merge: Merging, names: Mapping[str, str]) -> str:
    """The YAML. names: of each role, the folder or the id on the Hub that mergekit is to read."""
    import yaml

    comment = [
        f"# For mergekit 0.1.5: {describe_difference(merge.config)}.",
        "# Run it in the folder that holds the models named here, or put their paths or ids on the Hub in their place.",
        "# Tokenizer and configs are mergekit's choice: those of the first model, or of base_model.",
    ]
    text = yaml.safe_dump(mergekit_config(merge, names), sort_keys=False, allow_unicode=True)
    return "\n".join(comment) + "\n" + text


def mergekit_config(merge: Merging, names: Mapping[str, str]) -> dict[str, Any]:
    """The configuration as plain data."""
    config: Any = merge.config
    if config.method == "mergekit":
        return config.with_models({model: names[role] for model, role in config.roles().items() if role in names})
    stored = merge.stored_dtype(merge.names[0])
    dtypes = {"dtype": "float32", "out_dtype": next(long for long, short in DTYPES.items() if short == stored)}
    experts = [role for role in merge.sources if role != "base"]
    models: list[dict[str, Any]] = [{"model": names[role]} for role in experts]
    if config.method == "slerp":
        return {
            "merge_method": "slerp", "base_model": names[experts[0]], "models": models,
            "parameters": {"t": config.t}, **dtypes,
        }  # fmt: skip
    if config.method in ("ties", "task_arithmetic"):
        if config.method == "ties":
            weights, further = config.weights or [1.0] * len(experts), {"density": config.density}
        else:
            shares, further = config.shares(merge.names), {}
            weights = [weight_setting({name: row[role] for name, row in shares.items()}) for role in experts]
        for model, weight in zip(models, weights, strict=True):
            model["parameters"] = {"weight": weight, **further}
        return {
            "merge_method": config.method, "base_model": names["base"], "models": models,
            "parameters": {"lambda": config.scale, "normalize": config.method == "ties"}, **dtypes,
        }  # fmt: skip
    models = [
        {
            "model": names[role],
            "parameters": {"weight": weight_setting({n: w.get(role, 0.0) for n, w in merge.weights.items()})},
        }
        for role in merge.sources
    ]
    return {"merge_method": "linear", "models": models, "parameters": {"normalize": False}, **dtypes}


def weight_setting(weights: Mapping[str, float]) -> Any:
    """One source's weight in each parameter as mergekit takes it: a number, or filters of which the first that is part
    of a parameter's name decides, the commonest number last."""
    commonest = Counter(weights.values()).most_common(1)[0][0]
    filters = [
        {"filter": part, "value": value}
        for part, value in weight_filters(weights, sorted(weights), 0)
        if value != commonest
    ]
    return [*filters, {"value": commonest}] if filters else commonest


def weight_filters(weights: Mapping[str, float], names: Sequence[str], depth: int) -> Iterator[tuple[str, float]]:
    """The shortest beginnings of names below which all parameters have one weight, with it. They end in a dot, so that
    layer 1's is no part of layer 10's."""
    values = {weights[name] for name in names}
    words = names[0].split(".")
    if len(values) == 1:
        yield (".".join([*words[:depth], ""]) if depth < len(words) else names[0]), values.pop()
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.split(".")[depth], []).append(name)
    for group in sorted(groups, key=lambda word: (word.isdigit(), int(word) if word.isdigit() else 0, word)):
        yield from weight_filters(weights, groups[group], depth + 1)
