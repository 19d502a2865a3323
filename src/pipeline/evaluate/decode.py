"""Generation in slots: an answer that ends makes room for the next prompt at once (continuous batching).

Each prompt occupies a row of the cache. Its tokens have their own positions, without gaps, so that no row depends on
another: a key is visible to the queries at its position and after it, as far as a sliding window reaches. Rows are
dropped when no prompt waits, and attention reads no further than the longest row. What all prompts begin with is stored
and read once for all rows. What is drawn depends on the question, the answer's number and the token's place in it alone
(`Sampling`), so that batches change no sample.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from pipeline.evaluate.shared_cache import SharedCache, attending, takes_masks

INCOMPLETE = "\ufffd"  # at the end of a text: a character of which bytes are missing
NOT_FOR_GREEDY = {  # settings of a GenerationConfig that change no greedy choice; the length is the request's
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("use_cache", "cache_implementation", "_from_model_config", "transformers_version"),
}


def can_decode(model: Any) -> bool:
    """Whether `decode` chooses the tokens that transformers' greedy generate() would, from a mask of its own."""
    replaceable = model._supports_attention_backend and takes_masks(model.config, "sdpa")
    return replaceable and not settings_beyond_greedy(model)


def settings_beyond_greedy(model: Any) -> list[str]:
    """Settings of a model's generation config that change which token is chosen, such as repetition_penalty."""
    defaults = GenerationConfig._get_default_generation_params()
    settings = model.generation_config.to_dict().items()
    changed = {name for name, value in settings if value not in (None, False, defaults.get(name))}
    return sorted(changed - NOT_FOR_GREEDY)


@dataclass
class Ending:
    """When an answer is over: at one of the tokens `ends`, at a string of `stop`, after `room` tokens.

    to_text: decodes tokens, special ones too.
    """

    ends: set[int]
    stop: Sequence[str]
    room: int
    to_text: Callable[[list[int]], str]

    @cached_property
    def look_back(self) -> int:
        """Tokens that a stop string may extend over: a byte each, and one that loses a leading space."""
        return 1 + max((len(string.encode()) for string in self.stop), default=0)


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn with probability softmax(logits / temperature), among the likeliest ones, which have a share of
    `top_p` together (nucleus sampling, Holtzman et al. 2020). keys: of each prompt, what its draws depend on."""

    temperature: float
    top_p: float
    keys: Sequence[str]

    def of(self, places: Sequence[int]) -> Sampling:
        return replace(self, keys=[self.keys[place] for place in places])

    def seed(self, place: int) -> int:
        """Of all draws for a prompt, where another program makes them."""
        return int.from_bytes(hashlib.sha256(self.keys[place].encode()).digest()[:7], "big")

    def number(self, place: int, position: int) -> float:
        """The number in [0, 1) that decides about a token of a prompt's answer."""
        digest = hashlib.sha256(f"{self.keys[place]} {position}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def choose(self, logits: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
        """[rows, vocabulary] -> tokens [rows]: by inverting the distribution at `numbers` [rows]."""
        probabilities, tokens = (
            (logits.float() / self.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        )
        upto = probabilities.cumsum(dim=-1)
        kept = upto - probabilities < self.top_p  # the first always
        mass = (probabilities * kept).sum(dim=-1, keepdim=True)
        target = torch.tensor(numbers, device=logits.device)[..., None] * mass
        place = ((upto <= target) & kept).sum(dim=-1, keepdim=True).clamp(max=kept.sum(dim=-1, keepdim=True) - 1)
        return tokens.gather(-1, place).squeeze(-1)


@dataclass
class _Row:
    """A prompt, as far as it is not shared, and its answer from `start` on. All tokens but the last are in the cache.
    complete: places at which no character is cut in two."""

    index: int
    tokens: list[int]

    def __post_init__(self) -> None:
        self.start = len(self.tokens)
        self.complete = deque([self.start])

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.start :]

    def is_over(self, ending: Ending) -> bool:
        """Asked after each token."""
        if self.tokens[-1] in ending.ends or len(self.tokens) - self.start >= ending.room:
            return True
        while len(self.complete) > 1 and self.complete[1] <= len(self.tokens) - ending.look_back:
            self.complete.popleft()
        text = ending.to_text(self.tokens[self.complete[0] :])
        if not text.endswith(INCOMPLETE):
            self.complete.append(len(self.tokens))
        return any(string in text for string in ending.stop)


def decode(
    model: Any,
    prefix: Sequence[int],
    rests: Sequence[Sequence[int]],
    slots: int,
    ending: Ending,
    answered: Callable[[int, list[int]], None],
    sampling: Sampling | None = None,
) -> None:
    """Answer the prompts `prefix` + rest, at most `slots` at a time, the longest first.

    answered: is given the index of a rest and the tokens of its answer, the end token included, when the answer ends.
    sampling: how tokens are drawn; None: the likeliest.
    """
    waiting = deque(sorted(range(len(rests)), key=lambda index: -len(rests[index])))
    cache = SharedCache(model, prefix, min(slots, len(rests)), max(map(len, rests)) + ending.room)
    rows: list[_Row] = []
    with attending(cache) if prefix else nullcontext():
        if prefix:
            cache.share()
        while waiting or rows:
            while waiting and len(rows) < slots:
                index = waiting.popleft()
                cache.fill(len(rows), rests[index][:-1])
                rows.append(_Row(index, list(rests[index])))
            logits = cache.step([row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows])
            if sampling:
                numbers = [sampling.number(row.index, len(row.answer)) for row in rows]
                chosen = sampling.choose(logits, numbers).tolist()
            else:
                chosen = logits.argmax(dim=-1).tolist()
            for place in reversed(range(len(rows))):
                rows[place].tokens.append(chosen[place])
                if rows[place].is_over(ending):
                    answered(rows[place].index, rows[place].answer)
                    last = rows.pop()
                    if place < len(rows):
                        cache.move(len(rows), place)
                        rows[place] = last
