"""DARE (Yu et al., 2024): of each task vector a random share of the entries, divided by it.

Then task arithmetic.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.merge.task_vectors import TaskVectors


@dataclass
class DareLinear(TaskVectors):
    method: str = "dare_linear"
    density: float = 0.5

    def change(self, vectors, name, start):
        random = np.random.default_rng([start, *name.encode()])  # the same in whatever thread
        return self.weighted_sum(
            [v * (random.random(v.shape, "f4") < self.density) / self.density for v in vectors]
        )
