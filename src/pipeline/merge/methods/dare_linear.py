"""DARE (Yu et al., 2024): entries of each task vector dropped at random, the others scaled up, then task arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import TaskVectors, random_bits

if TYPE_CHECKING:
    import numpy as np


@dataclass
class DareLinear(TaskVectors):
    """base + scale x (w1 d1 + w2 d2 + ...): d is t / density where an entry is kept, else 0.

    Each entry is kept with probability `density`; merge.seed decides which are.
    """

    method: str = "dare_linear"
    density: float = knob(0.5, above=0, high=1)
    seed: int = knob(0, low=0)

    fewest = 1

    def formula(self, roles: Sequence[str]) -> str:
        return f"{super().formula(roles)}, each at density {self.density:g}"

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        import numpy as np

        last = np.uint32(max(1, round(self.density * 2**32)) - 1)  # of the numbers that keep an entry
        for index, vector in enumerate(vectors):
            mask = random_bits(self.seed, index, name, start, vector.shape) <= last
            np.multiply(vector, np.float32(1 / self.density), out=vector)
            np.multiply(vector, mask, out=vector)
        return self.weighted_sum(vectors)
