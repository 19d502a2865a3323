"""Task arithmetic (Ilharco et al., 2023): the base and a weighted sum of task vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered
from pipeline.config.training import Partition
from pipeline.merge.weights import expert_weights

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.formulas import Formula, Sources
    from pipeline.merge.merge import Merging


@dataclass
class TaskArithmetic(Merge):
    """base + scale x the weighted sum of task vectors."""

    method: str = "task_arithmetic"
    experts: list[str] = knob(run=True)
    scale: float = 1.0
    weights: list[float] | None = None  # a number an expert; null: 1 each

    fewest = 1

    def references(self) -> References:
        return numbered(self.experts)

    def needs_base(self) -> bool:
        return True

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        expert_weights(self.weights, len(self.experts))

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Merging:
        from pipeline.merge.merge import Merging

        assert base is not None
        numbers = expert_weights(self.weights, len(sources))
        sum_ = " + ".join(f"{number:g} task vector {role}" for role, number in zip(sources, numbers, strict=True))
        rows = [{"where": "everywhere", "what": "all", "weights": {}, "formula": f"base + {self.scale:g} x ({sum_})"}]
        shares = {role: self.scale * number for role, number in zip(sources, numbers, strict=True)}
        changes = dict.fromkeys(base.names, shares)
        formula = task_arithmetic(self, sources, base)
        return Merging(self, {**sources, "base": base}, formula, {}, rows, changes=changes)


def task_arithmetic(config: TaskArithmetic, sources: Sources, base: Source) -> Formula:
    """base + scale x (w1 t1 + w2 t2 + ...), summed from the left (Ilharco et al., 2023)."""
    import numpy as np

    from pipeline.merge.formulas import onto_base, task_vectors, total

    experts, numbers = list(sources.values()), expert_weights(config.weights, len(sources))

    def formula(name: str, start: int, stop: int) -> np.ndarray:
        vectors = task_vectors(experts, base, name, start, stop)
        for vector, number in zip(vectors, numbers, strict=True):
            if number != 1:
                np.multiply(vector, np.float32(number), out=vector)
        return onto_base(total(vectors), config.scale)

    return formula
