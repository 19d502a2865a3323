"""This machine's CPU in the terms of estimate/flops.py: its rates and its memory.

Measured on one thread of an EPYC 9004 with SmolLM2 135M and a Gemma 3 of 270M: products of 576
columns at 7e10 FLOP/s in fp32 and 1.3e11 in bf16, one step of decoding at what its weights,
products and attention take one after the other. Other machines differ by a factor of about two,
which finished runs correct (durations.py).
"""

from __future__ import annotations

import os

from pipeline.estimate.flops import Gpu
from pipeline.models.shape import Shape
from pipeline.train.memory import has_bf16

PEAK, HALF = (
    8e10,
    100,
)  # FLOP/s of a thread in wide products; the width at which half of it is reached
BF16 = {True: 1.8, False: 0.2}  # of the rate of fp32: with instructions for bfloat16, and imitated
BANDWIDTH = 8e9  # bytes a second that a thread reads


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu(shape: Shape, threads: int) -> Gpu:
    """So many threads in the terms of estimate/flops.py.

    What is narrow does not reach the rate of what is wide.
    """
    fp32 = PEAK * shape.width / (shape.width + HALF) * threads
    return Gpu(fp32 * BF16[has_bf16()], fp32, BANDWIDTH, memory(), is_cpu=True)
