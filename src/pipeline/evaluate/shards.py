"""Several GPUs: each holds the model, and the questions of a task are dealt out among them.

Whole processes and plain lists of requests, so that what answers them, with its prefixes and batches, is the same as on
one GPU. Without a GPU the processes share the CPU, which is for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance

from pipeline.errors import PipelineError


class Shardable(Protocol):
    """A model whose questions may be dealt out: it has the harness' methods, and says which answers ran out."""

    share_prefix: bool
    helpers: Helpers | None
    ran_out: dict[tuple[str, str], bool]
    engine: Any  # its batch_size is halved where memory runs out
    processes: int  # that its progress stands for


_helper: Any = None  # the model of a helper's own process


class Helpers:
    """`count` processes, each with the model that `load()` gives, on the GPUs after the first."""

    def __init__(self, load: Callable[[], Shardable], count: int) -> None:
        gpus = torch.cuda.device_count()
        if gpus and count >= gpus:
            raise PipelineError(f"eval.shards={count + 1}, but {gpus} GPUs are visible: ask for at most {gpus}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(gpus)]
        spawn = get_context("spawn")
        self.load = load
        self.pools = [
            ProcessPoolExecutor(1, spawn, _begin, (names[index] if gpus else None,)) for index in range(1, count + 1)
        ]

    def answer(self, lm: Shardable, method: str, requests: list[Instance]) -> list[Any]:
        """The answers of `lm` and its helpers to a part of the requests each, in the order of the requests."""
        parts = len(self.pools) + 1
        cuts = [round(len(requests) * part / parts) for part in range(parts + 1)]
        own_part, *parts_of_helpers = [requests[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
        waiting = [
            pool.submit(_answer, self.load, method, [request.args for request in part], lm.share_prefix)
            for pool, part in zip(self.pools, parts_of_helpers, strict=True)
        ]
        lm.helpers, lm.processes = None, parts  # for its own part it is a model like the others
        try:
            answers = list(getattr(lm, method)(own_part)) if own_part else []
        finally:
            lm.helpers, lm.processes = self, 1
        for future in waiting:
            texts, ran_out, batch_size = future.result()
            answers += texts
            lm.ran_out |= ran_out
            lm.engine.batch_size = min(lm.engine.batch_size, batch_size)
        return answers

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)


def _begin(gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything asks for a GPU


def _answer(
    load: Callable[[], Shardable], method: str, arguments: list[Any], share_prefix: bool
) -> tuple[list, dict, int]:
    global _helper
    if _helper is None:
        _helper = load()
    _helper.share_prefix = share_prefix
    kind: Any = method
    requests = [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]
    answers = getattr(_helper, method)(requests, disable_tqdm=True) if requests else []
    ran_out, _helper.ran_out = _helper.ran_out, {}
    return answers, ran_out, _helper.engine.batch_size
