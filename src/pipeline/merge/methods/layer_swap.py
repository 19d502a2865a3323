"""Layer swapping (`layer_swapping`, Algorithm 1): outer layers of one expert in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.weights import Weights, inverse_weights, weights_by_owner
from pipeline.models.anatomy import NORMS, Site, anatomy, num_layers
from pipeline.models.partition import (
    is_outer,
    layer_counts,
    refuse_outside,
    resolve_partition,
    scaled_count,
    side_of,
)

if TYPE_CHECKING:
    from pipeline.merge.adapters import Opened
    from pipeline.merge.merge import Linear

SIDES = ("math", "language")
_OWNED = {
    "average": "averaged",
    "magnitude": "weighted by magnitude",
    "math": "of the math expert",
    "language": "of the language expert",
}
OWNERS = tuple(_OWNED)
_OUTSIDE_KEYS = {"embedding": "embeddings", "final_norm": "final_norm", "head": "head"}
# Counts of layers: key -> default
COUNTS = {
    "bottom_layers": 5,
    "top_layers": 2,
    "bottom_transition": 0,
    "top_transition": 0,
}


class Counts(NamedTuple):
    """Numbers of layers, in the order of `COUNTS`."""

    bottom: int
    top: int
    bottom_transition: int
    top_transition: int


def is_changed(key: str) -> Callable[[Any], bool]:
    return lambda merge: getattr(merge, key) != COUNTS[key]


@dataclass
class LayerSwap(Merge):
    """Layer Swapping, Algorithm 1: the language expert's bottom and top layers in the math expert.

    `math` and `language` are a RUN, or a list of runs that is averaged first. With `partition=`,
    its sides replace the counts.
    """

    method: str = "layer_swap"
    math: Any = knob(run=True)
    language: Any = knob(run=True)
    # null: 5, or the partition's
    bottom_layers: int | None = knob(None, ge=0, hashed=is_changed("bottom_layers"))
    # null: 2, or the partition's
    top_layers: int | None = knob(None, ge=0, hashed=is_changed("top_layers"))
    # null: 0
    bottom_transition: int | None = knob(None, ge=0, hashed=is_changed("bottom_transition"))
    # null: 0
    top_transition: int | None = knob(None, ge=0, hashed=is_changed("top_transition"))
    # scale counts for 32 layers to the model: max(1, floor(count x layers / 32))
    scale_to_depth: bool = False
    zones: str = knob("average", options=OWNERS, hashed=lambda merge: merge.has_zones)
    embeddings: str = knob("average", options=OWNERS)
    final_norm: str = knob("average", options=OWNERS)
    head: str = knob("average", options=OWNERS)
    layer_norms: str = knob("with_layer", options=("with_layer", *OWNERS))
    # any: accept a language expert as math, and a math expert as language
    sides: str = knob("declared", options=("declared", "any"), hashed=False)

    reads_partition = True

    def references(self) -> References:
        """Return the roles math and language; for a list, math.0, math.1, ..."""
        references: References = {}
        for side in SIDES:
            runs = getattr(self, side)
            if not isinstance(runs, list):
                runs = [runs]
            if not runs:
                raise PipelineError(
                    "merge.math and merge.language need at least one run each. Give"
                    " merge.language=RUN."
                )
            for index, run in enumerate(runs):
                role = f"{side}.{index}"
                if len(runs) == 1:
                    role = side
                references[role] = (f"merge.{side}", run)
        return references

    def refuse_sides(self, declared: Mapping[str, str | None]) -> None:
        if self.sides != "declared":
            return
        for role, side in declared.items():
            name = role.partition(".")[0]
            if side in SIDES and side != name:
                raise PipelineError(
                    f"merge.{name}={getattr(self, name)} names an expert for {side}. Give it as"
                    f" merge.{side}, or set merge.sides=any."
                )

    @property
    def has_zones(self) -> bool:
        return bool(self.bottom_transition or self.top_transition)

    def needs_base(self) -> bool:
        keys = ["layer_norms", *_OUTSIDE_KEYS.values()]
        if self.has_zones:
            keys.append("zones")
        return any(getattr(self, key) == "magnitude" for key in keys)

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if partition is not None:
            for key in (*COUNTS, "scale_to_depth"):
                value = getattr(self, key)
                if value is not None and value is not False:
                    raise PipelineError(
                        f"merge.{key}={value} cannot be used with partition={partition.name}. Give"
                        " layer counts or a partition."
                    )
            refuse_outside(
                partition, "a merge reads merge.embeddings, merge.final_norm and merge.head"
            )
        if layers is None:
            return
        if partition:
            resolve_partition(partition, layers)
        else:
            self.counts_in(layers)

    def label(self, partition: Partition | None, layers: int | None) -> str:
        """Return the label of the run, with the counts in a model whose depth is known."""
        if partition:
            return f"layer_swap-{partition.name}"
        counts = self.counts_in(layers)
        return f"layer_swap-{counts.bottom}-{counts.top}"

    def described(self, partition: Partition | None, layers: int | None) -> str:
        """Describe which expert each layer and the weights outside the layers come from."""
        owners: dict[str, list[str]] = {}
        for key in _OUTSIDE_KEYS.values():
            owners.setdefault(getattr(self, key), []).append(key.replace("_", " "))
        outside = []
        for owner, names in owners.items():
            outside.append(f"{', '.join(names)} {_OWNED[owner]}")
        return f"{self.described_layers(partition, layers)} ({', '.join(outside)})"

    def described_layers(self, partition: Partition | None, layers: int | None) -> str:
        """Describe the language expert's layers, and the layers that both experts share."""
        if partition:
            text = f"the language side of partition {partition.name}"
            counts = None
            if layers:
                counts = layer_counts(partition, layers)
            if counts and layers:
                text += f", outer layers {outer_layers(*counts, layers)}"
            return text
        bottom, top, bottom_zone, top_zone = self.counts_in(layers)
        if not layers:
            return f"the first {bottom} and the last {top} layers of the language expert"
        noun = "layers"
        if bottom + top == 1:
            noun = "layer"
        swapped = outer_layers(bottom, top, layers) or "none"
        text = f"{noun} {swapped} of {layers} of the language expert"
        if bottom_zone + top_zone:
            zones = outer_layers(
                bottom + bottom_zone, top + top_zone, layers, without=(bottom, top)
            )
            text += f", {zones} of both"
        return text

    def counts_in(self, layers: int | None) -> Counts:
        """Return the configured or default counts, scaled if the depth is known.

        Raises:
            PipelineError: the counts exceed the depth.
        """
        counts = []
        for key, default in COUNTS.items():
            count = getattr(self, key)
            if count is None:
                count = default
            counts.append(count)
        if layers is None:
            return Counts(*counts)
        scaled = [scaled_count(count, layers) for count in counts]
        if self.scale_to_depth:
            counts = scaled
        if sum(counts) > layers:
            given = [f"merge.{key}={count}" for key, count in zip(COUNTS, counts, strict=True)]
            remedy = ""
            if sum(scaled) <= layers:
                remedy = ", or set merge.scale_to_depth=true"
            raise PipelineError(
                f"{', '.join(given)} are {sum(counts)} layers, but the model has {layers}. Lower"
                f" them{remedy}."
            )
        return Counts(*counts)

    def settled(self, partition: Partition | None) -> LayerSwap:
        if partition:
            return replace(self)
        counts: dict[str, Any] = dict(zip(COUNTS, self.counts_in(None), strict=True))
        return replace(self, **counts)

    def decide(self, opened: Opened) -> Linear:
        from pipeline.merge.formulas import mean_change
        from pipeline.merge.merge import Linear

        def measure(roles: Sequence[str]) -> float:
            parts = [(1 / len(roles), opened.experts[role]) for role in roles]
            return mean_change(parts, opened.base, opened.threads)

        sites = anatomy(next(iter(opened.experts.values())).names)
        return Linear(layer_swap_weights(self, sites, opened.partition, measure))


def outer_layers(bottom: int, top: int, layers: int, without: tuple[int, int] = (0, 0)) -> str:
    """Name the first and the last layers of a model, such as "0-4 and 30-31".

    Args:
        bottom: the number of first layers.
        top: the number of last layers.
        layers: the number of the model's layers.
        without: numbers of first and of last layers to leave out.
    """
    outer_bottom, outer_top = without
    ranges = [(outer_bottom, bottom - 1), (layers - top, layers - 1 - outer_top)]
    named = []
    for first, last in ranges:
        if last > first:
            named.append(f"{first}-{last}")
        elif last == first:
            named.append(str(first))
    return " and ".join(named)


def layer_swap_weights(
    config: LayerSwap,
    sites: Mapping[str, Site],
    partition: Partition | None = None,
    measure: Callable[[Sequence[str]], float] | None = None,
) -> Weights:
    """Return the weights of Algorithm 1 of `layer_swapping`: outer layers from language.

    Line 5 is read with `and`: as printed, with `or`, no layer would be in a transition zone. The
    zones lie inside, next to the swapped layers. Parameters outside the layers follow their own
    keys (section 4.2, item 6). Layer norms go with their layer, or follow `merge.layer_norms` (line
    2 averages them). A tied head is the embedding. With a partition, its sides replace the counts,
    and what belongs to neither side is math's.

    Args:
        config: the settings. A side that is a list is the uniform soup of its experts.
        sites: the parameters of the model.
        partition: the sides.
        measure: returns the mean absolute change of a side's experts, for weights by magnitude.

    Raises:
        PipelineError: the counts exceed the model.
    """
    layers = num_layers(sites)
    config.refuse(partition, layers)
    roles: dict[str, list[str]] = {side: [] for side in SIDES}
    for role in config.references():
        roles[role.partition(".")[0]].append(role)
    shares = {
        "math": {"math": 1.0},
        "language": {"language": 1.0},
        "average": dict.fromkeys(SIDES, 0.5),
    }
    if measure and config.needs_base():
        shares["magnitude"] = inverse_weights({side: measure(roles[side]) for side in SIDES})
    counts = Counts(0, 0, 0, 0)
    if not partition:
        counts = config.counts_in(layers)
    bottom_and_zone = counts.bottom + counts.bottom_transition
    top_and_zone = counts.top + counts.top_transition

    def owner(site: Site) -> str:
        if site.layer is None:
            return str(getattr(config, _OUTSIDE_KEYS.get(site.kind, ""), "math"))
        if site.kind in NORMS and config.layer_norms != "with_layer":
            return config.layer_norms
        if partition is not None:
            if side_of(partition, site, layers) == "language":
                return "language"
            return "math"
        if is_outer(site.layer, counts.bottom, counts.top, layers):
            return "language"
        if is_outer(site.layer, bottom_and_zone, top_and_zone, layers):
            return config.zones
        return "math"

    spread: dict[str, dict[str, float]] = {}
    for name, share in shares.items():
        spread[name] = {}
        for side, part in share.items():
            spread[name] |= dict.fromkeys(roles[side], part / len(roles[side]))
    return weights_by_owner(sites, owner, spread)
