"""Task arithmetic (Ilharco et al., 2023): the base and a weighted sum of task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.training import Partition
from pipeline.merge.task_vectors import TaskVectors

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Computed


@dataclass
class TaskArithmetic(TaskVectors):
    """base + scale x (w1 t1 + w2 t2 + ...), summed from the left. Of adapters it is an adapter again."""

    method: str = "task_arithmetic"

    fewest = 1

    def exact_for_adapters(self) -> bool:
        return True

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        return self.weighted_sum(vectors)

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Computed:
        merge = super().decide(sources, base, partition, threads)
        shares = {role: self.scale * number for role, number in self.numbers(list(sources)).items()}
        merge.changes = dict.fromkeys(sources["0"].names, shares)
        return merge
