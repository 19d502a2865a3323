"""Prompts that begin alike: which to take together, and the tries of their tokens below what they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST = 16  # tokens: what is shorter is not worth a forward pass of its own
MOST_TOKENS = 2048  # of a trie: more than a question has; the mask of a row has a line for each


def group_prompts(
    prompts: Sequence[Sequence[int]], longest: Sequence[int] | None = None, most: int = 0
) -> list[tuple[int, list[int]]]:
    """Places of prompts (token ids) taken together, with the length of the prefix that they share; 0: none.

    In the order of their tokens, a prompt joins the group before it where that saves as many tokens as the group, and
    the prompts after it that begin alike, then compute more than once: the exemplars of a task, or those of each
    subject. `longest`: at most so many tokens of each prompt may be in a prefix; by default all but the last. `most`:
    what follows a prefix is computed as tries of at most so many tokens; 0: each prompt by itself.
    """
    order, common = sort_prompts(prompts, range(len(prompts)))
    lengths = [len(prompts[place]) for place in order]
    groups: list[tuple[int, range]] = []

    def rows_of(group: range, shared: int) -> int:
        inner = slice(group.start, group.stop - 1)
        return sum(begin_rows(lengths[group.start : group.stop], common[inner], shared, most))

    def lost(group: range, shared: int) -> int:
        more = min(common[group.start : group.stop - 1], default=0) - shared
        return more * (rows_of(group, shared) - 1) if more > 0 else 0

    for at, length in enumerate(lengths):
        shared, group = groups[-1] if groups else (0, range(0))
        together, after = min(shared, common[at - 1] if at else 0), at + 1
        while after < len(lengths) and common[after - 1] > together:
            after += 1
        if at and lost(group, together) + lost(range(at, after), together) <= together:
            groups[-1] = together, range(group.start, at + 1)
        else:
            groups.append((length, range(at, at + 1)))
    caps = [len(prompt) - 1 for prompt in prompts] if longest is None else longest
    grouped: list[tuple[int, list[int]]] = []
    alone: list[int] = []
    for shared, group in groups:
        members = [order[at] for at in group]
        shared = min(shared, *(caps[place] for place in members)) if len(members) > 1 else 0
        if shared >= LEAST:
            grouped.append((shared, members))
        else:
            alone += members
    return [*grouped, (0, sorted(alone))] if alone else grouped


def sort_prompts(prompts: Sequence[Sequence[int]], places: Sequence[int]) -> tuple[list[int], list[int]]:
    """The places in the order of their prompts' tokens, and how many tokens each shares with the next."""
    order = sorted(places, key=lambda place: tuple(prompts[place]))
    arrays = [np.asarray(prompts[place]) for place in order]
    return order, [_common_length(row, two) for row, two in zip(arrays, arrays[1:], strict=False)]


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    short = min(len(first), len(second))
    differs = first[:short] != second[:short]
    return int(differs.argmax()) if differs.any() else short


def begin_rows(lengths: Sequence[int], common: Sequence[int], shared: int, most: int) -> Iterator[bool]:
    """Whether each of sorted prompts begins a row below a prefix of `shared` tokens: it shares less than half of its
    rest with the prompt before it, or their trie would have more than `most` tokens."""
    tokens = 0
    for place, (length, before) in enumerate(zip(lengths, [0, *common], strict=False)):
        further = length - max(before, shared)
        begins = not place or 2 * further > length - shared or tokens + further > most
        tokens = length - shared if begins else tokens + further
        yield begins


@dataclass
class Trie:
    """The tokens of prompts below their shared prefix, depth first; `runs`: places that a run of tokens, each after the
    last, comes after, and its length; `paths`: prompt -> places of its tokens."""

    tokens: list[int] = field(default_factory=list)
    runs: list[tuple[list[int], int]] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=dict)


def build_tries(prompts: Sequence[Sequence[int]], members: Sequence[int], shared: int, most: int) -> list[Trie]:
    """Tries of at most `most` tokens of the prompts `members`, which have the first `shared` tokens in common; 0: each
    prompt by itself."""
    order, common = sort_prompts(prompts, members)
    tries: list[Trie] = []
    path: list[int] = []
    begins = begin_rows([len(prompts[place]) for place in order], common, shared, most)
    for place, before, begins_row in zip(order, [0, *common], begins, strict=True):
        if begins_row:
            tries.append(Trie())
        trie, known = tries[-1], [] if begins_row else path[: max(before - shared, 0)]
        rest = prompts[place][shared + len(known) :]
        path = [*known, *range(len(trie.tokens), len(trie.tokens) + len(rest))]
        trie.runs.append((known, len(rest)))
        trie.tokens += rest
        trie.paths[place] = path
    return tries


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
