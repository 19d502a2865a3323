"""TIES (Yadav et al., 2023): its knobs and switches. Its arithmetic is merge/ties.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.task_vectors import TaskVectors

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Computed


@dataclass
class Ties(TaskVectors):
    """TIES as its paper defines it: trim, elect by the sum of signs, mean of those that agree.

    merge=ties_mergekit and merge=ties_peft set the five switches to the definitions of those programs.
    """

    method: str = "ties"
    density: float = knob(0.2, gt=0, le=1)
    scale: float = knob(1.0, gt=0)
    trim: str = knob("model", options=("model", "tensor"))
    # Entries as large as the smallest that is kept: all are kept, more than the density asks for (of bfloat16 weights
    # many are alike), or as many as it asks for, which torch's sort chooses, as in mergekit
    ties_at_threshold: str = knob("keep_all", options=("keep_all", "exact"))
    weigh: str = knob("after", options=("before", "after"))  # the election of signs
    divisor: str = knob("count", options=("count", "weights"))  # of the experts that agree
    zero_sum: str = knob("majority", options=("majority", "plus"))  # the sign elected where the sum is exactly 0

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        super().refuse(partition, layers)
        if self.ties_at_threshold == "exact" and self.trim == "model":
            raise PipelineError(
                "merge.ties_at_threshold=exact counts within a tensor: give merge.trim=tensor with it, or leave it out"
            )

    def formula(self, roles: Sequence[str]) -> str:
        description = f"TIES of {len(roles)} task vectors, density {self.density:g}, trim {self.trim}"
        description += ", exactly so many where entries are tied" if self.ties_at_threshold == "exact" else ""
        if self.weights:
            numbers = " ".join(f"{weight:g}" for weight in self.weights)
            description += f", weights {numbers} {self.weigh} the election, mean over {self.divisor}"
        return description

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Computed:
        from pipeline.merge.merge import Computed
        from pipeline.merge.ties import TiesMerge

        assert base is not None
        ties = TiesMerge(self, sources, base)
        text = f"base + {self.scale:g} x {self.formula(list(sources))}"
        return Computed(ties.formula, text, prepare=ties.prepare, measured=ties.kept_density)
