"""The plan of a merge as a table for the terminal."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.merge.weights import Weights
from pipeline.models.anatomy import TOWER, anatomy

if TYPE_CHECKING:
    from pipeline.config.merging import Merge
    from pipeline.runs.run import Parent

Row = dict[str, Any]


def group_weights(weights: Weights) -> list[Row]:
    """Return the weights as a table from the embeddings up; equal adjacent layers share a row."""
    # place -> weights as JSON -> kinds of parameters
    places = defaultdict[int | str, dict[str, set[str]]](lambda: defaultdict(set))
    for name, site in anatomy(weights).items():
        place: int | str = site.kind
        if site.layer is not None:
            place = site.layer
        places[place][json.dumps(weights[name])].add(site.kind)
    tables = {place: _table(of_place) for place, of_place in places.items()}
    layers = sorted(place for place in places if isinstance(place, int))
    rows = _rows("embedding", tables.get("embedding", []))
    for table, block in itertools.groupby(layers, key=tables.__getitem__):
        first, *further = block
        label = f"layer {first}"
        if further:
            label = f"layers {first}-{further[-1]}"
        rows += _rows(label, table)
    for name in ("final_norm", "head", TOWER):
        rows += _rows(name, tables.get(name, []))
    return rows


def _table(of_place: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return (kinds of parameters, their weights as JSON), sorted."""
    if len(of_place) == 1:
        return [("all", weights) for weights in of_place]
    return sorted((", ".join(sorted(kinds)), weights) for weights, kinds in of_place.items())


def _rows(label: str, table: list[tuple[str, str]]) -> list[Row]:
    rows = []
    for kinds, weights in table:
        rows.append({"where": label, "what": kinds, "weights": json.loads(weights)})
    return rows


def plan_text(
    config: Merge,
    parents: Mapping[str, Parent],
    rows: list[Row],
    size: Mapping[str, int],
    dtype: str,
) -> str:
    """Return the plan of a merge as text: its sources, its parameters, and what is written.

    Experts whose role is only a number are shown by the names of their runs.

    `size` has the bytes that are copied and written.
    """
    sources = []
    for role in (*config.references(), "base"):
        if role in parents:
            parent = parents[role]
            sources.append(f"{role} = {getattr(parent, 'hub', None) or parent.name}")
    names = {}
    for role, parent in parents.items():
        if role.isdigit():
            names[role] = parent.name
    lines = [f"merge {config.method}: {', '.join(sources)}"]
    for row in rows:
        terms = []
        for role, weight in row["weights"].items():
            terms.append(f"{weight:g} {names.get(role, role)}")
        where, what = row["where"], row["what"]
        formula = row.get("formula", " + ".join(terms))
        lines.append(f"  {where:<14} {what:<24} {formula}")
    sizes = []
    for done, count in size.items():
        sizes.append(f"{count / 1e6:,.1f} MB {done}")
    lines.append(f"  {', '.join(sizes)}, in {dtype}")
    return "\n".join(lines)
