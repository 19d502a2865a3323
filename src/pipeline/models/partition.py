"""The side of a partition that a parameter is on: `language`, `math`, or neither.

Partitions A, B, C (`unreasonable`, section 3.3) and Z, the inverse of B, are settings of one
predicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.models.anatomy import ATTENTION, MLP, OUTSIDE, TOWER, Site, num_layers

Side = Literal["math", "language", "outside", "frozen"]
REFERENCE_LAYERS = 32  # the depth of the papers' model


def is_outer(layer: int, bottom_layers: int, top_layers: int, num_layers: int) -> bool:
    """Return True if a layer is among the first bottom_layers or the last top_layers layers.

    Layers count from 0, next to the embeddings.
    """
    return layer < bottom_layers or layer >= num_layers - top_layers


def scaled_count(count: int, num_layers: int) -> int:
    """Scale a count for 32 layers to a model of `num_layers`: at least 1, but 0 stays 0."""
    if count:
        return max(1, count * num_layers // REFERENCE_LAYERS)
    return 0


def layer_counts(partition: Partition, num_layers: int) -> tuple[int, int]:
    """Return the numbers of bottom and top layers for a model of this depth.

    Raises:
        PipelineError: they exceed the depth.
    """
    bottom, top = partition.bottom_layers, partition.top_layers
    if partition.scale_to_depth:
        bottom, top = scaled_count(bottom, num_layers), scaled_count(top, num_layers)
    if bottom + top > num_layers:
        raise PipelineError(
            f"partition {partition.name} takes the first {bottom} and the last {top} layers, but"
            f" the model has {num_layers}. Lower partition.bottom_layers or set"
            " partition.scale_to_depth=true."
        )
    return bottom, top


def resolve_partition(partition: Partition, num_layers: int) -> Partition:
    """Return the same partition with layer counts for a model of this depth, no longer scaled.

    Raises:
        PipelineError: a side has no part of any layer.
    """
    bottom, top = layer_counts(partition, num_layers)
    takes_all_halves = partition.all_attention and partition.all_mlp
    takes_a_half = partition.all_attention or partition.all_mlp
    has_language = bottom + top > 0 or takes_a_half
    if takes_all_halves or not has_language or bottom + top == num_layers:
        full, empty = "math", "language"
        if has_language != partition.inverse:
            full, empty = empty, full
        remedy = (
            "Change partition.bottom_layers or partition.top_layers, or set"
            " partition.scale_to_depth=true."
        )
        if takes_all_halves:  # layer counts cannot help
            remedy = "Set partition.all_attention=false or partition.all_mlp=false."
        raise PipelineError(
            f"partition {partition.name} gives all {num_layers} layers to {full} and none to"
            f" {empty}. {remedy}"
        )
    return replace(partition, bottom_layers=bottom, top_layers=top, scale_to_depth=False)


def refuse_outside(partition: Partition, read: str) -> None:
    """Raise PipelineError for partition.outside, which only training reads.

    Args:
        partition: the partition.
        read: says which keys are read instead.
    """
    if partition.outside != "frozen":
        raise PipelineError(
            f"partition.outside={partition.outside} is only for training: {read}. Leave it out."
        )


def side_of(partition: Partition, site: Site, num_layers: int) -> Side:
    """Return the side of a parameter.

    No side trains a `frozen` parameter (papers/decisions.md, norms and biases).

    Raises:
        PipelineError: the partition exceeds the model's layers.
    """
    bottom, top = layer_counts(partition, num_layers)
    if site.kind == TOWER:
        return "frozen"
    if site.kind in OUTSIDE or site.layer is None:
        if partition.outside == "frozen":
            return "outside"
        return partition.outside  # type: ignore[return-value]
    is_language = is_outer(site.layer, bottom, top, num_layers)
    splits_layers = partition.all_attention != partition.all_mlp and not is_language
    if splits_layers and site.kind == "shared_norm":
        return "frozen"  # it feeds one side's attention and the other side's MLP
    if partition.all_attention:
        is_language = is_language or site.kind in ATTENTION
    if partition.all_mlp:
        is_language = is_language or site.kind in MLP
    if is_language != partition.inverse:
        return "language"
    return "math"


def sides_of_all(partition: Partition, sites: Mapping[str, Site]) -> dict[str, Side]:
    """Return the side of every parameter of a model.

    Raises:
        PipelineError: a side is empty.
    """
    layers = num_layers(sites)
    resolve_partition(partition, layers)
    return {name: side_of(partition, site, layers) for name, site in sites.items()}
