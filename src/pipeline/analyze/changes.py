"""The changes by training, parameter by parameter.

Tensors are read piece by piece. A row is an input feature by default, as in the published maps
(papers/decisions.md). A vector is one row, and the mean of its absolute changes is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.merge.adapters import Source
from pipeline.merge.formulas import (
    add_to_rows,
    are_columns,
    refuse_not_finite,
    rows_in,
    squared_norm,
    vector_pieces,
)
from pipeline.models.anatomy import Site

COLUMNS = {  # a parameter of a layer -> its column in the published figures
    "self_attn.q_proj.weight": "attention.wq",
    "self_attn.k_proj.weight": "attention.wk",
    "self_attn.v_proj.weight": "attention.wv",
    "self_attn.o_proj.weight": "attention.wo",
    "mlp.gate_proj.weight": "feed_forward.w1",
    "mlp.up_proj.weight": "feed_forward.w3",
    "mlp.down_proj.weight": "feed_forward.w2",
}


@dataclass
class Change:
    """The change of one tensor in one expert.

    Attributes:
        mean: The mean of the rows' mean absolute changes.
        share: The share of rows whose mean absolute change is above the threshold.
        norm: The Euclidean norm of the change.
        relative: The norm relative to the base's norm; nan if the base's norm is 0.
        same: The share of entries that did not move.
    """

    mean: float
    share: float
    norm: float
    relative: float
    same: float


def tensor_changes(
    experts: Sequence[Source], base: Source, name: str, limits: Sequence[float], axis: str
) -> list[Change]:
    """Return the change of one tensor in each expert.

    Args:
        experts: The experts.
        base: Their base.
        name: The tensor.
        limits: The threshold of each expert.
        axis: The axis of a row.
    """
    count, length = rows_in(base, name, axis)
    by_column = are_columns(base, name, axis)
    sums = np.zeros((len(experts), count))
    squares = np.zeros(len(experts))
    same = np.zeros(len(experts))
    base_square = 0.0
    for start, stop, origin, vectors in vector_pieces(experts, base, name):
        base_square += squared_norm(origin)
        for expert, vector in enumerate(vectors):
            add_to_rows(sums[expert], np.abs(vector), start, stop, by_column)
            squares[expert] += squared_norm(vector)
            same[expert] += np.count_nonzero(vector == 0)
    if not np.isfinite(squares).all():
        refuse_not_finite([base, *experts], [name])
    base_norm = math.sqrt(base_square) or math.nan
    rows, entries = max(1, count), max(1, count * length)
    changes = []
    for expert, limit in enumerate(limits):
        means = sums[expert] / max(1, length)
        norm = float(np.sqrt(squares[expert]))
        mean = float(means.sum()) / rows
        share = float((means > limit).sum()) / rows
        changes.append(Change(mean, share, norm, norm / base_norm, float(same[expert]) / entries))
    return changes


def row_key(name: str, site: Site) -> dict[str, Any]:
    """Return layer, column and parameter of a row of delta.csv.

    The column is the one in the published maps, otherwise the name below the layer.
    """
    layer: int | str = ""
    below_layer = name
    if site.layer is not None:
        layer = site.layer
        below_layer = name.split(".", 3)[3]
    return {"layer": layer, "column": COLUMNS.get(below_layer, below_layer), "parameter": name}
