"""WUDI (Cheng et al., 2025, arXiv 2503.08099): the task vector that interferes least with each expert's, by matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import MatrixTaskVectors

if TYPE_CHECKING:
    import numpy as np

RESOLVED = 1e-10  # eigenvalues below this share of the largest are rounding of float32 weights, and taken for 0


@dataclass
class Wudi(MatrixTaskVectors):
    """base + scale x the t that minimises w1 |(t - t1) t1'|^2 / |t1|^2 + w2 ... of each matrix; see docs/merging.md."""

    method: str = "wudi"
    flow: float | None = knob(None, low=0)  # time of the gradient flow from t1 + t2 + ...; null: to the minimum

    def formula(self, roles: Sequence[str]) -> str:
        end = "the least interference" if self.flow is None else f"the gradient flow towards it, time {self.flow:g},"
        return f"base + {self.scale:g} x {end} of {super().formula(roles)}"

    def change_of_matrix(self, vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return least_interference(vectors, weights, self.flow)


def least_interference(vectors: np.ndarray, weights: np.ndarray, flow: float | None = None) -> np.ndarray:
    """The smallest t that minimises sum_i w_i |(t - t_i) t_i'|_F^2 / |t_i|_F^2: the solution of t S = sum_i t_i S_i by
    the pseudoinverse, with S_i = w_i t_i' t_i / |t_i|_F^2 and S their sum (docs/merging.md).

    flow: instead the point at this time of dt/ds = -(half the gradient), from the sum of all t_i on: in an eigenvector
    of S with eigenvalue l, the share exp(-l flow) of the way is left.

    vectors: (experts, rows, columns), none zero, in float64; weights: (experts,). Returns (rows, columns).
    """
    import numpy as np

    sizes = np.sqrt(weights) / np.sqrt(np.einsum("nij,nij->n", vectors, vectors))
    scaled = vectors * sizes[:, None, None]  # S = stacked' stacked
    stacked = scaled.reshape(-1, vectors.shape[2])
    if stacked.shape[0] < stacked.shape[1]:
        values, left = np.linalg.eigh(stacked @ stacked.T)
        kept = values > RESOLVED * values[-1]
        values = values[kept]
        directions = stacked.T @ left[:, kept] / np.sqrt(values)
    else:
        values, directions = np.linalg.eigh(stacked.T @ stacked)
        kept = values > RESOLVED * values[-1]
        values, directions = values[kept], directions[:, kept]
    targets = sum(vector @ (part.T @ (part @ directions)) for vector, part in zip(vectors, scaled, strict=True))
    minimum = targets / values
    if flow is not None:
        minimum += (vectors.sum(axis=0) @ directions - minimum) * np.exp(-values * flow)
    return minimum @ directions.T
