"""Generation in slots: an answer that ends makes room for the next prompt at once (continuous batching).

Each prompt occupies a row of the cache. Its tokens have their own positions, without gaps, so that no row depends on
another: a key is visible to the queries at its position and after it, as far as a sliding window reaches. Rows are
dropped when no prompt waits, and attention reads no further than the longest row. What all prompts begin with is stored
and read once for all rows.

At each step a draft (drafts.py) is tried and kept as far as the model's own choices agree (speculative decoding,
Leviathan et al. 2023), so that drafts change no answer. What is drawn depends on the question, the answer's number and
the token's place in it alone (`Sampling`), so that batches, drafts and shards change no sample either.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.evaluate import drafts
from pipeline.evaluate.prefix import SLIDING, layer_kinds, takes_own_masks

ATTENTION = "prefix_read_once"  # as transformers knows it
RATE = 0.3  # at which older drafts are forgotten
INCOMPLETE = "\ufffd"  # at the end of a text: a character of which bytes are missing
NOT_FOR_GREEDY = {  # settings of a GenerationConfig that change no greedy choice; the length is the request's
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("use_cache", "cache_implementation", "_from_model_config", "transformers_version"),
}


def can_decode(model: Any) -> bool:
    """Whether `decode` chooses the tokens that transformers' greedy generate() would, from a mask of its own."""
    replaceable = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    return replaceable and takes_own_masks(model.config) and not settings_beyond_greedy(model)


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

    def number(self, place: int, position: int) -> float:
        """The number in [0, 1) that decides about a token of a prompt's answer."""
        digest = hashlib.sha256(f"{self.keys[place]} {position}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def choose(self, logits: torch.Tensor, numbers: Sequence[Sequence[float]]) -> torch.Tensor:
        """[rows, tokens, vocabulary] -> [rows, tokens]: by inverting the distribution at `numbers` [rows, tokens]."""
        probabilities, tokens = (
            (logits.float() / self.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        )
        upto = probabilities.cumsum(dim=-1)
        kept = upto - probabilities < self.top_p  # the first always
        mass = (probabilities * kept).sum(dim=-1, keepdim=True)
        target = torch.tensor(numbers, device=logits.device)[..., None] * mass
        place = ((upto <= target) & kept).sum(dim=-1, keepdim=True).clamp(max=kept.sum(dim=-1, keepdim=True) - 1)
        return tokens.gather(-1, place).squeeze(-1)


class _Row(drafts.Seen):
    """A prompt and its answer. All tokens but the last are in the cache. neighbours: other models' answers to it."""

    def __init__(
        self, index: int, before: drafts.Seen, rest: Sequence[int], neighbours: drafts.Neighbours | None = None
    ) -> None:
        super().__init__()
        self.index, self.neighbours = index, neighbours
        self.trusted = drafts.NEIGHBOURS  # tokens of neighbours that are tried
        self.proposed: dict[str, list[int]] = {}
        self.right = {"neighbours": 1.0, "lookup": 1.0}  # moving average of how often a source's first token was right
        self.counts = Counter[str]()
        self.tokens, self.place_after = list(before.tokens), dict(before.place_after)
        for token in rest:
            self.append(token)
        self.start = len(self.tokens)  # of the answer
        self.complete = deque([self.start])  # places at which no character is cut in two

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.start :]

    def draft(self) -> list[int]:
        """Tokens that may come next, from the source that was right more often of late; the neighbours if both were."""
        place = self.find(self.tokens)[1]
        followed = self.neighbours.draft(self.answer, self.trusted) if self.neighbours else []
        self.proposed = {"neighbours": followed, "lookup": self.tokens[place : place + drafts.LOOKUP]}
        self.source = max(self.proposed, key=lambda source: (bool(self.proposed[source]), self.right[source]))
        return self.proposed[self.source]

    def extend(self, tried: Sequence[int], chosen: Sequence[int], ending: Ending) -> bool:
        """Append the model's choices as far as what it was given before each was right. Whether the answer is over."""
        accepted, over = 0, False
        for token, draft in zip(chosen, [*tried[1:], None], strict=False):
            self.append(token)
            accepted += token == draft
            over = self._is_over(ending)
            if over or token != draft:
                break
        if len(tried) > 1:
            self.counts.update({f"{self.source}_proposed": len(tried) - 1, f"{self.source}_accepted": accepted})
            if self.source == "neighbours":  # a draft that was wrong is followed by shorter ones
                right = accepted == len(tried) - 1
                self.trusted = min(2 * self.trusted, drafts.NEIGHBOURS) if right else drafts.LOOKUP
        for source, tokens in self.proposed.items():
            self.right[source] += RATE * ((tokens[:1] == chosen[:1]) - self.right[source])
        return over

    def _is_over(self, ending: Ending) -> bool:
        if self.tokens[-1] in ending.ends or len(self.tokens) - self.start >= ending.room:
            return True
        while len(self.complete) > 1 and self.complete[1] <= len(self.tokens) - ending.look_back:
            self.complete.popleft()
        text = ending.to_text(self.tokens[self.complete[0] :])
        if not text.endswith(INCOMPLETE):
            self.complete.append(len(self.tokens))
        return any(string in text for string in ending.stop)


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: of the shared prefix, and of each row [rows, heads, positions, width]."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def zeros_like(states: torch.Tensor) -> torch.Tensor:  # what is masked must be finite
            return states.new_zeros(self.slots.rows, states.shape[1], self.slots.length, states.shape[3])

        self.keys, self.values = zeros_like(key_states), zeros_like(value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self.slots.written is None:
            self.prefix = key_states, value_states
            return self.prefix
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys.transpose(1, 2)[self.slots.written] = key_states.transpose(1, 2)
        self.values.transpose(1, 2)[self.slots.written] = value_states.transpose(1, 2)
        if self.slots.reads:
            rows, positions = len(key_states), self.slots.reads
            key_states, value_states = self.keys[:rows, :, :positions], self.values[:rows, :, :positions]
        if self.prefix is None or (self.slots.reads and self.slots.reads_once):
            return key_states, value_states
        shape = len(key_states), -1, -1, -1
        keys, values = (states.expand(shape) for states in self.prefix)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self) -> int:
        return 0  # the positions are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # where no mask is given

    def get_max_length(self) -> int:
        return -1


class Slots(Cache):
    """Keys and values of `rows` rows, `length` positions and a draft each, and once of the prefix before all of them.

    A forward pass writes what `written` names, rows and positions (None: the prefix). A step then reads `reads`
    positions of each row that it writes, and the prefix once for all rows (`reads_once`) if the model's attention takes
    keys and values as they are stored. DeepSeek's does not, for example: the prefix is then read by each row.
    """

    def __init__(self, model: Any, rows: int, length: int, draft: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(model.config.get_text_config().num_hidden_layers)])
        self.model, self.rows, self.length, self.draft = model, rows, length + draft, draft
        self.kinds = layer_kinds(model.config)
        self.written: tuple[Any, Any] | None = None
        self.shared = self.reads = self.plain_layers = 0
        self.reads_once = False

    def share(self, prefix: Sequence[int]) -> None:
        """Compute the prefix of all rows."""
        self.shared = len(prefix)
        places = torch.arange(-len(prefix), 0)
        self._run(torch.tensor([prefix]), places, self._masks(places[None], 0) if SLIDING in self.kinds else None)
        self.reads_once = self.plain_layers == len(self.layers)

    def fill(self, row: int, prompt: Sequence[int]) -> None:
        """Write a prompt to a row, which forgets what it held."""
        layer: Any
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row], layer.values[row] = 0, 0
        if not prompt:
            return
        places = torch.arange(len(prompt))
        self.reads, self.written = 0, (slice(row, row + 1), slice(len(prompt)))
        masks = self._masks(places[None], len(prompt)) if self.shared or SLIDING in self.kinds else None
        self._run(torch.tensor([prompt]), places, masks)

    def step(
        self, inputs: Sequence[Sequence[int]], starts: Sequence[int], choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[list[int]]:
        """The model's choice after each token of `inputs`, written to the first rows from positions `starts` on."""
        width = max(map(len, inputs))
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in inputs])
        places = torch.tensor(starts)[:, None] + torch.arange(width)
        rows = torch.arange(len(ids))[:, None]
        self.reads, self.written = max(starts) + width, (rows.to(self.device), places.to(self.device))
        return choose(self._run(ids, places, self._masks(places, self.reads), width)).tolist()

    def move(self, source: int, target: int) -> None:
        layer: Any
        for layer in self.layers:
            layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def _masks(self, places: torch.Tensor, end: int) -> Any:
        """What is added to the scores of tokens at `places` [rows, tokens] and keys before `end`: [rows, 1, tokens,
        keys], a dict by kind where the model mixes layers. A prefix that is read once has no columns where all of it is
        visible."""
        masks = {}
        for kind in self.kinds:
            first = 0 if self.reads and self.reads_once and kind != SLIDING else -self.shared
            distance = places[:, None, :, None] - torch.arange(first, end)
            hidden = distance < 0
            if kind == SLIDING:
                hidden |= distance >= self.model.config.get_text_config().sliding_window
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min).to(self.device)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _run(self, ids: torch.Tensor, places: torch.Tensor, masks: Any, keep: int = 1) -> torch.Tensor:
        """Logits of the last `keep` tokens. places: after the prefix."""
        last_place = self.length - self.draft - 1  # of a token that counts
        return self.model(
            input_ids=ids.to(self.device),
            position_ids=(self.shared + places.clamp(max=last_place)).expand(ids.shape).to(self.device),
            attention_mask=masks,
            past_key_values=self,
            logits_to_keep=keep,
        ).logits

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **other: Any
    ) -> Any:
        """transformers' attention, which at a step reads the keys and values of the prefix once for all rows.

        query [rows, heads, tokens, width], key and value [rows, shared heads, positions, width] -> [rows, tokens,
        heads, width]. As in transformers' eager attention, weights are float32.
        """
        stored = self.layers[module.layer_idx].prefix
        if self.written is None:
            self.plain_layers += key is stored[0] and value is stored[1]
        if not (self.reads and self.reads_once):
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **other)
        keys, values = (states[0] for states in stored)
        rows, _, tokens, width = query.shape
        heads, positions, shared = key.shape[1], key.shape[2], self.shared
        query = (query * (width**-0.5 if scaling is None else scaling)).reshape(rows, heads, -1, width)
        together = query.transpose(0, 1).reshape(heads, -1, width)  # [heads, rows x group x tokens, width]
        before = (together @ keys.transpose(1, 2)).view(heads, rows, -1, shared).transpose(0, 1)
        own = (query @ key.transpose(2, 3)).view(rows, heads, -1, tokens, positions)
        own = own + mask[:, :, None, :, -positions:]
        if mask.shape[-1] > positions:  # of a window, which may begin within the prefix
            before = before.reshape(rows, heads, -1, tokens, shared) + mask[:, :, None, :, :shared]
            before = before.view(rows, heads, -1, shared)
        scores = torch.cat([before, own.view(rows, heads, -1, positions)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        found = weights[..., :shared].transpose(0, 1).reshape(heads, -1, shared) @ values
        found = found.view(heads, rows, -1, found.shape[-1]).transpose(0, 1) + weights[..., shared:] @ value
        found = found.view(rows, heads, -1, tokens, found.shape[-1])
        return found.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1, found.shape[-1]), None


@contextmanager
def _attention_of(slots: Slots) -> Iterator[None]:
    """Inside, the model computes attention by `slots.attend`."""
    AttentionInterface.register(ATTENTION, slots.attend)
    slots.model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        slots.model.set_attn_implementation("sdpa")
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)  # lets go of the slots


def decode(
    model: Any,
    prefix: Sequence[int],
    rests: Sequence[Sequence[int]],
    slots: int,
    ending: Ending,
    answered: Callable[[int, list[int]], None],
    neighbours: Sequence[Sequence[Sequence[int]]] = (),
    counts: Counter[str] | None = None,
    sampling: Sampling | None = None,
) -> None:
    """Answer the prompts `prefix` + rest, at most `slots` at a time, the longest first.

    answered: is given the index of a rest and the tokens of its answer, the end token included, when the answer ends.
    neighbours: for each rest, answers of other models, the newest first. counts: to which steps, tokens of answers and
    drafts (`lookup_proposed`, `lookup_accepted`, `neighbours_proposed`, `neighbours_accepted`) are added. sampling: how
    tokens are drawn; None: the likeliest.
    """
    beginning, counts = drafts.Seen(), Counter() if counts is None else counts
    for token in prefix:
        beginning.append(token)
    waiting = deque(sorted(range(len(rests)), key=lambda index: -len(rests[index])))
    longest_draft = max(drafts.LOOKUP, drafts.NEIGHBOURS if any(neighbours) else 0)
    cache = Slots(model, min(slots, len(rests)), max(map(len, rests)) + ending.room, longest_draft)
    vocabulary = model.get_input_embeddings().num_embeddings
    rows: list[_Row] = []
    with _attention_of(cache) if prefix else nullcontext():
        if prefix:
            cache.share(prefix)
        while waiting or rows:
            while waiting and len(rows) < slots:
                index = waiting.popleft()
                cache.fill(len(rows), rests[index][:-1])
                others = drafts.Neighbours(neighbours[index], vocabulary) if neighbours else None
                rows.append(_Row(index, beginning, rests[index], others))
            inputs = [[row.tokens[-1], *row.draft()] for row in rows]
            starts = [len(row.tokens) - len(prefix) - 1 for row in rows]
            chosen = cache.step(inputs, starts, drawing(sampling, rows) if sampling else likeliest)
            counts["steps"] += 1
            over = [row.extend(tried, best, ending) for row, tried, best in zip(rows, inputs, chosen, strict=True)]
            for place in reversed([place for place, ended in enumerate(over) if ended]):
                counts.update(rows[place].counts, tokens=len(rows[place].answer))
                answered(rows[place].index, rows[place].answer)
                last = rows.pop()
                if place < len(rows):
                    cache.move(len(rows), place)
                    rows[place] = last


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def drawing(sampling: Sampling, rows: Sequence[_Row]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draws the next tokens of the rows: each depends on its place in the answer, whether it was drafted or not."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        width = logits.shape[1]
        numbers = [
            [sampling.number(row.index, len(row.tokens) - row.start + ahead) for ahead in range(width)] for row in rows
        ]
        return sampling.choose(logits, numbers)

    return choose
