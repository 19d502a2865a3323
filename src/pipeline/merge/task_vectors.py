"""The common form of merges of task vectors: base + scale x a function of the task vectors.

A method is a file in `methods/` with a subclass of `TaskVectors`. The subclass defines `change`, a
function of float32 arrays. Reading, casting and writing are done here and by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.merge.weights import expert_weights

if TYPE_CHECKING:
    import numpy as np

    from pipeline.merge.adapters import Opened
    from pipeline.merge.formulas import Rows
    from pipeline.merge.merge import Computed

    # Takes rows of the task vectors, and the index of the first row
    Change = Callable[[Sequence[np.ndarray], int], np.ndarray]


@dataclass
class TaskVectors(Merge):
    """base + scale x change(task vectors)."""

    experts: list[str] = knob(run=True)
    scale: float = 1.0
    weights: list[float] | None = None  # one number per expert; null: 1 each

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return True

    def exact_for_adapters(self) -> bool:
        return False

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        expert_weights(self.weights, len(self.experts))

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        """Return the change of the base, before `scale`, for some rows of a parameter.

        Args:
            vectors: the rows of each expert's task vector, (rows, columns) in float32. They may be
                overwritten.
            name: the parameter.
            start: the index of the first row.
        """
        raise NotImplementedError

    def weighted_sum(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Return w1 x t1 + w2 x t2 + ..., summed from the left, with `weights`."""
        import numpy as np

        from pipeline.merge.formulas import add_up

        numbers = expert_weights(self.weights, len(vectors))
        terms = []
        for vector, number in zip(vectors, numbers, strict=True):
            terms.append(vector * np.float32(number))
        return add_up(terms)

    def decide(self, opened: Opened) -> Computed:
        from pipeline.merge.merge import Computed

        def change_of(name: str) -> Change:
            return lambda vectors, start: self.change(vectors, name, start)

        return Computed(self.changed_base(opened, change_of))

    def changed_base(
        self, opened: Opened, change_of: Callable[[str], Change]
    ) -> Callable[[str], Rows]:
        """Return a function that returns the formula of a parameter: base + scale x change.

        `change_of` returns the change of a parameter.
        """
        from pipeline.merge.formulas import onto, task_vectors

        experts = list(opened.experts.values())

        def formula(name: str) -> Rows:
            change = change_of(name)

            def rows(start: int, stop: int) -> np.ndarray:
                origin, vectors = task_vectors(experts, opened.base, name, start, stop)
                return onto(origin, change(vectors, start), self.scale)

            return rows

        return formula
