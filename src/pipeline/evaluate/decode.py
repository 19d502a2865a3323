"""Generation in slots: a finished answer makes room for the next prompt (continuous batching).

Each prompt occupies a row of the cache. Its tokens have separate positions without gaps, so no row
depends on another. A key is visible to the queries at its position and after it, as far as a
sliding window reaches. Free rows are filled in one padded pass, and dropped when no prompt waits.
Attention reads only as far as the longest row. The common prefix of the prompts is stored once and
read once for all rows. A sampled token depends only on the question, the answer's number and the
token's position in the answer (`Sampling`), so batches change no sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from pipeline.evaluate.memory import FILL
from pipeline.evaluate.shared_cache import SharedCache, attending
from pipeline.evaluate.steps import Sampling, Steps, columns_for, rows_for

REFILL = 8  # a GPU waits until an eighth of its rows is free: fewer are not worth a forward pass
INCOMPLETE = "\ufffd"  # at the end of a text: some bytes of a character are missing
# settings of a GenerationConfig that change no greedy choice; the request sets the length
NOT_FOR_GREEDY = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("use_cache", "cache_implementation", "_from_model_config", "transformers_version"),
}


def settings_beyond_greedy(model: Any) -> list[str]:
    """Return a model's generation settings that change greedy choices, like repetition_penalty."""
    defaults = GenerationConfig._get_default_generation_params()
    changed = set()
    for name, value in model.generation_config.to_dict().items():
        if value not in (None, False, defaults.get(name)):
            changed.add(name)
    return sorted(changed - NOT_FOR_GREEDY)


def split_thoughts(text: str, think_end: str | None) -> tuple[str | None, str]:
    """Split an answer into a model's thoughts and the text after them, as the harness does.

    Args:
        text: The answer.
        think_end: The text at the end of the thoughts. None for a model that does not think.

    Returns:
        The thoughts, or None if they do not end, and the text after them.
    """
    if think_end is None:
        return None, text
    thoughts, end, answer = text.rpartition(think_end)
    if not end:
        return None, answer.lstrip()
    return thoughts, answer.lstrip()


@dataclass
class Ending:
    """The conditions that end an answer.

    Attributes:
        ends: End tokens.
        stop: Stop strings.
        room: The most tokens of an answer.
        to_text: Decodes tokens, including special tokens.
        completes: Token -> `could_complete`, for the tokens seen so far.
        think_end: The end of a model's thoughts, in which stop strings are ignored.
    """

    ends: set[int]
    stop: Sequence[str]
    room: int
    to_text: Callable[[list[int]], str]
    completes: dict[int, bool] = field(default_factory=dict)
    think_end: str | None = None

    def could_complete(self, token: int) -> bool:
        """Return True if a stop string could be complete with this token.

        The token contains the last letter of a stop string, or a space that the decoder drops. If a
        stop string is not ASCII, the token may also be the end of a character.
        """
        if token not in self.completes:
            text = self.to_text([token])
            is_possible = any(string[-1:] in f" {text}" for string in self.stop)
            if INCOMPLETE in text and not all(string.isascii() for string in self.stop):
                is_possible = True
            self.completes[token] = is_possible
        return self.completes[token]


@dataclass(eq=False)
class _Row:
    """The tokens of a prompt after the shared prefix, and of its answer from `start` on.

    `begun` counts the steps that were started for it.
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
        """Return True if the last token ended the answer.

        The answer is decoded only if its last token could complete a stop string.
        """
        last = self.tokens[-1]
        if last in ending.ends or len(self.tokens) - self.start >= ending.room:
            return True
        if not ending.could_complete(last):
            return False
        thoughts, answer = split_thoughts(ending.to_text(self.answer), ending.think_end)
        if ending.think_end is not None and thoughts is None:
            return False
        return any(string in answer for string in ending.stop)


@dataclass(eq=False)
class _Slots:
    """The rows of a cache, the prompts that wait for a row, and the steps not yet read."""

    cache: SharedCache
    rests: Sequence[Sequence[int]]
    limit: int  # the most rows in use
    sampling: Sampling | None
    rows: list[_Row | None]

    def __post_init__(self) -> None:
        rests = self.rests
        self.steps = Steps(self.cache, self.sampling)
        self.waiting = deque(sorted(range(len(rests)), key=lambda index: -len(rests[index])))
        self.running: deque[tuple[list[_Row | None], Callable[[], list[int]]]] = deque()

    def free(self) -> list[int]:
        """Return the free rows that `limit` allows to fill."""
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        return free[: self.limit - len(self.rows) + len(free)]

    def fill(self, free: list[int], shared: int) -> None:
        """Put waiting prompts into free rows, the longest first, at most FILL tokens a pass."""
        while free and self.waiting:
            longest = shared + len(self.rests[self.waiting[0]])
            count = max(1, FILL // longest)
            slots = free[: min(count, len(self.waiting))]
            free = free[count:]
            indices = [self.waiting.popleft() for _ in slots]
            self.cache.fill(slots, [self.rests[index] for index in indices])
            for slot, index in zip(slots, indices, strict=True):
                self.rows[slot] = _Row(index, list(self.rests[index]))

    def close_up(self) -> None:
        """Drop free rows, down to the fewest rows that a step for the live rows can have.

        Live rows beyond this number move to free rows first.
        """
        rows = self.rows
        live = [slot for slot, row in enumerate(rows) if row]
        count = rows_for(self.cache.device, len(live))
        sources = [slot for slot in live if slot >= count]
        if sources:
            targets = [slot for slot in range(count) if rows[slot] is None]
            targets = targets[: len(sources)]
            self.cache.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                rows[target] = rows[source]
        self.rows = rows[:count]

    def begin_step(self) -> None:
        """Start a step of all rows, without waiting for its tokens."""
        rows = list(self.rows)
        sampling = self.sampling
        numbers = []
        if sampling:
            for row in rows:
                numbers.append(sampling.number(row.index, row.begun) if row else 0.0)
        live = list(filter(None, rows))
        reads = max(row.start + row.begun for row in live)
        self.running.append((rows, self.steps.next(len(rows), reads, numbers)))
        for row in live:
            row.begun += 1

    def end_step(self, ending: Ending) -> list[_Row]:
        """Read the tokens of the oldest step and return the rows whose answers are over."""
        begun, read_tokens = self.running.popleft()
        over = []
        for row, token in zip(begun, read_tokens(), strict=True):
            if not row or row.over:
                continue
            row.tokens.append(token)
            row.over = row.is_over(ending)
            if row.over:
                self.rows[self.rows.index(row)] = None
                over.append(row)
        return over


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

    Args:
        model: A transformers model.
        prefix: The tokens that all prompts begin with.
        rests: The remaining tokens of each prompt.
        slots: The most prompts that are answered together.
        ending: The conditions that end an answer.
        answered: Called with the index of a rest and the tokens of its answer, including the end
            token, when the answer ends.
        sampling: The settings of sampling. None: the likeliest token.
        ahead: How many steps are started before the tokens of a step are read, so that a GPU does
            not wait. An answer that is over by then has a step too many, which is dropped. None: 1
            on CUDA and 0 on a CPU.
    """
    device = model.device
    on_gpu = device.type == "cuda"
    ahead = int(on_gpu) if ahead is None else ahead
    count = rows_for(device, min(slots, len(rests)))
    columns = columns_for(device, max(map(len, rests)) + ending.room)
    cache = SharedCache.of(model, count, columns)
    fill_at_once = max(1, count // REFILL) if on_gpu else 1
    with attending(cache) if prefix else nullcontext():
        cache.share(prefix)
        queue = _Slots(cache, rests, slots, sampling, [None] * count)
        while queue.waiting or queue.running or any(queue.rows):
            free = queue.free()
            if queue.waiting and len(free) >= min(fill_at_once, len(queue.waiting)):
                queue.fill(free, len(prefix))
            elif not queue.waiting:
                queue.close_up()
            if any(queue.rows):
                queue.begin_step()
            if queue.running and (len(queue.running) > ahead or not any(queue.rows)):
                for row in queue.end_step(ending):
                    answered(row.index, row.answer)
