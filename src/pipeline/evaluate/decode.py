"""Generation in slots: an answer that ends makes room for the next prompt at once (continuous
batching).

Each prompt occupies a row of the cache. Its tokens have their own positions, without gaps, so that
no row depends on
another: a key is visible to the queries at its position and after it, as far as a sliding window
reaches. Rows are dropped when no prompt waits, and attention reads no further than the longest row.
Rows that are free are filled in one padded pass. What all prompts begin with is stored and read
once for all rows. What is drawn depends on the question, the answer's number and the token's place
in it alone (`Sampling`), so that batches change no sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from pipeline.evaluate.memory import FILL
from pipeline.evaluate.shared_cache import SharedCache, attending, takes_masks
from pipeline.evaluate.steps import Sampling, Steps, columns_for, rows_for

REFILL = 8  # on a GPU an eighth of the rows is filled at once: a forward pass is worth it
INCOMPLETE = "\ufffd"  # at the end of a text: a character of which bytes are missing
# settings of a GenerationConfig that change no greedy choice; the length is the request's
NOT_FOR_GREEDY = {
    *(
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("use_cache", "cache_implementation", "_from_model_config", "transformers_version"),
}


def can_decode(model: Any) -> bool:
    """Whether `decode` chooses the tokens that transformers' greedy generate() would, from a mask
    of its own.
    """
    replaceable = model._supports_attention_backend and takes_masks(model.config, "sdpa")
    return replaceable and not settings_beyond_greedy(model)


def settings_beyond_greedy(model: Any) -> list[str]:
    """Return settings of a model's generation config that change which token is chosen, such as
    repetition_penalty.
    """
    defaults = GenerationConfig._get_default_generation_params()
    settings = model.generation_config.to_dict().items()
    changed = set()
    for name, value in settings:
        if value not in (None, False, defaults.get(name)):
            changed.add(name)
    return sorted(changed - NOT_FOR_GREEDY)


def split_thoughts(text: str, think_end: str | None) -> tuple[str | None, str]:
    """Split an answer into a model's thoughts and what follows them, as the harness does.

    Args:
        think_end: The text at the end of the thoughts; None for a model that does not think.

    Returns:
        The thoughts, or None if they do not end, and the answer.
    """
    if think_end is None:
        return None, text
    thoughts, end, answer = text.rpartition(think_end)
    return (thoughts if end else None), answer.lstrip()


@dataclass
class Ending:
    """When an answer is over: at one of the tokens `ends`, at a string of `stop`, after `room`
    tokens.

    to_text: decodes tokens, special ones too. completes: token -> whether it could complete a stop
    string, as far as this was asked. think_end: ends a model's thoughts, in which a stop string
    ends nothing.
    """

    ends: set[int]
    stop: Sequence[str]
    room: int
    to_text: Callable[[list[int]], str]
    completes: dict[int, bool] = field(default_factory=dict)
    think_end: str | None = None

    def could_complete(self, token: int) -> bool:
        """Whether a stop string could be complete with this token: it has the last letter of one,
        maybe a space that a decoder drops; or the rest of a character, where one is not ASCII.
        """
        if token not in self.completes:
            text = self.to_text([token])
            broken = INCOMPLETE in text and not all(string.isascii() for string in self.stop)
            self.completes[token] = broken or any(string[-1:] in f" {text}" for string in self.stop)
        return self.completes[token]


@dataclass(eq=False)
class _Row:
    """A prompt, as far as it is not shared, and its answer from `start` on.

    begun: steps that were begun for it.
    """

    index: int
    tokens: list[int]
    begun: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.start = len(self.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.start :]

    def is_over(self, ending: Ending) -> bool:
        """Asked after each token.

        The answer is decoded only where its last token could complete a stop string.
        """
        if self.tokens[-1] in ending.ends or len(self.tokens) - self.start >= ending.room:
            return True
        if not ending.could_complete(self.tokens[-1]):
            return False
        thoughts, answer = split_thoughts(ending.to_text(self.answer), ending.think_end)
        if ending.think_end is not None and thoughts is None:
            return False
        return any(string in answer for string in ending.stop)


def decode(
    model: Any,
    prefix: Sequence[int],
    rests: Sequence[Sequence[int]],
    slots: int,
    ending: Ending,
    answered: Callable[[int, list[int]], None],
    sampling: Sampling | None = None,
    ahead: int | None = None,
) -> None:
    """Answer the prompts `prefix` + rest, at most `slots` at a time, the longest first.

    answered: is given the index of a rest and the tokens of its answer, the end token included,
        when the answer ends.
    sampling: how tokens are drawn; None: the likeliest. ahead: steps that are begun before the
    tokens of one are looked at, so that a GPU does not wait; an answer that is over by then has a
    step too many, which is dropped. By default one on CUDA, else none.
    """
    device = model.device
    on_gpu = device.type == "cuda"
    ahead = int(on_gpu) if ahead is None else ahead
    waiting = deque(sorted(range(len(rests)), key=lambda index: -len(rests[index])))
    count = rows_for(device, min(slots, len(rests)))
    cache = SharedCache.of(model, count, columns_for(device, max(map(len, rests)) + ending.room))
    rows: list[_Row | None] = [None] * count
    together = max(1, count // REFILL) if on_gpu else 1
    running: deque[tuple[list[_Row | None], Callable[[], list[int]]]] = deque()
    with attending(cache) if prefix else nullcontext():
        cache.share(prefix)
        steps = Steps(cache, sampling)
        while waiting or running or any(rows):
            free = [slot for slot, row in enumerate(rows) if row is None][
                : slots - sum(map(bool, rows))
            ]
            if waiting and len(free) >= min(together, len(waiting)):
                while free and waiting:  # the longest comes first
                    row_limit = max(1, FILL // (len(prefix) + len(rests[waiting[0]])))
                    free_slots, free = free[: min(row_limit, len(waiting))], free[row_limit:]
                    indices = [waiting.popleft() for _ in free_slots]
                    cache.fill(free_slots, [rests[index] for index in indices])
                    for slot, index in zip(free_slots, indices, strict=True):
                        rows[slot] = _Row(index, list(rests[index]))
            elif not waiting:
                rows = _closed_up(cache, rows)
            if any(rows):
                live = [row for row in rows if row]
                numbers = []
                if sampling:
                    numbers = [
                        sampling.number(row.index, row.begun) if row else 0.0 for row in rows
                    ]
                reads = max(row.start + row.begun for row in live)
                running.append((list(rows), steps.next(len(rows), reads, numbers)))
                for row in live:
                    row.begun += 1
            if running and (len(running) > ahead or not any(rows)):
                begun, read_tokens = running.popleft()
                for prompt, token in zip(begun, read_tokens(), strict=True):
                    if prompt and not prompt.over:
                        prompt.tokens.append(token)
                        prompt.over = prompt.is_over(ending)
                        if prompt.over:
                            rows[rows.index(prompt)] = None
                            answered(prompt.index, prompt.answer)


def _closed_up(cache: SharedCache, rows: list[_Row | None]) -> list[_Row | None]:
    """Return the rows without those that are free, as far as the next smaller number of rows that
    is computed.
    """
    live = [slot for slot, row in enumerate(rows) if row]
    count = rows_for(cache.device, len(live))
    sources = [slot for slot in live if slot >= count]
    if count < len(rows) and sources:
        targets = [slot for slot in range(count) if rows[slot] is None][: len(sources)]
        cache.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            rows[target] = rows[source]
    return rows[:count]
