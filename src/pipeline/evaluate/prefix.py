"""Groups of prompts with a common prefix, and tries of the tokens after the prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import commonprefix

FAR_LESS = 4  # neighbours share far less if they share less than a quarter
SMALL = 512  # tokens of a trie that is computed in a batch with other tries, without a prefix
LEAST = 16  # tokens of a prefix that is worth a separate forward pass
MOST_TOKENS = 2048  # in a trie: more than a question has; a row's mask has a line per token


def places_by_prompt(prompts: Iterable[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return for each distinct prompt all its places."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    return places


def group_prompts(
    prompts: Sequence[Sequence[int]], longest: Sequence[int] | None = None, token_limit: int = 0
) -> list[tuple[int, list[int]]]:
    """Group prompts that are computed together.

    Sorts the prompts by their tokens. It cuts between two neighbours if they share far less than
    either shares with its other neighbour: between the exemplars of two subjects, but not between
    two questions after the same exemplars.

    Args:
        prompts: The token ids of each prompt.
        longest: The most tokens of each prompt that may be in a prefix. None: all except the last.
        token_limit: The size of the tries that are computed after a prefix; a group that is one
            small trie needs no prefix. 0: each prompt is computed separately.

    Returns:
        The length of each group's common prefix (0: no prefix) and the places of its prompts.
    """
    order, common = sort_prompts(prompts, range(len(prompts)))
    if longest is None:
        longest = [len(prompt) - 1 for prompt in prompts]
    cuts = []
    for index, same in enumerate(common):
        neighbours = common[max(index - 1, 0) : index + 2]
        if FAR_LESS * same < max(neighbours):
            cuts.append(index + 1)
    groups: list[tuple[int, list[int]]] = []
    without_prefix: list[int] = []
    for begin, end in pairwise([0, *cuts, len(order)]):
        members = order[begin:end]
        limits = [longest[place] for place in members]
        shared = min([*common[begin : end - 1], *limits], default=0)
        tries = build_tries(prompts, members, 0, min(token_limit, SMALL)) if token_limit else []
        if len(members) == 1 or shared < LEAST or len(tries) == 1:
            without_prefix += members
        else:
            groups.append((shared, members))
    if without_prefix:
        groups.append((0, sorted(without_prefix)))
    return groups


def sort_prompts(
    prompts: Sequence[Sequence[int]], indices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the places sorted by their prompts' tokens, and how many tokens neighbours share."""
    order = sorted(indices, key=lambda index: tuple(prompts[index]))
    common = []
    for first, second in pairwise(order):
        prefix = commonprefix([list(prompts[first]), list(prompts[second])])
        common.append(len(prefix))
    return order, common


@dataclass
class Trie:
    """The tokens of prompts after their shared prefix, depth first.

    `parents` has the place of the token before each token, -1 for the end of the prefix. `paths`
    maps a prompt to the places of its tokens.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=dict)


def build_tries(
    prompts: Sequence[Sequence[int]], members: Sequence[int], shared: int, token_limit: int
) -> list[Trie]:
    """Build tries of at most `token_limit` tokens from the prompts `members`.

    The prompts have their first `shared` tokens in common. With a limit of 0 each prompt has its
    own trie. A prompt that shares less than half of its rest with the prompt before it begins a
    new trie.
    """
    order, common = sort_prompts(prompts, members)
    tries: list[Trie] = []
    path: list[int] = []
    for index, shared_before in zip(order, [0, *common], strict=True):
        tail = prompts[index][shared:]
        known = path[: max(shared_before - shared, 0)]
        new = len(tail) - len(known)
        if not tries or 2 * new > len(tail) or len(tries[-1].tokens) + new > token_limit:
            tries.append(Trie())
            known = []
        trie = tries[-1]
        begin = len(trie.tokens)
        trie.tokens += tail[len(known) :]
        path = [*known, *range(begin, len(trie.tokens))]
        parents = [-1, *path]
        trie.parents += parents[len(known) : -1]
        trie.paths[index] = path
    return tries


def batch_tries(tries: Sequence[Trie], size: int) -> list[list[Trie]]:
    """Divide tries into batches, the longest first, so that memory runs out at the start or never.

    `size` is the most prompts of a batch. A trie with more prompts has its own batch.
    """
    batches: list[list[Trie]] = []
    prompts = size
    for trie in sorted(tries, key=lambda trie: -len(trie.tokens)):
        if prompts + len(trie.paths) > size:
            batches.append([])
            prompts = 0
        batches[-1].append(trie)
        prompts += len(trie.paths)
    return batches
