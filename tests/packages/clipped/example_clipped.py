"""Task arithmetic of task vectors whose entries are clipped."""

from dataclasses import dataclass

import numpy as np

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import TaskVectors


@dataclass
class Clipped(TaskVectors):
    method: str = "clipped"
    most: float = knob(0.01, gt=0)  # size of an entry

    def change(self, vectors, name, start):
        return self.weighted_sum([np.clip(vector, -self.most, self.most) for vector in vectors])
