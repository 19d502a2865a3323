"""What runs take on a CPU: seconds and bytes by formulas on numbers, of prefill, decoding and training apart.

Measured on one thread of an EPYC 9004 with SmolLM2 135M and a Gemma 3 of 270M: products of 576 columns at 7e10 FLOP/s
in fp32 and 1.3e11 in bf16, one step of decoding at what its weights, products and attention take one after the other.
Other machines differ by a factor of about two, which finished runs correct (history.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pipeline.estimate.flops import LAUNCH, Gpu, QuestionSet
from pipeline.models.shape import Shape
from pipeline.train.memory import WIDTH

PEAK, HALF = 8e10, 100  # FLOP/s of a thread in wide products; the width at which half of it is reached
BF16 = {True: 1.8, False: 0.2}  # of the rate of fp32: with instructions for bfloat16, and imitated
ATTENTION = {"float32": 6e9, "bfloat16": 2.4e9, "float16": 2.4e9}  # FLOP/s of a thread, of one token to all before it
BANDWIDTH = 8e9  # bytes a second that a thread reads
LIBRARIES = 0.7e9  # bytes of Python, torch and transformers
WIDER = 1.6  # activations in fp32 over those of products in bf16


@lru_cache(maxsize=1)
def has_bf16() -> bool:
    """Whether the processor has instructions for products in bfloat16, without importing torch."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16 "))


@lru_cache(maxsize=1)
def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu(shape: Shape, threads: int) -> Gpu:
    """So many threads in the terms of estimate/flops.py. What is narrow does not reach the rate of what is wide."""
    fp32 = PEAK * shape.width / (shape.width + HALF) * threads
    return Gpu(fp32 * BF16[has_bf16()], fp32, BANDWIDTH, memory(), bf16_share=1, fp32_share=1)


def scoring_seconds(
    shape: Shape, kinds: Sequence[QuestionSet], threads: int, dtype: str, batch_size: int, share_prefix: bool
) -> tuple[float, float]:
    """(prefill, decode) of one model.

    Prefill: 2 FLOPs a weight of the layers and 4 s w of attention a token; exemplars once, unless they are not shared
    or layers have a window, which also gives a letter the logits of all tokens. Decode: to eval.max_gen_toks, as among
    the answers of a batch one does not stop; each step reads the weights once, computes products for each answer, and
    attends to all that came before.
    """
    machine, prefill, decode = cpu(shape, threads), 0.0, 0.0
    rate, attention, size = machine.rate(dtype), ATTENTION[dtype] * threads, WIDTH[dtype]
    layer_flops = 2.0 * shape.layers * (shape.attention + shape.mlp)
    head, core = 2.0 * shape.embedding, 4.0 * shape.layers * shape.heads * shape.head_width
    weights = (shape.layers * shape.layer + shape.embedding) * size / machine.bandwidth
    for kind in kinds:
        shared = share_prefix and shape.window is None
        prefix_tokens = (kind.prefixes if shared else kind.questions) * kind.prefix  # tokens of exemplars
        question_tokens = kind.questions * kind.question
        flops = prefix_tokens * (layer_flops + core * kind.prefix) + question_tokens * (
            layer_flops + core * (kind.prefix + kind.question)
        )
        flops += head * (kind.questions if shared or kind.answer else prefix_tokens + question_tokens)
        prefill += flops / rate
        if not kind.answer:
            continue
        batches = kind.prefixes * math.ceil(kind.questions / kind.prefixes / batch_size)
        context = kind.prefix + kind.question + kind.room / 2
        context = context if shape.window is None else min(context, shape.window)
        decode += batches * kind.room * (LAUNCH * shape.layers + weights)
        decode += kind.questions * kind.room * ((layer_flops + head) / rate + core * context / attention)
    return prefill, decode
