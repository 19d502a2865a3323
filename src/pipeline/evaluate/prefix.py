"""Prompts that begin alike: which to take together, and the tries of their tokens below what they
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix

FAR_LESS = 4  # times
SMALL = (
    512  # tokens of a trie that is computed in a batch with others, not below a prefix of its own
)
LEAST = 16  # tokens: what is shorter is not worth a forward pass of its own
MOST_TOKENS = 2048  # of a trie: more than a question has; the mask of a row has a line for each


def places_by_prompt(prompts: Iterable[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Each prompt -> all places where it is."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    return places


def group_prompts(
    prompts: Sequence[Sequence[int]], longest: Sequence[int] | None = None, token_limit: int = 0
) -> list[tuple[int, list[int]]]:
    """Places of prompts (token ids) taken together, with the length of the prefix that they share;
    0: none.

    The prompts in the order of their tokens, cut where two neighbours share far less than one of
    them shares with its other neighbour: between the exemplars of two subjects, not between two
    questions after the same exemplars. `longest`: at most so many tokens of each prompt may be in a
    prefix; by default all but the last. `token_limit`: what follows a prefix is computed as tries
    of at most so many tokens, and a group that is one small trie needs no prefix; 0: each prompt by
    itself.
    """
    order, common = sort_prompts(prompts, range(len(prompts)))
    cuts = []
    for index, same in enumerate(common):
        if FAR_LESS * same < max(common[max(index - 1, 0) : index + 2]):
            cuts.append(index + 1)
    grouped: list[tuple[int, list[int]]] = []
    alone: list[int] = []
    for begin, end in pairwise([0, *cuts, len(order)]):
        members = order[begin:end]
        caps = [
            len(prompts[prompt_index]) - 1 if longest is None else longest[prompt_index]
            for prompt_index in members
        ]
        shared = min([*common[begin : end - 1], *caps], default=0)
        is_small = (
            token_limit and len(build_tries(prompts, members, 0, min(token_limit, SMALL))) == 1
        )
        if len(members) == 1 or shared < LEAST or is_small:
            alone += members
        else:
            grouped.append((shared, members))
    if alone:
        return [*grouped, (0, sorted(alone))]
    return grouped


def sort_prompts(
    prompts: Sequence[Sequence[int]], indices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the places in the order of their prompts' tokens, and how many tokens each shares with
    the next.
    """
    order = sorted(indices, key=lambda index: tuple(prompts[index]))
    return order, [
        len(commonprefix([list(prompts[first]), list(prompts[second])]))
        for first, second in pairwise(order)
    ]


@dataclass
class Trie:
    """The tokens of prompts below their shared prefix, depth first; `parents`: the place of the
    token before each, -1 where that is the prefix; `paths`: prompt -> places of its tokens.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=dict)


def build_tries(
    prompts: Sequence[Sequence[int]], members: Sequence[int], shared: int, token_limit: int
) -> list[Trie]:
    """Build tries of at most `token_limit` tokens of the prompts `members`, whose first `shared`
    tokens are common.

    With 0 each prompt is by itself. A prompt that shares less than half of its rest with the one
    before it begins a trie.
    """
    order, common = sort_prompts(prompts, members)
    tries: list[Trie] = []
    path: list[int] = []
    for index, shared_before in zip(order, [0, *common], strict=True):
        tail, path_before = prompts[index][shared:], path[: max(shared_before - shared, 0)]
        new = len(tail) - len(path_before)
        if not tries or 2 * new > len(tail) or len(tries[-1].tokens) + new > token_limit:
            tries.append(Trie())
            path_before = []
        trie, begin = tries[-1], len(tries[-1].tokens)
        trie.tokens += tail[len(path_before) :]
        path = [*path_before, *range(begin, len(trie.tokens))]
        trie.parents += [-1, *path][len(path_before) : -1]
        trie.paths[index] = path
    return tries


def batch_places(lengths: Sequence[int], prompts: Sequence[int], size: int) -> list[list[int]]:
    """Places in batches, the longest first: what runs out of memory does so at once.

    `prompts`: how many each place holds; a batch holds `size` of them, or a place that holds more.
    """
    batches: list[list[int]] = []
    tokens = size
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if tokens + prompts[index] > size:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += prompts[index]
    return batches
