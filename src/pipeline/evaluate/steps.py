"""Steps of decoding whose tokens stay on the device, on CUDA recorded as graphs: a step is one launch, not thousands.

A step reads the last token of each row, chooses the next one and puts it in its place, so that the next step can begin
before anyone has looked at it. Its shapes are the number of rows and of columns that are read, both rounded up on
CUDA; a shape is recorded when it comes for the second time. Graphs read the memory of the cache, which outlives a task
and a live merge, as both copy in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from pipeline.errors import first_line
from pipeline.evaluate.shared_cache import SharedCache
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.evaluate.decode import Sampling

COLUMNS = 128  # on CUDA steps read a multiple of these


def rows_for(device: torch.device, count: int) -> int:
    """Rows that a step of `count` prompts computes: on CUDA the next power of two, as each number is recorded."""
    return 1 << max(count - 1, 0).bit_length() if device.type == "cuda" else count


def columns_for(device: torch.device, count: int) -> int:
    return -(-count // COLUMNS) * COLUMNS if device.type == "cuda" else count


class Steps:
    """The steps of a cache's rows. sampling: how tokens are drawn; None: the likeliest."""

    def __init__(self, cache: SharedCache, sampling: Sampling | None = None) -> None:
        self.cache, self.sampling = cache, sampling
        self.drawn = torch.zeros(cache.rows, device=cache.device)  # numbers that decide about the next tokens
        self.kind = (sampling.temperature, sampling.top_p) if sampling else None
        if self.kind:  # a graph reads the numbers where they lie
            self.drawn = cache.graphs.setdefault("drawn", self.drawn)

    def next(self, rows: int, columns: int, numbers: Sequence[float] = ()) -> Callable[[], list[int]]:
        """Begin a step of the first rows that reads so many columns; gives what waits for the tokens chosen."""
        cache = self.cache
        if self.sampling:
            self.drawn[:rows] = torch.tensor(numbers, device=cache.device)
        columns = min(columns_for(cache.device, columns), cache.room)
        key = (rows, columns, cache.shared, cache.reads_once, self.kind)
        if cache.device.type != "cuda":
            self._step(rows, columns)
            return cache.tokens[:rows, 0].clone().tolist
        if cache.graphs.setdefault(key) is None:
            self._step(rows, columns)
            cache.graphs[key] = False
        else:
            if cache.graphs[key] is False:
                cache.graphs[key] = self._record(partial(self._step, rows, columns))
            cache.graphs[key]()
        chosen, ready = cache.tokens[:rows, 0].to("cpu", non_blocking=True), torch.cuda.Event()
        ready.record()

        def wait() -> list[int]:
            ready.synchronize()
            return list(chosen.tolist())

        return wait

    def _step(self, rows: int, columns: int) -> None:
        cache = self.cache
        logits = cache.step(rows, columns)
        chosen = self.sampling.choose(logits, self.drawn[:rows]) if self.sampling else logits.argmax(dim=-1)
        cache.tokens[:rows, 0] = chosen
        cache.places[:rows] = (cache.places[:rows] + 1).clamp(max=cache.room - 1)  # rows that are over stay inside

    def _record(self, step: Callable[[], None]) -> Callable[[], Any]:
        """What repeats a step: its graph, or the step itself where a model's forward pass cannot be recorded, such as
        one that computes its rotary embeddings from the positions that it sees. Reported once."""
        graphs = self.cache.graphs
        if "refused" in graphs:
            return step
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=graphs.setdefault("pool", torch.cuda.graph_pool_handle())):
                step()
        except RuntimeError as error:
            if should_reduce_batch_size(error):
                raise
            graphs["refused"] = True
            say(f"steps are not recorded as CUDA graphs, and slower: {first_line(error)}")
            return step
        return graph.replay
