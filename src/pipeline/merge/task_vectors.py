"""The forms that merges of task vectors share: base + scale x a function of the task vectors, elementwise or by matrix.

A method is a file in `methods/` with a subclass of `TaskVectors` that defines `change`, a function on float32 arrays,
or of `MatrixTaskVectors` with `change_of_matrix`, on float64 matrices. Reading the base and the experts, buffers,
dtypes and writing are done here and by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
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


@dataclass
class MatrixTaskVectors(TaskVectors):
    """base + scale x change: of each matrix of the layers a function of the experts' whole task vectors; of all other
    parameters (embeddings, norms, biases, output head) their weighted mean.

    `weights` are relative: they multiply the experts' terms in the method's sums. An expert that a matrix does not
    differ in from the base has no term there, and where none differs nothing changes.
    """

    fewest = 1

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        numbers = expert_weights(self.weights, len(self.experts))
        if min(numbers, default=1) < 0 or (numbers and not sum(numbers) > 0):
            raise PipelineError(f"merge.weights={self.weights}: merge={self.method} needs weights from 0 on, not all 0")

    def change_of_matrix(self, vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The change of the base, before `scale`, of one matrix (output by input features), (rows, columns) in float64.

        vectors: the task vectors that are not zero, (experts, rows, columns) in float64. weights: (experts,).
        """
        raise NotImplementedError(f"merge={self.method} defines no change_of_matrix()")

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Merging:
        import numpy as np
        from threadpoolctl import threadpool_limits

        from pipeline.merge.formulas import WholeTensor, onto_base, task_vectors, whole_task_vectors
        from pipeline.merge.merge import Merging
        from pipeline.models.anatomy import anatomy
        from pipeline.models.floats import buffers

        assert base is not None
        self.refuse(partition, None)
        threadpool_limits(1, "blas")  # the same bits for any `threads`, which compute matrices side by side
        experts, weights = list(sources.values()), np.array(expert_weights(self.weights, len(sources)))
        in_layers = {name for name, site in anatomy(base.names).items() if site.layer is not None}

        def whole_change(name: str) -> np.ndarray:
            vectors = whole_task_vectors(experts, base, name)
            terms = weights * vectors.any(axis=(1, 2)) > 0
            return self.change_of_matrix(vectors[terms], weights[terms]) if terms.any() else np.zeros(vectors.shape[1:])

        changes = WholeTensor(whole_change)

        def formula(name: str, start: int, stop: int) -> np.ndarray:
            if name not in in_layers or len(base.info(name).shape) != 2:
                mean = self.weighted_sum(task_vectors(experts, base, name, start, stop))
                return onto_base(mean, self.scale / float(weights.sum()))
            change = changes(name)[start:stop]
            rows = buffers("total", change.shape)
            np.copyto(rows, change, casting="same_kind")
            base.rows(name, start, stop, buffers("base", change.shape))
            return onto_base(rows, self.scale)

        rows = [
            {"where": "all layers", "what": "matrices", "weights": {}, "formula": self.formula(list(sources))},
            {"where": "everywhere", "what": "all else", "weights": {},
             "formula": f"base + {self.scale:g} x mean of {super().formula(list(sources))}"},
        ]  # fmt: skip
        return Merging(self, {**sources, "base": base}, formula, {}, rows)


def random_bits(seed: int, expert: int, name: str, start: int, shape: tuple[int, int]) -> np.ndarray:
    """A uint32 for each entry of the rows from `start` on of a parameter, (rows, columns), a buffer.

    Row by row from Philox, keyed by (seed, expert, name) and the row: the same however many threads compute them, and
    in whatever pieces. Its raw stream is the same in all versions of NumPy.
    """
    import numpy as np

    from pipeline.models.floats import buffers

    key = int.from_bytes(hashlib.sha256(f"{seed} {expert} {name}".encode()).digest()[:8], "little")
    bits = buffers("bits", shape, np.uint32)
    for row in range(shape[0]):
        raw = np.random.Philox(key=key << 64 | start + row).random_raw((shape[1] + 1) // 2)
        bits[row] = raw.astype("<u8", copy=False).view("<u4")[: shape[1]]
    return bits
