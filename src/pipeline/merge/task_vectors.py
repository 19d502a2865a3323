"""The form that merges of task vectors share: base + scale x an elementwise function of the task
vectors.

A method is a file in `methods/` with a subclass of `TaskVectors` that defines `change`, a function
on float32 arrays. Reading the base and the experts, dtypes and writing are done here and by the
caller.
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

    from pipeline.merge.adapters import Source
    from pipeline.merge.formulas import Rows
    from pipeline.merge.merge import Computed

    Change = Callable[
        [Sequence[np.ndarray], int], np.ndarray
    ]  # rows of the task vectors, the first one's place


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

    def numbers(self, roles: Sequence[str]) -> dict[str, float]:
        """Role -> its number in `weights`."""
        return dict(zip(roles, expert_weights(self.weights, len(roles)), strict=True))

    def formula(self, roles: Sequence[str]) -> str:
        """What is added to the base, in words, for the printed plan.

        Of a method of another package: its name.
        """
        if not type(self).__module__.startswith("pipeline."):
            return f"{self.method}({', '.join(f'task vector {role}' for role in roles)})"
        terms = [f"{number:g} task vector {role}" for role, number in self.numbers(roles).items()]
        return f"({' + '.join(terms)})"

    def change(self, vectors: Sequence[np.ndarray], name: str, start: int) -> np.ndarray:
        """The change of the base, before `scale`, of the rows from `start` on of the parameter
        `name`.

        vectors: the same rows of each expert's task vector, (rows, columns) in float32; they may be
            overwritten.
        """
        raise NotImplementedError(f"merge={self.method} defines no change()")

    def weighted_sum(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """w1 x t1 + w2 x t2 + ..., from the left, with `weights`."""
        import numpy as np

        from pipeline.merge.formulas import add_up

        numbers = expert_weights(self.weights, len(vectors))
        return add_up(
            [vector * np.float32(number) for vector, number in zip(vectors, numbers, strict=True)]
        )

    def decide(
        self,
        sources: dict[str, Source],
        base: Source | None,
        partition: Partition | None,
        threads: int | None,
    ) -> Computed:
        from pipeline.merge.merge import Computed

        assert base is not None

        def change_of(name: str) -> Change:
            return lambda vectors, start: self.change(vectors, name, start)

        formula = changed_base(list(sources.values()), base, change_of, self.scale)
        return Computed(formula, f"base + {self.scale:g} x {self.formula(list(sources))}")


def changed_base(
    experts: Sequence[Source], base: Source, change_of: Callable[[str], Change], scale: float
) -> Callable[[str], Rows]:
    """Return the formula of each parameter: base + scale x the change that its task vectors give.

    Args:
        change_of: gives the change of a parameter, from the rows of its task vectors and the first
            row's place.
    """
    from pipeline.merge.formulas import onto, task_vectors

    def formula(name: str) -> Rows:
        change = change_of(name)

        def rows(start: int, stop: int) -> np.ndarray:
            origin, vectors = task_vectors(experts, base, name, start, stop)
            return onto(origin, change(vectors, start), scale)

        return rows

    return formula
