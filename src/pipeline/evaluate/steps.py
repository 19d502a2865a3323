"""Steps of decoding whose tokens stay on the device, on CUDA recorded as graphs: a step is one
launch, not thousands.

A step reads the last token of each row, chooses the next one and puts it in its place, so that the
next step can begin before anyone has looked at it. Its shapes are the number of rows and of columns
that are read, both rounded up on CUDA; a shape is recorded when it comes for the second time.
Graphs read the memory of the cache, which outlives a task and a live merge, as both copy in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate.utils.memory import should_reduce_batch_size

from pipeline.errors import first_line
from pipeline.evaluate.memory import COLUMNS
from pipeline.evaluate.shared_cache import SharedCache
from pipeline.progress import say


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn with probability softmax(logits / temperature), among the likeliest ones, which
    have a share of `top_p` together (nucleus sampling, Holtzman et al. 2020). keys: of each prompt,
    what its draws depend on.
    """

    temperature: float
    top_p: float
    keys: Sequence[str]

    def of(self, indices: Sequence[int]) -> Sampling:
        return replace(self, keys=[self.keys[index] for index in indices])

    def seed(self, index: int) -> int:
        """Return the seed of all draws for a prompt, for a backend that draws by itself (vLLM)."""
        return int.from_bytes(hashlib.sha256(self.keys[index].encode()).digest()[:7], "big")

    def number(self, index: int, position: int) -> float:
        """Return the number in [0, 1) that decides about a token of a prompt's answer."""
        digest = hashlib.sha256(f"{self.keys[index]} {position}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def choose(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] -> tokens [rows]: by inverting the distribution at `numbers`
        [rows].
        """
        probabilities, tokens = (
            (logits.float() / self.temperature)
            .softmax(dim=-1)
            .sort(dim=-1, descending=True, stable=True)
        )
        upto = probabilities.cumsum(dim=-1)
        is_kept = upto - probabilities < self.top_p  # the first always
        mass = (probabilities * is_kept).sum(dim=-1, keepdim=True)
        target = numbers[..., None] * mass
        rank = (
            ((upto <= target) & is_kept)
            .sum(dim=-1, keepdim=True)
            .clamp(max=is_kept.sum(dim=-1, keepdim=True) - 1)
        )
        return tokens.gather(-1, rank).squeeze(-1)


def rows_for(device: torch.device, count: int) -> int:
    """Rows that a step of `count` prompts computes: on CUDA the next power of two, as each number
    is recorded.
    """
    if device.type == "cuda":
        return 1 << max(count - 1, 0).bit_length()
    return count


def columns_for(device: torch.device, count: int) -> int:
    if device.type == "cuda":
        return -(-count // COLUMNS) * COLUMNS
    return count


class Steps:
    """The steps of a cache's rows. sampling: how tokens are drawn; None: the likeliest."""

    def __init__(self, cache: SharedCache, sampling: Sampling | None = None) -> None:
        self.cache, self.sampling = cache, sampling
        if sampling:
            self.kind: tuple[float, float] | None = (sampling.temperature, sampling.top_p)
        else:
            self.kind = None

    def next(
        self, rows: int, columns: int, numbers: Sequence[float] = ()
    ) -> Callable[[], list[int]]:
        """Begin a step of the first rows that reads so many columns; gives what waits for the
        tokens chosen. numbers: those that decide about drawn ones.
        """
        cache = self.cache
        if self.sampling:
            cache.drawn[:rows] = torch.tensor(numbers, device=cache.device)
        columns = min(columns_for(cache.device, columns), cache.room)
        key = (rows, columns, cache.shared, cache.reads_once, self.kind)
        graph = cache.graphs.get(key)
        if key in cache.graphs and cache.recordable:
            graph = graph or self._record(rows, columns)
        cache.graphs[key] = graph
        graph.replay() if graph else self._step(rows, columns)
        if cache.device.type != "cuda":
            return cache.tokens[:rows, 0].clone().tolist
        tokens, ready = cache.tokens[:rows, 0].to("cpu", non_blocking=True), torch.cuda.Event()
        ready.record()

        def wait() -> list[int]:
            ready.synchronize()
            return list(tokens.tolist())

        return wait

    def _step(self, rows: int, columns: int) -> None:
        cache = self.cache
        logits = cache.step(rows, columns)
        if self.sampling:
            tokens = self.sampling.choose(logits, cache.drawn[:rows])
        else:
            tokens = logits.argmax(dim=-1)
        cache.tokens[:rows, 0] = tokens
        cache.places[:rows] += 1

    def _record(self, rows: int, columns: int) -> torch.cuda.CUDAGraph | None:
        """The graph of a step; None where a model's forward pass cannot be recorded, such as one
        that computes its rotary embeddings from the positions that it sees. Reported once.
        """
        pools = (graph.pool() for graph in self.cache.graphs.values() if graph)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=next(pools, None)):
                self._step(rows, columns)
        except RuntimeError as error:
            if should_reduce_batch_size(error):
                raise
            self.cache.recordable = False
            say(f"steps are not recorded as CUDA graphs, and slower: {first_line(error)}")
            return None
        return graph
