"""Task arithmetic (Ilharco et al., 2023): the base and a weighted sum of task vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.training import Partition
from pipeline.merge.task_vectors import TaskVectors
from pipeline.merge.weights import Weights, weights_over_depth
from pipeline.models.anatomy import Site, anatomy

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Opened
    from pipeline.merge.merge import Computed
    from pipeline.merge.task_vectors import Change


@dataclass
class TaskArithmetic(TaskVectors):
    """Add weighted task vectors: base + scale x (w1 t1 + w2 t2 + ...), summed from the left.

    For adapters the merge is an adapter again.
    """

    method: str = "task_arithmetic"
    # per expert a number, or a list over depth; null: 1
    weights: list[Any] | None = None  # type: ignore[assignment]

    fewest = 1

    def exact_for_adapters(self) -> bool:
        return True

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        self.weights_in({})

    def weights_in(self, sites: Mapping[str, Site]) -> dict[str, list[float]]:
        """Return the weight of each expert in each parameter."""
        return weights_over_depth(self.weights, len(self.experts), 1.0, sites)

    def decide(self, opened: Opened) -> Computed:
        import numpy as np

        from pipeline.merge.formulas import add_up
        from pipeline.merge.merge import Computed

        weights = self.weights_in(anatomy(opened.experts["0"].names))

        def change_of(name: str) -> Change:
            numbers = [np.float32(weight) for weight in weights[name]]

            def change(vectors: Sequence[np.ndarray], start: int) -> np.ndarray:
                return add_up([v * number for v, number in zip(vectors, numbers, strict=True)])

            return change

        changes: Weights = {}
        for name, numbers in weights.items():
            scaled = [self.scale * number for number in numbers]
            changes[name] = dict(zip(opened.experts, scaled, strict=True))
        return Computed(self.changed_base(opened, change_of), changes=changes)
