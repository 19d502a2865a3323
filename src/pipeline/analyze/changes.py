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
from pipeline.merge.formulas import add_to_rows, refuse_not_finite, rows_in, vector_pieces
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
    shape = base.info(name).shape
    count, length = rows_in(shape, axis)
    sums, squares = np.zeros((len(experts), count)), np.zeros(len(experts))
    same, size = np.zeros(len(experts)), 0.0
    dots = np.zeros((len(experts), len(experts)))
    conflicts = np.zeros((len(experts), len(experts)))
    for start, stop, origin, vectors in vector_pieces(experts, base, name):
        size += squared_norm(origin)
        for index, vector in enumerate(vectors):
            add_to_rows(sums[index], np.abs(vector), start, stop, axis, shape)
            same[index] += np.count_nonzero(vector == 0)
            squares[index] += squared_norm(vector)
            for earlier, other in enumerate(vectors[:index]):
                dots[earlier, index] += float(np.vdot(other.astype(np.float64), vector.astype(np.float64)))
                conflicts[earlier, index] += np.count_nonzero(np.sign(other) * np.sign(vector) < 0)
    if not np.isfinite(squares).all():
        refuse_not_finite([base, *experts], [name])
    entries = max(1, count * length)
    means = sums / max(1, length)
    by_expert = [
        Change(
            float(means[index].mean()) if count else 0.0,
            float((means[index] > limit).mean()) if count else 0.0,
            math.sqrt(squares[index]),
            math.sqrt(squares[index] / size) if size else math.nan,
            float(same[index] / entries),
        )
        for index, limit in enumerate(limits)
    ]
    pairs = {}
    for a, b in itertools.combinations(range(len(experts)), 2):
        norms = math.sqrt(squares[a] * squares[b])
        pairs[a, b] = {
            "cosine": dots[a, b] / norms if norms else math.nan,
            "sign_conflicts": conflicts[a, b] / entries,
        }
    return by_expert, pairs


def squared_norm(values: np.ndarray) -> float:
    exact = values.astype(np.float64)
    return float(np.vdot(exact, exact))


def row_key(name: str, site: Site) -> dict[str, Any]:
    """Layer, column and parameter of a row of delta.csv: its layer, its column in the published maps (the rest of its
    name, else), its name."""
    below_layer = name.split(".", 3)[3] if site.layer is not None else name
    layer = "" if site.layer is None else site.layer
    return {"layer": layer, "column": COLUMNS.get(below_layer, below_layer), "parameter": name}
