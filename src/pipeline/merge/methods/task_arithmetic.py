"""Task arithmetic (Ilharco et al., 2023): the base and a weighted sum of task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.training import Partition
from pipeline.merge.layer_weights import check_layer_weights, spread_weights, with_text_keys
from pipeline.merge.summary import group_weights
from pipeline.merge.task_vectors import TaskVectors, sum_text
from pipeline.merge.weights import Weights, expert_weights

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Computed


@dataclass
class TaskArithmetic(TaskVectors):
    """base + scale x (w1 t1 + w2 t2 + ...), summed from the left. Of adapters it is an adapter again."""

    method: str = "task_arithmetic"
    # {role: {kind: number, list of a number a layer, or anchors {layer: number}}}, in place of `weights`
    layer_weights: Any = None

    fewest = 1

    def __post_init__(self) -> None:
        self.layer_weights = with_text_keys(self.layer_weights)

    def exact_for_adapters(self) -> bool:
        return True

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        super().refuse(partition, layers)
        if self.layer_weights is not None:
            check_layer_weights(self.layer_weights, list(self.references()), layers)

    def shares(self, names: Sequence[str]) -> Weights:
        """Parameter -> role -> weight of the task vector, before `scale`."""
        roles = list(self.references())
        numbers = dict(zip(roles, expert_weights(self.weights, len(roles)), strict=True))
        return spread_weights(numbers, self.layer_weights, names)

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Computed:
        assert base is not None
        shares = self.shares(base.names)
        merge = self.computed(
            sources, base, lambda vectors, name, _: self.weighted_sum(vectors, [*shares[name].values()])
        )
        if self.layer_weights is not None:
            merge.rows = [
                {**row, "weights": {}, "formula": f"base + {self.scale:g} x {sum_text(row['weights'])}"}
                for row in group_weights(shares)
            ]
        merge.changes = {
            name: {role: self.scale * number for role, number in row.items()} for name, row in shares.items()
        }
        return merge
