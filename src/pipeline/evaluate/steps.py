"""Steps of decoding whose tokens stay on the device; on CUDA they are recorded as graphs.

A recorded step is one launch instead of thousands. A step reads the last token of each row, chooses
the next token and stores it in its place, so the next step can start before the token is read on
the host. Its shapes are the number of rows and of columns that are read, both rounded up on CUDA. A
shape is recorded when it occurs for the second time. Graphs read the memory of the cache, which
outlives a task and a live merge, because both copy in place.
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
    """Settings of sampling with probability softmax(logits / temperature).

    Tokens are drawn only from the likeliest ones, whose total probability is `top_p` (nucleus
    sampling, Holtzman et al. 2020). `keys` has for each prompt the text that its draws depend on.
    """

    temperature: float
    top_p: float
    keys: Sequence[str]

    def of(self, indices: Sequence[int]) -> Sampling:
        return replace(self, keys=[self.keys[index] for index in indices])

    def seed(self, index: int) -> int:
        """Return the seed of all draws for a prompt, for a backend with its own sampling (vLLM)."""
        digest = hashlib.sha256(self.keys[index].encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def number(self, index: int, position: int) -> float:
        """Return the number in [0, 1) that decides about a token of a prompt's answer."""
        key = f"{self.keys[index]} {position}"
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def choose(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Draw tokens by inverting the distribution function at `numbers`.

        Args:
            logits: [rows, vocabulary]
            numbers: [rows] Numbers in [0, 1).

        Returns:
            The tokens, [rows].
        """
        shares = (logits.float() / self.temperature).softmax(dim=-1)
        probabilities, tokens = shares.sort(dim=-1, descending=True, stable=True)
        upto = probabilities.cumsum(dim=-1)
        is_kept = upto - probabilities < self.top_p  # the first token is always kept
        mass = (probabilities * is_kept).sum(dim=-1, keepdim=True)
        target = numbers[..., None] * mass
        rank = ((upto <= target) & is_kept).sum(dim=-1, keepdim=True)
        last = is_kept.sum(dim=-1, keepdim=True) - 1
        return tokens.gather(-1, rank.clamp(max=last)).squeeze(-1)


def rows_for(device: torch.device, count: int) -> int:
    """Return how many rows a step of `count` prompts computes.

    On CUDA it is the next power of two, because each number of rows is recorded.
    """
    if device.type == "cuda":
        return 1 << max(count - 1, 0).bit_length()
    return count


def columns_for(device: torch.device, count: int) -> int:
    if device.type == "cuda":
        return -(-count // COLUMNS) * COLUMNS
    return count


class Steps:
    """The steps of a cache's rows. `sampling=None` chooses the likeliest token."""

    def __init__(self, cache: SharedCache, sampling: Sampling | None = None) -> None:
        self.cache, self.sampling = cache, sampling
        self.kind: tuple[float, float] | None = None
        if sampling:
            self.kind = (sampling.temperature, sampling.top_p)

    def next(
        self, rows: int, columns: int, numbers: Sequence[float] = ()
    ) -> Callable[[], list[int]]:
        """Start a step and return a function that waits for its tokens.

        Args:
            rows: The number of rows, counted from the first.
            columns: The number of columns that are read.
            numbers: For sampling, the number in [0, 1) that decides about each row's token.
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
        if graph:
            graph.replay()
        else:
            self._step(rows, columns)
        chosen = cache.tokens[:rows, 0]
        if cache.device.type != "cuda":
            return chosen.clone().tolist
        tokens = chosen.to("cpu", non_blocking=True)
        ready = torch.cuda.Event()
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
        """Record the graph of a step, or return None if the forward pass cannot be recorded.

        An example is a model that computes its rotary embeddings from the positions that it sees.
        The failure is reported once.
        """
        pool = None
        for recorded in self.cache.graphs.values():
            if recorded:
                pool = recorded.pool()
                break
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._step(rows, columns)
        except RuntimeError as error:
            if should_reduce_batch_size(error):
                raise
            self.cache.recordable = False
            say(f"steps are slower, because CUDA graphs cannot record them: {first_line(error)}")
            return None
        return graph
