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
    """Return the weights as a table, from the embeddings up; adjacent layers that are alike share a
    row.
    """
    places = defaultdict[int | str, dict[str, set[str]]](
        lambda: defaultdict(set)
    )  # place -> weights -> kinds
    for name, site in anatomy(weights).items():
        places[site.kind if site.layer is None else site.layer][json.dumps(weights[name])].add(
            site.kind
        )
    tables = {
        place: sorted(
            ("all" if len(of) == 1 else ", ".join(sorted(kinds)), row) for row, kinds in of.items()
        )
        for place, of in places.items()
    }
    layers = sorted(place for place in places if isinstance(place, int))
    rows: list[Row] = []
    in_order: list[int | str] = ["embedding", *layers, "final_norm", "head", TOWER]
    for (_, table), block in itertools.groupby(
        in_order, key=lambda place: (isinstance(place, int) or place, tables.get(place, []))
    ):
        first, *further = block
        if isinstance(first, str):
            label = first
        else:
            if further:
                label = f"layers {first}-{further[-1]}"
            else:
                label = f"layer {first}"
        rows += [
            {"where": label, "what": kinds, "weights": json.loads(row)} for kinds, row in table
        ]
    return rows


def plan_text(
    config: Merge,
    parents: Mapping[str, Parent],
    rows: list[Row],
    size: Mapping[str, int],
    dtype: str,
) -> str:
    """Return the plan of a merge: its sources in order, what becomes of which parameters, and what
    is written in which dtype.

    Experts that have no role but their number are shown by the names of their runs.
    """
    roles = []
    for role in (*config.references(), "base"):
        if role in parents:
            roles.append(role)
    names = {}
    for role, parent in parents.items():
        if role.isdigit():
            names[role] = parent.name
    lines = []
    for row in rows:
        sum_ = " + ".join(
            f"{weight:g} {names.get(source, source)}" for source, weight in row["weights"].items()
        )
        lines.append(f"  {row['where']:<14} {row['what']:<24} {row.get('formula', sum_)}")
    given = ", ".join(
        f"{role} = {getattr(parents[role], 'hub', None) or parents[role].name}" for role in roles
    )
    sizes = ", ".join(f"{count / 1e6:,.1f} MB {done}" for done, count in size.items())
    return "\n".join([f"merge {config.method}: {given}", *lines, f"  {sizes}, in {dtype}"])
