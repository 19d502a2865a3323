"""The rates and the memory of this machine's CPU, in the form of estimate/flops.py.

Measured on one thread of an EPYC 9004 with SmolLM2 135M and a Gemma 3 of 270M: products of 576
columns take 7e10 FLOP/s in fp32 and 1.3e11 in bf16. A decoding step takes the sum of the times of
its weights, products and attention. Other machines differ by a factor of about two, which finished
runs correct (durations.py).
"""

from __future__ import annotations

import os

from pipeline.estimate.flops import Gpu
from pipeline.models.shape import Shape
from pipeline.train.memory import has_bf16

PEAK = 8e10  # FLOP/s of a thread in wide products
HALF = 100  # the width at which half of PEAK is reached
BF16 = {True: 1.8, False: 0.2}  # relative to fp32, with and without instructions for bfloat16
BANDWIDTH = 8e9  # bytes per second that a thread reads


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu(shape: Shape, threads: int) -> Gpu:
    """Return the profile of some threads of this CPU. Narrow products have lower rates."""
    fp32 = PEAK * shape.width / (shape.width + HALF) * threads
    return Gpu(fp32 * BF16[has_bf16()], fp32, BANDWIDTH, memory(), is_cpu=True)
