"""What training changed, parameter by parameter, and how the changes of two experts agree.

Streams a piece of a tensor at a time. A row is an input feature by default, as in the published
maps (papers/decisions.md); a vector is one row, of which the mean absolute change is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    """One tensor of one expert: norms are Euclidean, `share` is of rows whose mean absolute change
    is above.
    """

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


@dataclass
class Agreement:
    """Sums over entries from which cosine and sign agreement of the task vectors of two experts
    follow.
    """

    dot: float = 0.0
    first_square: float = 0.0
    second_square: float = 0.0
    moved: int = 0  # entries that both experts moved
    agree: int = 0  # of these, entries that both moved in the same direction

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(self))
        )

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the two task vectors; None if an expert did not move."""
        norms = math.sqrt(self.first_square * self.second_square)
        if norms:
            return self.dot / norms
        return None

    @property
    def sign_agreement(self) -> float | None:
        """Return the share of entries moved by both that moved in the same direction; None if there
        is none.
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
        moved, agree = int(np.count_nonzero(signs)), int(np.count_nonzero(signs > 0))
        total += Agreement(dot, squared_norm(one), squared_norm(other), moved, agree)
    return total


def agreement_facts(
    pairs: Mapping[str, Mapping[str, Agreement]], sites: Mapping[str, Site]
) -> dict[str, Any]:
    """Return the facts of pairs of experts: cosine and sign agreement, over all parameters and in
    each layer.

    `cosine` and `sign_agreement` are the means over the pairs, `cosine.3` and `sign_agreement.3`
    those of layer 3. `pairs` has them for each pair. A pair without a value, as one expert did not
    move, is left out of the mean.

    Args:
        pairs: name of a pair -> parameter -> agreement.
    """
    by_pair: dict[str, dict[str, float]] = {}
    for pair, by_name in pairs.items():
        sums: dict[str, Agreement] = {}
        for name, agreement in by_name.items():
            layer = sites[name].layer
            for key in ["", *([] if layer is None else [f".{layer}"])]:
                sums[key] = sums.get(key, Agreement()) + agreement
        values = {}
        for key, total in sums.items():
            for kind in KINDS_OF_AGREEMENT:
                values[f"{kind}{key}"] = getattr(total, kind)
        by_pair[pair] = {key: value for key, value in values.items() if value is not None}
    means: dict[str, float] = {}
    for key in dict.fromkeys(key for values in by_pair.values() for key in values):
        means[key] = fmean(values[key] for values in by_pair.values() if key in values)
    return {**means, "pairs": by_pair}


def row_key(name: str, site: Site) -> dict[str, Any]:
    """Layer, column and parameter of a row of delta.csv: its layer, its column in the published
    maps (the rest of its name, else), its name.
    """
    if site.layer is not None:
        below_layer = name.split(".", 3)[3]
    else:
        below_layer = name
    layer = "" if site.layer is None else site.layer
    return {"layer": layer, "column": COLUMNS.get(below_layer, below_layer), "parameter": name}
