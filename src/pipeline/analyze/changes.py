"""The analyze stage: what training changed, parameter by parameter, and where two experts agree.

Streams a piece of a tensor at a time. A row is an input feature by default, as in the published maps
(papers/decisions.md); a vector is one row, of which the mean absolute change is shown.
"""

from __future__ import annotations

import itertools
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


Pairs = dict[tuple[int, int], dict[str, float]]  # places of two experts -> what they share


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
) -> tuple[list[Change], Pairs]:
    """Change of one tensor in each expert, and for each pair of experts the cosine and the share of conflicting
    entries.

    A conflict is an entry that both moved, in opposite directions.
    """
    count, length = rows_in(base, name, axis)
    number, by_column = len(experts), are_columns(base, name, axis)
    sums, same, size = np.zeros((number, count)), np.zeros(number), 0.0
    dots, conflicts = np.zeros((2, number, number))
    for start, stop, origin, vectors in vector_pieces(experts, base, name):
        size += squared_norm(origin)
        for sums_of_expert, vector in zip(sums, vectors, strict=True):
            add_to_rows(sums_of_expert, np.abs(vector), start, stop, by_column)
        flat = np.reshape(vectors, (number, -1)).astype(np.float64)
        signs = np.sign(flat)
        same += (signs == 0).sum(axis=1)
        dots += flat @ flat.T
        conflicts += (np.abs(signs) @ np.abs(signs).T - signs @ signs.T) / 2
    if not np.isfinite(dots).all():
        refuse_not_finite([base, *experts], [name])
    means, norms, entries = sums / max(1, length), np.sqrt(np.diag(dots)), max(1, count * length)
    above = means > np.reshape(limits, (-1, 1))
    relative = norms / (math.sqrt(size) or math.nan)
    measures = means.sum(axis=1) / max(1, count), above.sum(axis=1) / max(1, count), norms, relative, same / entries
    norm_products = np.outer(norms, norms)
    pairs = {
        (a, b): {
            "cosine": float(dots[a, b] / (norm_products[a, b] or math.nan)),
            "sign_conflicts": float(conflicts[a, b] / entries),
        }
        for a, b in itertools.combinations(range(number), 2)
    }
    return [Change(*map(float, values)) for values in np.transpose(measures)], pairs


def row_key(name: str, site: Site) -> dict[str, Any]:
    """Layer, column and parameter of a row of delta.csv: its layer, its column in the published maps (the rest of its
    name, else), its name."""
    below_layer = name.split(".", 3)[3] if site.layer is not None else name
    layer = "" if site.layer is None else site.layer
    return {"layer": layer, "column": COLUMNS.get(below_layer, below_layer), "parameter": name}
