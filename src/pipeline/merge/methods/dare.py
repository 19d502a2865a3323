"""DARE (Yu et al., 2024): the sum of task vectors after randomly dropping entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import TaskVectors

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Dare(TaskVectors):
    """Add task vectors with randomly dropped entries: base + scale x sum of weights x task vectors.

    Each entry is kept with probability `density`, and divided by `density`. The choice depends on
    `seed`, the parameter and the expert's place.
    """

    method: str = "dare"
    density: float = knob(0.5, gt=0, le=1)
    seed: int = knob(0, ge=0)

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        import numpy as np

        kept = []
        for place, vector in enumerate(vectors):
            generator = np.random.default_rng([self.seed, place, start, *name.encode()])
            mask = generator.random(vector.shape, dtype=np.float32) < self.density
            scaled = vector / np.float32(self.density)
            kept.append(np.where(mask, scaled, np.float32(0)))
        return self.weighted_sum(kept)
