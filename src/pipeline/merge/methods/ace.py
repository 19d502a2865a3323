"""ACE (Xu et al., 2026, arXiv 2603.02945): experts weighted by input covariances that their task vectors estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import MatrixTaskVectors

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Ace(MatrixTaskVectors):
    """base + scale x (t1 C1 + t2 C2 + ...) (C1 + C2 + ... + their common part)^-1, by matrix; see docs/merging.md."""

    method: str = "ace"
    epsilon: float = knob(0.01, above=0)  # added to the diagonal of each covariance
    # variation of the logarithms of their norms above which covariances are normalised
    heterogeneity: float = knob(0.3, low=0)
    top: float = knob(0.3, above=0, high=1)  # share of the singular values that the refinement of such matrices keeps

    def formula(self, roles: Sequence[str]) -> str:
        return f"base + {self.scale:g} x the mean by estimated covariance of {super().formula(roles)}"

    def change_of_matrix(self, vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
        import numpy as np

        centred = vectors - vectors.mean(axis=1, keepdims=True)
        covariances = centred.transpose(0, 2, 1) @ centred
        ridges = np.full(len(vectors), self.epsilon)
        sizes = np.einsum("nij,nij->n", vectors, vectors)
        normalised = size_variation(sizes) > self.heterogeneity
        if normalised:
            traces = np.trace(covariances, axis1=1, axis2=2) + 1e-12
            covariances, ridges = covariances / traces[:, None, None], ridges / traces
        covariances, ridges = weights[:, None, None] * covariances, weights * ridges
        common = covariances.sum(axis=0) / (sizes.mean() if normalised else 1)
        identity = np.eye(vectors.shape[2])
        total = covariances.sum(axis=0) + ridges.sum() * identity
        weighted = (vectors @ covariances + ridges[:, None, None] * vectors).sum(axis=0)
        merged = np.linalg.solve((total + common.mean(axis=0)).T, weighted.T).T
        if not normalised:
            return merged
        residual = (vectors @ (covariances - total / len(vectors))).sum(axis=0)
        return merged + leading_directions(residual + merged, self.top)


def size_variation(sizes: np.ndarray) -> float:
    """The variance of the logarithms of the task vectors' squared norms over their squared mean; 0 for one expert."""
    import numpy as np

    logarithms = np.log(sizes)
    return float(logarithms.var(ddof=1) / (logarithms.mean() ** 2 + 1e-12)) if len(sizes) > 1 else 0.0


def leading_directions(matrix: np.ndarray, share: float) -> np.ndarray:
    """The leading `share` of a matrix's singular directions, at least one, all with the mean of their values."""
    import numpy as np

    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    count = max(1, int(share * len(values)))
    return values[:count].mean() * (left[:, :count] @ right[:count])
