"""A merge in words, before it is made: the plan as a table, on the terminal, and as the card of what was merged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.merge.weights import Weights
from pipeline.models.anatomy import TOWER, anatomy

if TYPE_CHECKING:
    from pipeline.config.merging import Merge
    from pipeline.config.training import Partition
    from pipeline.runs.run import Parent

Row = dict[str, Any]


def group_weights(weights: Weights) -> list[Row]:
    """The weights as a table, from the embeddings up; adjacent layers that are alike share a row."""
    places: dict[int | str, dict[str, set[str]]] = {}  # layer, or kind outside the layers -> weights -> kinds
    for name, site in anatomy(weights).items():
        place = places.setdefault(site.kind if site.layer is None else site.layer, {})
        place.setdefault(json.dumps(weights[name]), set()).add(site.kind)

    def kinds_of_weights(place: int | str) -> list[tuple[str, str]]:  # (what, weights)
        kinds_of = places[place]
        return sorted(("all" if len(kinds_of) == 1 else ", ".join(sorted(k)), row) for row, k in kinds_of.items())

    layers = sorted(place for place in places if isinstance(place, int))
    blocks: list[list[Any]] = [list(block) for _, block in itertools.groupby(layers, key=kinds_of_weights)]
    rows: list[Row] = []
    for block in [["embedding"], *blocks, ["final_norm"], ["head"], [TOWER]]:
        if block[0] in places:
            label = block[0]
            if isinstance(label, int):
                label = f"layer {label}" if len(block) == 1 else f"layers {label}-{block[-1]}"
            rows += [
                {"where": label, "what": kinds, "weights": json.loads(row)} for kinds, row in kinds_of_weights(block[0])
            ]
    return rows


def _source_order(item: tuple[str, Any]) -> tuple[int, str, int]:
    side, _, index = item[0].partition(
        "."
    )  # experts by number; math, whose files the merge takes over, before language
    places = {"math": 0, "language": 1, "expert": 2}
    return (int(side) if side.isdigit() else places.get(side, sys.maxsize), side, int(index or 0))


def row_cells(row: Row, parents: Mapping[str, Parent]) -> list[str]:
    """(where, what, weights); experts that have no role but their number by the names of their runs."""
    names = {role: parent.name for role, parent in parents.items() if role.isdigit()}
    sum_ = " + ".join(f"{weight:g} {names.get(source, source)}" for source, weight in row["weights"].items())
    return [row["where"], row["what"], row.get("formula", sum_)]


def print_plan(config: Merge, parents: Mapping[str, Parent], rows: list[Row], size: Mapping[str, int]) -> None:
    """The plan, on standard error."""
    names = ", ".join(f"{role} = {parent.name}" for role, parent in sorted(parents.items(), key=_source_order))
    print(f"merge {config.method}: {names}", file=sys.stderr)
    for place, kinds, weights in (row_cells(row, parents) for row in rows):
        print(f"  {place:<14} {kinds:<24} {weights}", file=sys.stderr)
    print(f"  {format_sizes(size)}", file=sys.stderr)


def format_sizes(size: Mapping[str, int]) -> str:
    megabytes = {key: f"{value / 1e6:,.1f} MB" for key, value in size.items()}
    return f"{megabytes['copied']} copied, {megabytes['read']} read to compute, {megabytes['written']} written"


def recipe_text(
    config: Merge,
    parents: Mapping[str, Parent],
    rows: list[Row],
    size: Mapping[str, int],
    partition: Partition | None = None,
) -> str:
    """Section of a merge's model card: the settings that were read, the parents, and the plan.

    partition: as resolved by `resolve_partition` for the depth of the model.
    """
    knobs = [item.name for item in dataclasses.fields(config) if not item.metadata.get("run")]  # parents stand below
    settings = {f"merge.{key}": getattr(config, key) for key in knobs if key not in config.unread(partition)}
    settings |= {"package": config.package} if config.package else {}
    if partition is not None:
        keys = ("bottom_layers", "top_layers", "all_attention", "all_mlp", "inverse")
        settings |= {"partition": partition.name} | {f"partition.{key}": getattr(partition, key) for key in keys}
    lines = [f"# A merge by {config.method}", "", "| setting | value |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in settings.items()]
    lines += ["", "| source | run |", "|---|---|"]
    by_role = sorted(parents.items(), key=_source_order)
    run_names = {role: getattr(parent, "hub", None) or parent.name for role, parent in by_role}
    lines += [f"| {role} | {name} |" for role, name in run_names.items()]
    lines += ["", "| where | what | weights |", "|---|---|---|"]
    lines += [f"| {' | '.join(row_cells(row, parents))} |" for row in rows]
    return "\n".join([*lines, "", format_sizes(size)]) + "\n"
