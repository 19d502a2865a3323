"""The changes by training, parameter by parameter, and the agreement of two experts' changes.

Tensors are read piece by piece. A row is an input feature by default, as in the published maps
(papers/decisions.md). A vector is one row, and the mean of its absolute changes is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
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


def agreement_sums(first: Source, second: Source, base: Source, name: str) -> np.ndarray:
    """Return sums over the entries of one tensor, for `agreement_of`.

    They are the sums of the products of two experts' changes, of the squares of each, and the
    numbers of entries that both experts moved, and that they moved in the same direction.
    """
    sums = np.zeros(5)
    for _, _, _, (one, other) in vector_pieces([first, second], base, name):
        signs = np.sign(one) * np.sign(other)
        dot = float(np.vdot(one.astype(np.float64), other.astype(np.float64)))
        moved = np.count_nonzero(signs)
        agree = np.count_nonzero(signs > 0)
        sums += np.array([dot, squared_norm(one), squared_norm(other), moved, agree])
    return sums


def agreement_of(sums: np.ndarray) -> dict[str, float]:
    """Return the cosine and the sign agreement of two experts' task vectors.

    A number is left out if an expert did not move, or if they moved no entry in common.
    """
    dot, first_square, second_square, moved, agree = sums.tolist()
    values = {}
    norms = math.sqrt(first_square * second_square)
    if norms:
        values["cosine"] = dot / norms
    if moved:
        values["sign_agreement"] = agree / moved
    return values


def agreement_facts(
    pairs: Mapping[str, Mapping[str, np.ndarray]], sites: Mapping[str, Site]
) -> dict[str, Any]:
    """Return cosine and sign agreement of pairs of experts, over all parameters and in each layer.

    `cosine` and `sign_agreement` are means over the pairs, `cosine.3` and `sign_agreement.3` are
    means in layer 3. `pairs` has the values of each pair. A pair without a value is left out of
    the mean.

    Args:
        pairs: name of a pair -> parameter -> its `agreement_sums`.
        sites: parameter -> its place in the model.
    """
    by_pair: dict[str, dict[str, float]] = {}
    by_key: dict[str, list[float]] = {}
    for pair, by_name in pairs.items():
        totals: dict[str, np.ndarray] = {"": np.zeros(5)}
        for name, sums in by_name.items():
            totals[""] += sums
            layer = sites[name].layer
            if layer is not None:
                totals.setdefault(f".{layer}", np.zeros(5))
                totals[f".{layer}"] += sums
        by_pair[pair] = {}
        for suffix, total in totals.items():
            for kind, value in agreement_of(total).items():
                by_pair[pair][kind + suffix] = value
                by_key.setdefault(kind + suffix, []).append(value)
    means = {key: fmean(values) for key, values in by_key.items()}
    return {**means, "pairs": by_pair}


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
