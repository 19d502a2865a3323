"""The form that merges of task vectors share: base + scale x an elementwise function of the task vectors.

A method is a file in `methods/` with a subclass of `TaskVectors` that defines `change`, a function on float32 arrays.
Reading the base and the experts, buffers, dtypes and writing are done here and by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.merge.weights import expert_weights

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Merging


@dataclass
class TaskVectors(Merge):
    """base + scale x change(task vectors)."""

    experts: list[str] = knob(run=True)
    scale: float = 1.0
    weights: list[float] | None = None  # a number an expert; null: 1 each

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return True

    def exact_for_adapters(self) -> bool:
        return False

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        expert_weights(self.weights, len(self.experts))

    def formula(self, roles: Sequence[str]) -> str:
        """What is added to the base, in words, for the printed plan. Of a method of another package: its name."""
        if not type(self).__module__.startswith("pipeline."):
            return f"{self.method}({', '.join(f'task vector {role}' for role in roles)})"
        return sum_text(dict(zip(roles, expert_weights(self.weights, len(roles)), strict=True)))

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        """The change of the base, before `scale`, of the rows from `start` on of the parameter `name`.

        vectors: the same rows of each expert's task vector, (rows, columns) in float32; they may be overwritten.
        """
        raise NotImplementedError(f"merge={self.method} defines no change()")

    def weighted_sum(self, vectors: Sequence[np.ndarray], numbers: Sequence[float] | None = None) -> np.ndarray:
        """w1 x t1 + w2 x t2 + ..., from the left, with `weights` or the numbers given; overwrites `vectors`."""
        import numpy as np

        from pipeline.merge.formulas import sum_vectors

        for vector, number in zip(vectors, numbers or expert_weights(self.weights, len(vectors)), strict=True):
            if number != 1:
                np.multiply(vector, np.float32(number), out=vector)
        return sum_vectors(vectors)

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Merging:
        from pipeline.merge.formulas import onto_base, task_vectors
        from pipeline.merge.merge import Merging

        assert base is not None
        experts = list(sources.values())

        def computed(name: str, start: int, stop: int) -> np.ndarray:
            vectors = task_vectors(experts, base, name, start, stop)
            return onto_base(self.change(vectors, name, start), self.scale)

        description = f"base + {self.scale:g} x {self.formula(list(sources))}"
        rows = [{"where": "everywhere", "what": "all", "weights": {}, "formula": description}]
        return Merging(self, {**sources, "base": base}, computed, {}, rows)


def sum_text(numbers: Mapping[str, float]) -> str:
    """A weighted sum of task vectors in words: role -> weight."""
    return f"({' + '.join(f'{number:g} task vector {role}' for role, number in numbers.items())})"
