"""Prompts that begin alike: which to take together, and keys and values of what they share, computed once.

transformers' continuous batching also shares prefixes, in blocks of its paged cache. It is not used: it generates but
gives no likelihoods of given continuations, it ends an answer at end tokens only and not at the stop strings of the
tasks, and on a CPU its attention over all requests at once costs eight times what this does (scripts/bench_eval.py
measures it beside). What is here is plain attention over a plain cache, so that a model is scored as it is without
sharing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FORCE_GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"  # transformers reads it at each attention
LEAST = 16  # tokens: what is shorter is not worth a forward pass of its own
SLIDING = "sliding_attention"
DEEPEST = 100  # prefixes inside prefixes; prompts of exemplars have two or three


def group_prompts(
    prompts: Sequence[Sequence[int]], longest: Sequence[int] | None = None, most: int = 0
) -> list[tuple[int, list[int]]]:
    """Places of prompts (token ids) taken together, with the length of the prefix that they share; 0: none.

    Chosen for the fewest tokens to compute, a prefix counting once: the exemplars of a task, or those of each subject.
    `longest`: at most so many tokens of each prompt may be in a prefix; by default all but the last.
    `most`: what follows a prefix is computed as tries of at most so many tokens; 0: each prompt by itself.
    """
    caps = [len(prompt) - 1 for prompt in prompts] if longest is None else longest
    order, common = sort_prompts(prompts, range(len(prompts)))
    lengths = [len(prompts[place]) for place in order]
    grouped: list[tuple[int, list[int]]] = []
    alone: list[int] = []
    for shared, members in _cheapest_groups(common, lengths, 0, len(order), most)[1] if order else ():
        places = [order[member] for member in members]
        shared = min(shared, *(caps[place] for place in places)) if len(places) > 1 else 0
        if shared >= LEAST:
            grouped.append((int(shared), places))
        else:
            alone += places
    return [*grouped, (0, sorted(alone))] if alone else grouped


def sort_prompts(prompts: Sequence[Sequence[int]], places: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """The places in the order of their prompts' tokens, and how many tokens each shares with the next."""
    order = sorted(places, key=lambda place: tuple(prompts[place]))
    arrays = [np.asarray(prompts[place]) for place in order]
    return order, np.array([_common_length(row, two) for row, two in zip(arrays, arrays[1:], strict=False)], dtype=int)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    short = min(len(first), len(second))
    differs = first[:short] != second[:short]
    return int(differs.argmax()) if differs.any() else short


def cut_into_tries(
    common: np.ndarray, lengths: Sequence[int], shared: int, most: int
) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, tokens) of the tries that sorted prompts form below a prefix of `shared` tokens.

    A prompt joins the one before it where it has at least half of its tokens in common with it, up to `most` tokens.
    """
    first, tokens = 0, lengths[0] - shared
    for place, length in enumerate(lengths[1:], 1):
        further = length - max(int(common[place - 1]), shared)
        if 2 * further <= length - shared and tokens + further <= most:
            tokens += further
        else:
            yield first, place, tokens
            first, tokens = place, length - shared
    yield first, len(lengths), tokens


def _cheapest_groups(
    common: np.ndarray, lengths: Sequence[int], first: int, last: int, most: int, depth: int = 0
) -> tuple[int, list]:
    """Tokens to compute for the sorted prompts first..last-1, and the groups (shared, members) that need so few.

    The prompts are cut where they have least in common; each part stays with what it has in common itself, or joins
    the others that have no more than all have.
    """
    if last - first == 1:
        return lengths[first], [(0, [first])]

    def tokens_after(shared: int, start: int, end: int) -> int:
        return sum(size for *_, size in cut_into_tries(common[start : end - 1], lengths[start:end], shared, most))

    within_group = common[first : last - 1]
    shared = int(within_group.min())
    if depth == DEEPEST:
        return shared + tokens_after(shared, first, last), [(shared, list(range(first, last)))]
    cuts = [first, *(first + 1 + int(at) for at in np.flatnonzero(within_group == shared)), last]
    cost_apart, cost_together = 0, shared + (LEAST if most else 0)  # tries are few rows: a prefix is another pass
    groups_apart, pool = [], []
    for start, end in zip(cuts, cuts[1:], strict=False):
        cost, subgroups = _cheapest_groups(common, lengths, start, end, most, depth + 1)
        joining = tokens_after(shared, start, end)
        cost_apart, cost_together = cost_apart + cost, cost_together + min(cost, joining)
        if joining < cost:
            pool.append((range(start, end), subgroups))
        else:
            groups_apart += subgroups
    if cost_together < cost_apart:
        return cost_together, [(shared, [member for members, _ in pool for member in members]), *groups_apart]
    return cost_apart, [*groups_apart, *(group for _, subgroups in pool for group in subgroups)]


def layer_kinds(config: Any) -> set[str]:
    """How the layers attend: "full_attention" to all that came before, "sliding_attention" to a window, or another."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or [SLIDING if window else "full_attention"])


def takes_own_masks(config: Any) -> bool:
    """Whether each layer attends to all that came before, or to a window of it: what a mask can state by positions."""
    return layer_kinds(config) <= {"full_attention", SLIDING}


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, prefix + room, width]: the prefix in every row, then its own."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, rows: int, room: int) -> None:
        super().__init__()
        self.rows, self.room, self.length = rows, room, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty_like(states: torch.Tensor) -> torch.Tensor:
            return states.new_empty(self.rows, states.shape[1], states.shape[2] + self.room, states.shape[3])

        self.keys, self.values = empty_like(key_states), empty_like(value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        rows = slice(len(key_states) if self.is_initialized else None)  # the prefix is written to all rows
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[rows, :, start : self.length] = key_states
        self.values[rows, :, start : self.length] = value_states
        return self.keys[: len(key_states), :, : self.length], self.values[: len(value_states), :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Prefix(Cache):
    """The keys and values of a shared prefix (which may be empty), in each of `rows` rows, with `room` tokens more for
    what follows.

    Serves batch after batch: `again()` forgets what followed.
    """

    def __init__(self, model: Any, tokens: Sequence[int], rows: int, room: int) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[_Layer(rows, room) for _ in range(layers)])
        self.tokens = list(tokens)
        if self.tokens:
            model(input_ids=torch.tensor([self.tokens], device=model.device), past_key_values=self, logits_to_keep=1)

    def again(self) -> Prefix:
        for layer in self.layers:
            layer.length = len(self.tokens)  # type: ignore[union-attr]
        return self


def laid_out(prefix: Sequence[int], rests: Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids [rests, tokens]: the prefix, padding (masked, so that any token does), then the rest, so that all end
    alike."""
    width = max(map(len, rests))
    return torch.tensor([[*prefix, *[0] * (width - len(tail)), *tail] for tail in rests])


@contextmanager
def heads_as_they_are(device: torch.device) -> Iterator[None]:
    """Inside, on a CPU, attention reads the keys of grouped heads where they lie, also under a mask.

    transformers copies them for each query head first, a third of the time of attention to a long prefix; the result
    is the same. On a GPU it is right to: with a mask, the fast kernels do not take grouped heads.
    """
    value = os.environ.get(FORCE_GROUPED)
    if device.type == "cpu":
        os.environ[FORCE_GROUPED] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCE_GROUPED, None)
        if value is not None:
            os.environ[FORCE_GROUPED] = value


def batch_places(
    places: Sequence[int], lengths: Sequence[int], size: int, prompts: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Places in batches, the longest first: what runs out of memory does so at once.

    `prompts`: how many each place holds; a batch holds `size` of them, or a place that holds more. None: a place is a
    prompt, and a batch has the tokens, padding included, of `size` times the longest.
    """
    batch: list[int] = []
    held = 0
    most = size * max((lengths[place] for place in places), default=0) if prompts is None else size
    for place in sorted(places, key=lambda place: -lengths[place]):
        more = lengths[batch[0] if batch else place] if prompts is None else prompts[place]
        if batch and held + more > most:
            yield batch
            batch, held, more = [], 0, lengths[place] if prompts is None else prompts[place]
        batch, held = [*batch, place], held + more
    if batch:
        yield batch
