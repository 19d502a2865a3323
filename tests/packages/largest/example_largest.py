"""Of each entry, the largest change by any expert."""

from dataclasses import dataclass

import numpy as np

from pipeline.merge.task_vectors import TaskVectors


@dataclass
class Largest(TaskVectors):
    method: str = "largest"

    def change(self, vectors, name, start):
        return np.choose(np.argmax(np.abs(vectors), axis=0), vectors)
