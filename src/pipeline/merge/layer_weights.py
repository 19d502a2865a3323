"""merge.layer_weights: the weight of each expert in each layer, for attention, MLP and norms apart. No tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.merge.weights import Weights
from pipeline.models.anatomy import NORMS, TOWER, anatomy, num_layers

KEY = "merge.layer_weights"
LAYER_KINDS = {
    **{"attention": "attention", "linear_attention": "attention", "mlp": "mlp", "per_layer_input": "mlp"},
    **dict.fromkeys(NORMS, "norms"),
}  # anatomy's kind -> ours
OUTSIDE_KINDS = {"embedding": "embeddings", "final_norm": "final_norm", "head": "head"}
KINDS = tuple(dict.fromkeys([*LAYER_KINDS.values(), *OUTSIDE_KINDS.values()]))


def with_text_keys(value: Any) -> Any:
    """The knob as it is hashed: keys are text and numbers are floats, however they were written."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_text_keys(inner) for inner in value]
    return float(value) if type(value) is int else value


def check_layer_weights(layer_weights: Any, roles: Sequence[str], layers: int | None) -> None:
    """Raise PipelineError unless the knob is {role: {kind: number, list or anchors}} of these roles.

    layers: of the model; None where it is unknown, and lengths are not checked.
    """
    if not isinstance(layer_weights, dict) or not all(isinstance(kinds, dict) for kinds in layer_weights.values()):
        raise PipelineError(f"{KEY} must be {{role: {{kind: weights}}}}, for example {{0: {{mlp: 0.3}}}}")
    for role, kinds in layer_weights.items():
        if role not in roles:
            raise PipelineError(f"{KEY}: {role} is not a role: there are {', '.join(roles)}, in the order of experts")
        for kind, value in kinds.items():
            if kind not in KINDS:
                raise PipelineError(f"{KEY}.{role}: {kind} is not a kind of parameter: {suggest(kind, KINDS)}")
            _check_value(f"{KEY}.{role}.{kind}", kind, value, layers)


def _check_value(key: str, kind: str, value: Any, layers: int | None) -> None:
    numbers = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(number, float) for number in numbers):
        raise PipelineError(f"{key} must be a number, a list of numbers or anchors {{layer: number}}, got {value!r}")
    if kind in OUTSIDE_KINDS.values() and not isinstance(value, float):
        raise PipelineError(f"{key} is of parameters outside the layers: give one number, got {value!r}")
    if isinstance(value, list) and layers is not None and len(value) != layers:
        raise PipelineError(
            f"{key} has {len(value)} weights, but the model has {layers} layers: give {layers}, one number for all, "
            f"or anchors such as {{0: {value[0]:g}, {layers - 1}: {value[-1]:g}}}"
        )
    for at in value if isinstance(value, dict) else ():
        if not at.isdecimal() or (layers is not None and int(at) >= layers):
            last = "" if layers is None else f" 0 to {layers - 1}"
            raise PipelineError(f"{key}: {at} is not a layer: anchors are {{layer: number}}, of layers{last}")


def weights_of_layers(
    numbers: Mapping[str, float], layer_weights: Any, layers: int
) -> dict[str, list[dict[str, float]]]:
    """Kind -> for each layer, role -> weight: that of the knob, else the role's number. Outside the layers L times the
    same.

    A list has a weight for each layer, from 0 next to the embeddings; between anchors {layer: number} it is linear,
    and beyond them constant. Raises PipelineError for weights that do not fit the model.
    """
    check_layer_weights(layer_weights, list(numbers), layers)
    return {
        kind: [
            {role: weight_at(layer_weights.get(role, {}).get(kind, number), layer) for role, number in numbers.items()}
            for layer in range(layers)
        ]
        for kind in KINDS
    }


def weight_at(value: Any, layer: int) -> float:
    """The weight in one layer of a number, a list, or anchors with keys of text."""
    if isinstance(value, list):
        return value[layer]
    if not isinstance(value, dict):
        return value
    anchors = {int(at): weight for at, weight in value.items()}
    below = max((at for at in anchors if at <= layer), default=min(anchors))
    above = min((at for at in anchors if at >= layer), default=max(anchors))
    low, high = anchors[below], anchors[above]
    return low if below >= above else low + (high - low) * (layer - below) / (above - below)


def spread_weights(numbers: Mapping[str, float], layer_weights: Any, names: Sequence[str]) -> Weights:
    """Each expert's weight in every parameter: its number, or that of the knob. Raises PipelineError for weights that
    do not fit the model."""
    if layer_weights is None:
        return dict.fromkeys(names, dict(numbers))
    sites = anatomy(names)
    by_kind = weights_of_layers(numbers, layer_weights, num_layers(sites))
    kind_of = {name: (LAYER_KINDS | OUTSIDE_KINDS | {TOWER: "embeddings"})[site.kind] for name, site in sites.items()}
    for role, kinds in layer_weights.items():
        if absent := sorted(set(kinds) - set(kind_of.values())):
            raise PipelineError(f"{KEY}.{role}.{absent[0]}: the model has no such parameter: leave it out")
    return {name: by_kind[kind_of[name]][site.layer or 0] for name, site in sites.items()}
