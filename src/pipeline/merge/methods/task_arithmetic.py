"""Task arithmetic (Ilharco et al., 2023): the base and a weighted sum of task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.config.training import Partition
from pipeline.merge.task_vectors import TaskVectors
from pipeline.merge.weights import expert_weights

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Merging


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
    ) -> Merging:
        merge = super().decide(sources, base, partition, threads)
        numbers = expert_weights(self.weights, len(sources))
        shares = {role: self.scale * number for role, number in zip(sources, numbers, strict=True)}
        return replace(merge, changes=dict.fromkeys(merge.names, shares))
