"""Layer swapping (`layer_swapping`, Algorithm 1): outer layers of one expert around the middle of
another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Linear

SIDES = ("math", "language")
OWNERS = ("average", "magnitude", *SIDES)
_OWNED = {
    "average": "averaged",
    "magnitude": "weighted by magnitude",
    "math": "of the math expert",
    "language": "of the language expert",
}
_OUTSIDE_KEYS = {"embedding": "embeddings", "final_norm": "final_norm", "head": "head"}


COUNTS = {
    "bottom_layers": 5,
    "top_layers": 2,
    "bottom_transition": 0,
    "top_transition": 0,
}  # key -> default


def is_changed(key: str) -> Callable[[Any], bool]:
    return lambda merge: getattr(merge, key) != COUNTS[key]


@dataclass
class LayerSwap(Merge):
    """Layer Swapping, Algorithm 1: the language expert's bottom and top layers in the math expert.

    `math` and `language` are a RUN, or a list that is souped first. With `partition=` its sides
    replace the counts.
    """

    method: str = "layer_swap"
    math: Any = knob(run=True)
    language: Any = knob(run=True)
    # Counts, each at most given where there is no partition; its value of COUNTS adds nothing to a
    # hash
    bottom_layers: int | None = knob(
        None, ge=0, hashed=is_changed("bottom_layers")
    )  # null: 5, or the partition's
    top_layers: int | None = knob(
        None, ge=0, hashed=is_changed("top_layers")
    )  # null: 2, or the partition's
    bottom_transition: int | None = knob(
        None, ge=0, hashed=is_changed("bottom_transition")
    )  # null: 0
    top_transition: int | None = knob(None, ge=0, hashed=is_changed("top_transition"))  # null: 0
    scale_to_depth: bool = False  # counts as of 32 layers: max(1, floor(count x layers / 32))
    zones: str = knob("average", options=OWNERS, hashed=lambda merge: merge.has_zones)
    embeddings: str = knob("average", options=OWNERS)
    final_norm: str = knob("average", options=OWNERS)
    head: str = knob("average", options=OWNERS)
    layer_norms: str = knob("with_layer", options=("with_layer", *OWNERS))
    # any: math may be an expert that was trained for language, and language one for math
    sides: str = knob("declared", options=("declared", "any"), hashed=False)

    reads_partition = True

    def references(self) -> References:
        """Roles math and language; math.0, math.1, ... of a list."""
        all_references: References = {}
        for name in SIDES:
            runs = getattr(self, name)
            runs = runs if isinstance(runs, list) else [runs]
            if not runs:
                raise PipelineError(
                    "merge.math and merge.language name at least one run each: give"
                    " merge.language=RUN"
                )
            if len(runs) == 1:
                roles = [name]
            else:
                roles = [f"{name}.{index}" for index in range(len(runs))]
            all_references |= {
                role: (f"merge.{name}", run) for role, run in zip(roles, runs, strict=True)
            }
        return all_references

    def refuse_sides(self, declared: Mapping[str, str | None]) -> None:
        for role, side in declared.items():
            name = role.partition(".")[0]
            if self.sides == "declared" and side in SIDES and side != name:
                raise PipelineError(
                    f"merge.{name}={getattr(self, name)} names an expert for {side}: give it as"
                    f" merge.{side}, or merge.sides=any"
                )

    @property
    def has_zones(self) -> bool:
        return bool(self.bottom_transition or self.top_transition)

    def needs_base(self) -> bool:
        keys = ("layer_norms", *_OUTSIDE_KEYS.values(), *(("zones",) if self.has_zones else ()))
        return "magnitude" in [getattr(self, key) for key in keys]

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if partition is not None:
            for key in (*COUNTS, "scale_to_depth"):
                value = getattr(self, key)
                if value is not None and value is not False:
                    raise PipelineError(
                        f"merge.{key}={value} beside partition={partition.name}: give layer counts"
                        " or a partition, not both"
                    )
            refuse_outside(
                partition, "a merge reads merge.embeddings, merge.final_norm and merge.head"
            )
        if layers is not None:
            resolve_partition(partition, layers) if partition else self.counts_in(layers)

    def label(self, partition: Partition | None, layers: int | None) -> str:
        """Return the counts in the model, where its depth is known."""
        b, u, *_ = self.counts_in(None if partition else layers)
        return f"layer_swap-{partition.name if partition else f'{b}-{u}'}"

    def described(self, partition: Partition | None, layers: int | None) -> str:
        """Which layers are of the language expert, and which of both; whose the weights outside the
        layers are.
        """
        owners: dict[str, list[str]] = {}
        for key in _OUTSIDE_KEYS.values():
            owners.setdefault(getattr(self, key), []).append(key.replace("_", " "))
        outside = ", ".join(
            f"{', '.join(names)} {_OWNED[owner]}" for owner, names in owners.items()
        )
        return f"{self.described_layers(partition, layers)} ({outside})"

    def described_layers(self, partition: Partition | None, layers: int | None) -> str:
        """Which layers are of the language expert, and which of both."""
        if partition:
            counts = None
            if layers:
                counts = layer_counts(partition, layers)
            outer = ""
            if counts and layers:
                outer = f", outer layers {outer_layers(*counts, layers)}"
            return f"the language side of partition {partition.name}{outer}"
        b, u, t_b, t_u = self.counts_in(layers)
        if not layers:
            return f"the first {b} and the last {u} layers of the language expert"
        zones = ""
        if t_b + t_u:
            zones = outer_layers(b + t_b, u + t_u, layers, without=(b, u))
        noun = "layer" if b + u == 1 else "layers"
        text = f"{noun} {outer_layers(b, u, layers) or 'none'} of {layers} of the language expert"
        return text + (f", {zones} of both" if zones else "")

    def counts_in(self, layers: int | None) -> list[int]:
        """b, u, t_b and t_u, as they are given or by default, for a model of this depth, if it is
        known. Raises PipelineError where together they exceed it.
        """
        counts = [
            default if getattr(self, key) is None else getattr(self, key)
            for key, default in COUNTS.items()
        ]
        if layers is None:
            return counts
        scaled = [scaled_count(count, layers) for count in counts]
        counts = scaled if self.scale_to_depth else counts
        if sum(counts) > layers:
            given = ", ".join(
                f"merge.{key}={count}" for key, count in zip(COUNTS, counts, strict=True)
            )
            remedy = ""
            if sum(scaled) <= layers:
                remedy = ", or set merge.scale_to_depth=true"
            raise PipelineError(
                f"{given} are {sum(counts)} layers, but the model has {layers}: lower them{remedy}"
            )
        return counts

    def settled(self, partition: Partition | None) -> LayerSwap:
        if partition:
            given: dict[str, Any] = {}
        else:
            given = dict(zip(COUNTS, self.counts_in(None), strict=True))
        return replace(self, **given)

    def decide(
        self,
        sources: dict[str, Source],
        base: Source | None,
        partition: Partition | None,
        threads: int | None,
    ) -> Linear:
        from pipeline.merge.formulas import mean_change
        from pipeline.merge.merge import Linear

        def measure(roles: Sequence[str]) -> float:
            assert base is not None
            return mean_change([(1 / len(roles), sources[role]) for role in roles], base, threads)

        sites = anatomy(next(iter(sources.values())).names)
        return Linear(layer_swap_weights(self, sites, partition, measure))


def outer_layers(bottom: int, top: int, layers: int, without: tuple[int, int] = (0, 0)) -> str:
    """Name the first and the last layers of a model, "0-4 and 30-31", without so many further
    out.
    """
    ends = [(without[0], bottom - 1), (layers - top, layers - 1 - without[1])]
    return " and ".join(
        f"{first}-{last}" if last > first else str(first) for first, last in ends if last >= first
    )


def layer_swap_weights(
    config: LayerSwap,
    sites: Mapping[str, Site],
    partition: Partition | None = None,
    measure: Callable[[Sequence[str]], float] | None = None,
) -> Weights:
    """Layer swapping, Algorithm 1 of `layer_swapping`: outer layers from language, the middle from
    math.

    Line 5 is read with `and`: as printed, with `or`, no layer would ever be in a transition zone.
    The zones lie inside, next to the swapped layers. Parameters outside the layers follow their own
    keys (section 4.2, item 6); layer norms go with their layer, or follow `merge.layer_norms` (line
    2 averages them). A tied head is the embedding. With a partition its sides stand in place of the
    counts; what it leaves to neither is math's.

    Sources are those of `references`: a side that is a list is the uniform soup of its experts.
    `measure`: the mean absolute change of a side's experts, for the choices that are weighted by
    it. Raises PipelineError where zones overlap or exceed the model.
    """
    layers = num_layers(sites)
    config.refuse(partition, layers)
    shares = {
        "math": {"math": 1.0},
        "language": {"language": 1.0},
        "average": dict.fromkeys(SIDES, 0.5),
    }
    roles = {
        side: [role for role in config.references() if role.partition(".")[0] == side]
        for side in SIDES
    }
    if measure and config.needs_base():
        shares["magnitude"] = inverse_weights({side: measure(roles[side]) for side in SIDES})
    if partition:
        b, u, t_b, t_u = [0] * 4
    else:
        b, u, t_b, t_u = config.counts_in(layers)

    def owner(site: Site) -> str:
        if site.layer is None:
            return str(getattr(config, _OUTSIDE_KEYS.get(site.kind, ""), "math"))
        if site.kind in NORMS and config.layer_norms != "with_layer":
            return config.layer_norms
        if partition is not None:
            if side_of(partition, site, layers) == "language":
                return "language"
            return "math"
        if is_outer(site.layer, b, u, layers):
            return "language"
        if is_outer(site.layer, b + t_b, u + t_u, layers):
            return config.zones
        return "math"

    spread: dict[str, dict[str, float]] = {}
    for name, share in shares.items():
        spread[name] = {
            role: part / len(roles[side]) for side, part in share.items() for role in roles[side]
        }
    return weights_by_owner(sites, owner, spread)
