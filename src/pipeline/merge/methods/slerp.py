"""SLERP (Shoemake, 1985): two experts interpolated along the arc between them, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.merge.adapters import Opened, Source
    from pipeline.merge.formulas import Rows
    from pipeline.merge.merge import Computed

NEARLY_COLINEAR = 0.9995  # |cosine| above which the arc is a line: mergekit's dot_threshold
EPS = 1e-8  # a norm up to it counts as 1, as in mergekit


@dataclass
class Slerp(Merge):
    """Interpolate from the first expert (t = 0) to the second (t = 1) as mergekit does.

    mergekit's base model is our first expert. Tensors whose |cosine| is above 0.9995 are
    interpolated linearly. Most tensors of experts of one base are.
    """

    method: str = "slerp"
    experts: list[str] = knob(run=True)
    t: float = knob(0.5, ge=0, le=1)

    def references(self) -> References:
        if len(self.experts) != 2:
            raise PipelineError(
                f"merge.experts={self.experts} has {len(self.experts)} runs. Give two for"
                " merge=slerp."
            )
        return numbered_references(self.experts)

    def exact_for_adapters(self) -> bool:
        return False

    def decide(self, opened: Opened) -> Computed:
        from pipeline.merge.formulas import weighted_sum
        from pipeline.merge.merge import Computed

        first, second = opened.experts.values()

        def formula(name: str) -> Rows:
            a, b = shares_on_the_arc(first, second, name, self.t)
            return lambda start, stop: weighted_sum([(a, first), (b, second)], name, start, stop)

        return Computed(formula)


def shares_on_the_arc(first: Source, second: Source, name: str, t: float) -> tuple[float, float]:
    """Return the weights of two tensors, seen as vectors with the angle theta between them.

    They are sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta). If sin(theta) is near 0,
    they are 1 - t and t.
    """
    import numpy as np

    from pipeline.models.arrays import pieces

    sums = np.zeros(3)  # a.a, b.b, a.b
    for piece in pieces(first.info(name).shape):
        a = first.rows(name, *piece).astype(np.float64)
        b = second.rows(name, *piece).astype(np.float64)
        sums += [np.vdot(a, a), np.vdot(b, b), np.vdot(a, b)]
    norms = [norm if norm > EPS else 1.0 for norm in np.sqrt(sums[:2])]
    product = float(sums[2] / norms[0] / norms[1])
    cosine = min(1.0, max(-1.0, product))
    if abs(cosine) > NEARLY_COLINEAR:
        return 1 - t, t
    theta = math.acos(cosine)
    first_sine, second_sine = math.sin((1 - t) * theta), math.sin(t * theta)
    return first_sine / math.sin(theta), second_sine / math.sin(theta)
