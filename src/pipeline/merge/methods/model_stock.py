"""Model Stock (Jang et al., 2024): the experts' average, moved towards the base by their angle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.task_vectors import TaskVectors

if TYPE_CHECKING:
    from pipeline.merge.adapters import Opened, Source
    from pipeline.merge.merge import Computed
    from pipeline.merge.task_vectors import Change

# As in mergekit: the least product of norms, and the least denominator of t, below which t is 0
SMALLEST = 1e-6


@dataclass
class ModelStock(TaskVectors):
    """Add a share of the mean task vector, for each tensor: base + t x mean(task vectors).

    t = N cos / (1 + (N - 1) cos) for N experts. cos is the mean cosine of two task vectors over all
    pairs of experts, as in mergekit. The paper has two experts.
    """

    method: str = "model_stock"

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if self.weights is not None or self.scale != 1:
            raise PipelineError(
                "merge=model_stock computes its weights. Leave merge.weights and merge.scale out."
            )

    def decide(self, opened: Opened) -> Computed:
        import numpy as np

        from pipeline.merge.formulas import add_up
        from pipeline.merge.merge import Computed

        experts = list(opened.experts.values())

        def change_of(name: str) -> Change:
            share = np.float32(share_of_mean(experts, opened.base, name) / len(experts))
            return lambda vectors, _: add_up(vectors) * share

        return Computed(self.changed_base(opened, change_of))


def share_of_mean(experts: Sequence[Source], base: Source, name: str) -> float:
    """Return t, the share of the mean task vector of a tensor."""
    import numpy as np

    from pipeline.merge.formulas import vector_pieces

    count = len(experts)
    dots = np.zeros((count, count))
    for _, _, _, vectors in vector_pieces(experts, base, name):
        flat = np.reshape(vectors, (count, -1)).astype(np.float64)
        dots += flat @ flat.T
    norms = np.sqrt(np.diag(dots))
    cosines = []
    for one, other in itertools.combinations(range(count), 2):
        product = max(norms[one] * norms[other], SMALLEST)
        cosine = float(dots[one, other] / product)
        cosines.append(min(1.0, max(-1.0, cosine)))
    mean = fmean(cosines)
    denominator = 1 + (count - 1) * mean
    if abs(denominator) >= SMALLEST:
        return count * mean / denominator
    return 0.0
