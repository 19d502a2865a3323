"""Which side of a partition a parameter is on: `language`, `math`, or neither.

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
REFERENCE_LAYERS = 32  # the depth of the model for which the papers chose their layer counts


def is_outer(layer: int, bottom_layers: int, top_layers: int, num_layers: int) -> bool:
    """Whether `layer` (from 0, next to the embeddings) is among the first bottom_layers or the last
    top_layers layers.
    """
    return layer < bottom_layers or layer >= num_layers - top_layers


def scaled_count(count: int, num_layers: int) -> int:
    """Return a count chosen for 32 layers, for a model of `num_layers`: at least 1, but zero stays
    zero.
    """
    if count:
        return max(1, count * num_layers // REFERENCE_LAYERS)
    return 0


def layer_counts(partition: Partition, num_layers: int) -> tuple[int, int]:
    """(bottom, top): the outer layers of a model of this depth.

    Raises PipelineError if they do not fit.
    """
    counts = (partition.bottom_layers, partition.top_layers)
    if partition.scale_to_depth:
        counts = (scaled_count(counts[0], num_layers), scaled_count(counts[1], num_layers))
    if sum(counts) > num_layers:
        raise PipelineError(
            f"partition {partition.name} takes the first {counts[0]} and the last {counts[1]}"
            f" layers, but the model has {num_layers}: lower partition.bottom_layers or set"
            " partition.scale_to_depth=true"
        )
    return counts


def resolve_partition(partition: Partition, num_layers: int) -> Partition:
    """Return the same partition with the layer counts of a model of this depth, no longer scaled.

    Raises: PipelineError: one side has no part of any layer: a partition must split the layers.
    """
    bottom, top = layer_counts(partition, num_layers)
    all_layers = partition.all_attention and partition.all_mlp  # layer counts cannot help then
    language = bottom + top > 0 or partition.all_attention or partition.all_mlp
    if all_layers or not language or bottom + top == num_layers:
        if language != partition.inverse:
            sides = ("language", "math")
        else:
            sides = ("math", "language")
        remedy = (
            "change partition.bottom_layers or partition.top_layers, or set"
            " partition.scale_to_depth=true"
        )
        if all_layers:
            remedy = "set partition.all_attention=false or partition.all_mlp=false"
        raise PipelineError(
            f"partition {partition.name} gives all {num_layers} layers to {sides[0]} and none to"
            f" {sides[1]}: {remedy}"
        )
    return replace(partition, bottom_layers=bottom, top_layers=top, scale_to_depth=False)


def refuse_outside(partition: Partition, read: str) -> None:
    """Raise PipelineError for partition.outside, which is of training.

    read: which keys a merge reads instead.
    """
    if partition.outside != "frozen":
        raise PipelineError(f"partition.outside={partition.outside} is of training: {read}")


def side_of(partition: Partition, site: Site, num_layers: int) -> Side:
    """Return the side of one parameter;

    `frozen` is trained on neither (papers/decisions.md, norms and biases).

    Raises: PipelineError: the partition asks for more layers than there are.
    """
    bottom, top = layer_counts(partition, num_layers)
    if site.kind == TOWER:
        return "frozen"
    if site.kind in OUTSIDE or site.layer is None:
        return "outside" if partition.outside == "frozen" else partition.outside  # type: ignore[return-value]
    language = is_outer(site.layer, bottom, top, num_layers)
    if partition.all_attention != partition.all_mlp and site.kind == "shared_norm" and not language:
        # it feeds the language side's attention and the math side's MLP at once, or the reverse
        return "frozen"
    if partition.all_attention:
        language = language or site.kind in ATTENTION
    if partition.all_mlp:
        language = language or site.kind in MLP
    if language != partition.inverse:
        return "language"
    return "math"


def sides_of_all(partition: Partition, sites: Mapping[str, Site]) -> dict[str, Side]:
    """Return the side of every parameter of a model.

    Raises: PipelineError: a partition has an empty side.
    """
    layers = num_layers(sites)
    resolve_partition(partition, layers)
    return {name: side_of(partition, site, layers) for name, site in sites.items()}
