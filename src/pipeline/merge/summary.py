"""The plan of a merge as a table for the terminal."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.models.anatomy import TOWER, anatomy

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Parent

Row = dict[str, Any]


def group_weights(merge: Merging) -> list[Row]:
    """Return the weights of a merge as a table from the embeddings up.

    Equal adjacent layers share a row. Parameters that a formula computes are left out.
    """
    weights = merge.method.weights
    # place -> weights as JSON -> kinds of parameters
    places = defaultdict[int | str, dict[str, set[str]]](lambda: defaultdict(set))
    for name, site in anatomy(merge.names).items():
        if name not in weights:
            continue
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


def plan_text(merge: Merging, parents: Mapping[str, Parent], rows: list[Row], done: str) -> str:
    """Return the plan of a merge as text: its sources, its parameters, and what is written.

    Experts whose role is only a number are shown by the names of their runs.

    Args:
        merge: the merge.
        parents: the runs or models of its sources, by role.
        rows: the weights of the parameters that are weighted sums (`group_weights`).
        done: a description of the merge.
    """
    sources = []
    for role in (*merge.config.references(), "base"):
        if role in parents:
            parent = parents[role]
            sources.append(f"{role} = {getattr(parent, 'hub', None) or parent.name}")
    names = {}
    for role, parent in parents.items():
        if role.isdigit():
            names[role] = parent.name
    lines = [f"merge {merge.config.method}: {', '.join(sources)}", f"  {done}"]
    for row in rows:
        terms = []
        for role, weight in row["weights"].items():
            terms.append(f"{weight:g} {names.get(role, role)}")
        lines.append(f"  {row['where']:<14} {row['what']:<24} {' + '.join(terms)}")
    lines.append(f"  stored in {merge.stored_as}")
    lines += [f"  note: {note}" for note in merge.notes]
    return "\n".join(lines)
