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

KINDS_OF_AGREEMENT = ("cosine", "sign_agreement")


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


@dataclass
class Agreement:
    """Sums over entries, for the cosine and the sign agreement of two experts' task vectors.

    Attributes:
        moved: The number of entries that both experts moved.
        agree: The number of these entries that moved in the same direction.
    """

    dot: float = 0.0
    first_square: float = 0.0
    second_square: float = 0.0
    moved: int = 0
    agree: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.dot + other.dot,
            self.first_square + other.first_square,
            self.second_square + other.second_square,
            self.moved + other.moved,
            self.agree + other.agree,
        )

    @property
    def cosine(self) -> float | None:
        """The cosine of the two task vectors; None if an expert did not move."""
        norms = math.sqrt(self.first_square * self.second_square)
        if norms:
            return self.dot / norms
        return None

    @property
    def sign_agreement(self) -> float | None:
        """The share of the entries moved by both that moved in the same direction.

        None if there are no such entries.
        """
        if self.moved:
            return self.agree / self.moved
        return None


def agreement_of(first: Source, second: Source, base: Source, name: str) -> Agreement:
    """Return how the changes of one tensor agree between two experts."""
    total = Agreement()
    for _, _, _, (one, other) in vector_pieces([first, second], base, name):
        signs = np.sign(one) * np.sign(other)
        dot = float(np.vdot(one.astype(np.float64), other.astype(np.float64)))
        moved = int(np.count_nonzero(signs))
        agree = int(np.count_nonzero(signs > 0))
        total += Agreement(dot, squared_norm(one), squared_norm(other), moved, agree)
    return total


def agreement_facts(
    pairs: Mapping[str, Mapping[str, Agreement]], sites: Mapping[str, Site]
) -> dict[str, Any]:
    """Return cosine and sign agreement of pairs of experts, over all parameters and in each layer.

    `cosine` and `sign_agreement` are means over the pairs, `cosine.3` and `sign_agreement.3` are
    means in layer 3. `pairs` has the values of each pair. A pair without a value, because one
    expert did not move, is left out of the mean.

    Args:
        pairs: name of a pair -> parameter -> agreement.
        sites: parameter -> its place in the model.
    """
    by_pair: dict[str, dict[str, float]] = {}
    by_key: dict[str, list[float]] = {}
    for pair, by_name in pairs.items():
        by_pair[pair] = {}
        for suffix, total in sum_by_layer(by_name, sites).items():
            for kind in KINDS_OF_AGREEMENT:
                value = getattr(total, kind)
                if value is not None:
                    by_pair[pair][kind + suffix] = value
                    by_key.setdefault(kind + suffix, []).append(value)
    means = {key: fmean(values) for key, values in by_key.items()}
    return {**means, "pairs": by_pair}


def sum_by_layer(
    by_name: Mapping[str, Agreement], sites: Mapping[str, Site]
) -> dict[str, Agreement]:
    """Return the sum over all parameters, under "", and over each layer, under ".LAYER"."""
    sums: dict[str, Agreement] = {}
    for name, agreement in by_name.items():
        layer = sites[name].layer
        sums[""] = sums.get("", Agreement()) + agreement
        if layer is not None:
            suffix = f".{layer}"
            sums[suffix] = sums.get(suffix, Agreement()) + agreement
    return sums


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
