"""The settings of TIES (Yadav et al., 2023). Its arithmetic is in merge/ties.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.merge.task_vectors import TaskVectors

if TYPE_CHECKING:
    from pipeline.merge.adapters import Opened
    from pipeline.merge.merge import Computed


@dataclass
class Ties(TaskVectors):
    """Merge with TIES as its paper defines it.

    It trims each task vector, elects the sign of the sum, and averages the experts that agree. The
    trim keeps all entries that are tied at its threshold. `weights` multiply entries after the
    election.
    """

    method: str = "ties"
    density: float = knob(0.2, gt=0, le=1)
    scale: float = knob(1.0, gt=0)

    def decide(self, opened: Opened) -> Computed:
        from pipeline.merge.merge import Computed
        from pipeline.merge.ties import TiesMerge

        ties = TiesMerge(self, opened.experts, opened.base)
        return Computed(ties.formula, prepare=ties.prepare, measured=ties.kept_density)
