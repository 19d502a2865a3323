"""Log-likelihoods of prompts that begin alike, such as a question's choices after each step: a token trie in one pass.

Each distinct token is computed once: it attends to the prefix and to its own ancestors, at the position that it has in
its prompt (tree attention, as SpecInfer verifies drafts: Miao et al. 2024, section 4.2). A sliding window counts
positions, not columns, so that models with windows are exact too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.evaluate.prefix import (
    SLIDING,
    Prefix,
    cut_into_tries,
    laid_out,
    layer_kinds,
    sort_prompts,
    takes_own_masks,
)

MOST_TOKENS = 2048  # of a trie: more than a question has; the mask of a row has a line for each


@dataclass(frozen=True)
class Trie:
    """The tokens of prompts below their shared prefix, depth first; `parents`: place of the token before each, -1 where
    that is the prefix's last; `paths`: prompt -> places of its tokens."""

    tokens: list[int]
    parents: list[int]
    paths: dict[int, list[int]]


def build_tries(prompts: Sequence[Sequence[int]], members: Sequence[int], shared: int, most: int) -> list[Trie]:
    """Tries of at most `most` tokens of the prompts `members`, which have the first `shared` tokens in common.

    A prompt joins the one before it, in the order of their tokens, where it shares at least half of the rest with it.
    """
    order, common = sort_prompts(prompts, members)
    tries = []
    for first, last, _ in cut_into_tries(common, [len(prompts[index]) for index in order], shared, most):
        trie = Trie([], [], {})
        path: list[int] = []
        for at in range(first, last):
            rest = prompts[order[at]][shared:]
            path = path[: max(common[at - 1] - shared, 0)] if at > first else []
            for token in rest[len(path) :]:
                trie.parents.append(path[-1] if path else -1)
                path.append(len(trie.tokens))
                trie.tokens.append(token)
            trie.paths[order[at]] = path
        tries.append(trie)
    return tries


def can_score_tries(config: Any) -> bool:
    """Whether all layers take a mask of our own: full or sliding attention, by torch's sdpa or written out (eager)."""
    return takes_own_masks(config) and config.get_text_config()._attn_implementation in ("sdpa", "eager")


@contextmanager
def keep_places(model: Any, places: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, the model's logits are [1, places of all rows, vocabulary]: its head, half of the work for a vocabulary
    of 262,144, sees these places of each row alone, where logits_to_keep would take the same ones of all rows."""
    rows = [row for row, columns in enumerate(places) for _ in columns]
    columns = [column for columns in places for column in columns]

    def keep(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0][rows, columns][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def trie_logits(
    model: Any, prefix: Prefix, tries: Sequence[Trie], needed: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits [places, vocabulary] of the places `needed` of each trie after the prefix."""
    start, device = len(prefix.tokens), model.device
    ids = laid_out(prefix.tokens, [trie.tokens for trie in tries])
    visible, positions = visible_tokens(tries, start)
    width = ids.shape[1] - start
    columns = [[at + width - len(trie.tokens) for at in places] for trie, places in zip(tries, needed, strict=True)]
    with keep_places(model, columns):
        logits = model(
            input_ids=ids[:, start:].to(device),
            attention_mask=attention_masks(model, visible.to(device), positions.to(device)),
            position_ids=positions[:, start:].to(device),
            past_key_values=prefix.again() if start else None,
            use_cache=bool(start),
        ).logits[0]
    return list(logits.split([len(places) for places in needed]))


def visible_tokens(tries: Sequence[Trie], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token of a row attends to, [tries, width, start + width], and the positions, [tries, start + width], of
    `start` tokens of prefix and of tries padded on the left to one width. Padding attends to the prefix and itself."""
    width = max(len(trie.tokens) for trie in tries)
    visible = torch.zeros(len(tries), width, start + width, dtype=torch.bool)
    visible[:, :, :start] = True
    visible[:, range(width), range(start, start + width)] = True
    positions = torch.arange(start + width).clamp(max=start).repeat(len(tries), 1)
    for row, trie in enumerate(tries):
        seen = visible[row, width - len(trie.tokens) :]
        own, at = seen[:, start + width - len(trie.tokens) :], positions[row, start + width - len(trie.tokens) :]
        begins = [place for place, parent in enumerate(trie.parents) if place == 0 or parent != place - 1]
        for first, end in zip(begins, [*begins[1:], len(trie.tokens)], strict=True):  # a run: each token after the last
            if (parent := trie.parents[first]) >= 0:
                seen[first:end] |= seen[parent]
                at[first] = at[parent] + 1
            own[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
            at[first:end] = at[first] + torch.arange(end - first)
    return visible, positions


def attention_masks(model: Any, visible: torch.Tensor, positions: torch.Tensor) -> Any:
    """The 4-D mask [rows, 1, width, tokens] that transformers leaves as it is, or one for each kind of layer where the
    model mixes them: of booleans for sdpa, added to the scores in eager attention."""
    config = model.config.get_text_config()
    masks = {}
    for kind in layer_kinds(config):
        mask = visible
        if kind == SLIDING:
            distance = positions[:, -visible.shape[1] :, None] - positions[:, None, :]
            mask = visible & (distance < config.sliding_window)
        if config._attn_implementation == "eager":
            mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        masks[kind] = mask[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]
