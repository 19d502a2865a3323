"""The plan of a merge as a table for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.models.anatomy import TOWER, anatomy

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Parent

Row = dict[str, Any]
Shares = tuple[tuple[str, float], ...]  # the weight of each role


def group_weights(merge: Merging) -> list[Row]:
    """Return the weights of a merge as a table from the embeddings up.

    Equal adjacent layers share a row. Parameters that a formula computes are left out.
    """
    weights = merge.method.weights
    # place -> weights -> kinds of parameters
    places: dict[int | str, dict[Shares, set[str]]] = {}
    for name, site in anatomy(merge.names).items():
        if name not in weights:
            continue
        place = site.kind if site.layer is None else site.layer
        of_place = places.setdefault(place, {})
        of_place.setdefault(tuple(weights[name].items()), set()).add(site.kind)
    layers = sorted(place for place in places if isinstance(place, int))
    rows = _rows("embedding", places.get("embedding", {}))
    for of_layer, block in itertools.groupby(layers, key=places.__getitem__):
        first, *further = block
        label = f"layer {first}"
        if further:
            label = f"layers {first}-{further[-1]}"
        rows += _rows(label, of_layer)
    for name in ("final_norm", "head", TOWER):
        rows += _rows(name, places.get(name, {}))
    return rows


def _rows(label: str, of_place: Mapping[Shares, set[str]]) -> list[Row]:
    rows = []
    for shares, kinds in of_place.items():
        what = "all"
        if len(of_place) > 1:
            what = ", ".join(sorted(kinds))
        rows.append({"where": label, "what": what, "weights": dict(shares)})
    return sorted(rows, key=lambda row: row["what"])


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
