"""The analyze stage: what training changed, parameter by parameter.

Streams a piece of a tensor at a time. A row is an input feature by default, as in the published maps
(papers/decisions.md); a vector is one row, of which the mean absolute change is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.merge.adapters import Source
from pipeline.merge.formulas import add_to_rows, are_columns, refuse_not_finite, rows_in, squared_norm, vector_pieces
from pipeline.models.anatomy import Site

COLUMNS = {  # a parameter of a layer -> its column in the published figures
    "self_attn.q_proj.weight": "attention.wq", "self_attn.k_proj.weight": "attention.wk",
    "self_attn.v_proj.weight": "attention.wv", "self_attn.o_proj.weight": "attention.wo",
    "mlp.gate_proj.weight": "feed_forward.w1", "mlp.up_proj.weight": "feed_forward.w3",
    "mlp.down_proj.weight": "feed_forward.w2",
}  # fmt: skip


@dataclass
class Change:
    """One tensor of one expert: norms are Euclidean, `share` is of rows whose mean absolute change is above."""

    mean: float  # of the rows' mean absolute changes
    share: float
    norm: float
    relative: float  # to the base's norm; nan where that is 0
    same: float  # share of entries that did not move


def tensor_changes(
    experts: Sequence[Source], base: Source, name: str, limits: Sequence[float], axis: str
) -> list[Change]:
    """Return the change of one tensor in each expert."""
    count, length = rows_in(base, name, axis)
    by_column = are_columns(base, name, axis)
    sums = np.zeros((len(experts), count))
    squares, same, base_square = np.zeros(len(experts)), np.zeros(len(experts)), 0.0
    for start, stop, origin, vectors in vector_pieces(experts, base, name):
        base_square += squared_norm(origin)
        for expert, vector in enumerate(vectors):
            add_to_rows(sums[expert], np.abs(vector), start, stop, by_column)
            squares[expert] += squared_norm(vector)
            same[expert] += np.count_nonzero(vector == 0)
    if not np.isfinite(squares).all():
        refuse_not_finite([base, *experts], [name])
    means, norms, entries = sums / max(1, length), np.sqrt(squares), max(1, count * length)
    changes = []
    for expert, limit in enumerate(limits):
        changes.append(
            Change(
                mean=float(means[expert].sum()) / max(1, count),
                share=float((means[expert] > limit).sum()) / max(1, count),
                norm=float(norms[expert]),
                relative=float(norms[expert]) / (math.sqrt(base_square) or math.nan),
                same=float(same[expert]) / entries,
            )
        )
    return changes


def row_key(name: str, site: Site) -> dict[str, Any]:
    """Layer, column and parameter of a row of delta.csv: its layer, its column in the published maps (the rest of its
    name, else), its name."""
    below_layer = name.split(".", 3)[3] if site.layer is not None else name
    layer = "" if site.layer is None else site.layer
    return {"layer": layer, "column": COLUMNS.get(below_layer, below_layer), "parameter": name}
