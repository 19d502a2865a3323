"""Keys and values of what prompts begin with, once, and of rows of tokens below it, each with its
own positions.

A token attends to the shared prefix and to those of its row that are visible to it: what came
before it in its prompt, or its ancestors in a trie (tree attention, as in SpecInfer: Miao et al.
2024, section 4.2). A sliding window counts positions, not columns, so that models with windows are
exact too.

transformers' continuous batching also shares prefixes, in blocks of its paged cache. It is not
used: it generates but gives no likelihoods of given continuations, it ends an answer at end tokens
only and not at the stop strings of the tasks, and on a CPU its attention over all requests at once
costs eight times what this does (measured at commit fb35b6d).
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FORCE_GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"  # transformers reads it at each attention
ATTENTION = "prefix_read_once"  # as transformers knows it
KEPT = "shared_cache"  # attribute of a model: memory for its next prompts
FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config: Any) -> list[str]:
    """How each layer attends:

    FULL to all that came before, SLIDING to a window of it, or another way.
    """
    config = config.get_text_config()
    if getattr(config, "sliding_window", None):
        kind = SLIDING
    else:
        kind = FULL
    return list(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers)


def takes_masks(config: Any, *attentions: str) -> bool:
    """Whether a mask by positions states what each layer attends to, and the model computes by one
    of `attentions`.
    """
    return {*layer_kinds(config)} <= {
        FULL,
        SLIDING,
    } and config.get_text_config()._attn_implementation in attentions


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: of the shared prefix, and of each row [rows, heads, positions,
    width].
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: SharedCache) -> None:
        super().__init__()
        self.cache = cache
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None
        self.kept: list[torch.Tensor] = []  # memory of prefixes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def zeros_like(states: torch.Tensor) -> torch.Tensor:  # what is masked must be finite
            return states.new_zeros(
                self.cache.rows, states.shape[1], self.cache.room, states.shape[3]
            )

        self.keys, self.values = zeros_like(key_states), zeros_like(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        cache, new_states = self.cache, (key_states, value_states)
        if self.prefix is None and cache.prefix:
            self.prefix = new_states
            return new_states
        if cache.written is not None:
            if not self.is_initialized:
                self.lazy_initialization(*new_states)
            stored: Any = self.keys, self.values
            source, target = cache.written
            for states, new in zip(stored, new_states, strict=True):
                states.transpose(1, 2)[target] = new.transpose(1, 2)[source]
            if cache.reads:
                new_states = tuple(states[: len(key_states), :, : cache.reads] for states in stored)
        if self.prefix is None or (cache.reads and cache.reads_once):
            return new_states
        pairs = zip(self.prefix, new_states, strict=True)
        keys, values = (
            torch.cat([prefix_states.expand(len(key_states), -1, -1, -1), new], dim=2)
            for prefix_states, new in pairs
        )
        return keys, values

    def keep(self, length: int) -> bool:
        """Keep the last `length` positions of the prefix, where the prefix before lay if there is
        room; gives whether there was.
        """
        assert self.prefix
        parts = [states[:, :, -length:] for states in self.prefix]
        has_room = bool(self.kept) and self.kept[0].shape[2] >= length
        if not has_room:
            self.kept = [states.clone() for states in parts]
        for buffer, states in zip(self.kept, parts, strict=True):
            buffer[:, :, :length] = states
        self.prefix = (self.kept[0][:, :, :length], self.kept[1][:, :, :length])
        return has_room

    def get_seq_length(self) -> int:
        return 0  # the positions are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # where no mask is given

    def get_max_length(self) -> int:
        return -1


class SharedCache(Cache):
    """A prefix, which may be empty and is computed by `share`, and `rows` rows of `room` tokens
    that are stored.

    A forward pass writes what `written` names, tokens of its rows and their places in the cache
    (None: its keys and values are forgotten). A step reads `reads` columns of each row that it
    writes, and the prefix once for all rows (`reads_once`) inside `attending`, if the model's
    attention takes keys and values as they are stored. DeepSeek's does not, for example: the prefix
    is then read by each row.

    tokens, places [rows, 1]: the last token of each row, which no forward pass has seen, and its
    position after the prefix; drawn [rows]: numbers that decide about its next token where tokens
    are drawn. graphs: steps recorded on CUDA (steps.py), which read the memory of this cache;
    recordable: whether the model's can be.
    """

    def __init__(self, model: Any, rows: int = 0, room: int = 0) -> None:
        self.model, self.rows, self.room = (
            weakref.proxy(model),
            rows,
            room,
        )  # the model keeps the cache
        # transformers 5.24 gave it another name
        if "cache" in inspect.signature(model.forward).parameters:
            self.keyword = "cache"
        else:
            self.keyword = "past_key_values"
        self.kinds = layer_kinds(model.config)
        self.window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
        super().__init__(layers=[_Layer(self) for _ in self.kinds])
        self.tokens, self.places = torch.zeros(2, rows, 1, dtype=torch.long, device=self.device)
        self.numbers = torch.arange(max(rows, room), device=self.device)
        self.drawn = torch.zeros(rows, device=self.device)
        self.graphs: dict[Any, Any] = {}
        self.recordable = self.device.type == "cuda"
        self._forget([])

    @classmethod
    def of(cls, model: Any, rows: int, room: int) -> SharedCache:
        """Return the cache that the model had for its last prompts if it is large enough, with its
        recorded steps.
        """
        cache = getattr(model, KEPT, None)
        if cache is None or cache.rows < rows or cache.room < room:
            drop_cache(model)  # before the next takes its room
            cache = cls(model, rows, room)
            setattr(model, KEPT, cache)
        return cache

    def _forget(self, prefix: Sequence[int]) -> None:
        self.prefix = list(prefix)
        self.written: tuple[Any, Any] | None = None
        self.shared = self.reads = self.plain_layers = 0
        self.reads_once = False
        layer: Any
        for layer in self.layers:
            layer.prefix = None

    def share(self, prefix: Sequence[int]) -> None:
        """Compute a prefix in place of the one before.

        A window keeps no more of it than it reaches back to.
        """
        self._forget(prefix)
        if not prefix:
            return
        positions = torch.arange(len(prefix), device=self.device)[None]
        masks = None
        if SLIDING in self.kinds:
            masks = self.masks(positions, positions)
        self.logits(torch.tensor([self.prefix]), positions, masks)
        self.shared, self.reads_once = len(prefix), self.plain_layers == len(self.layers)
        layer: Any
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            if not layer.keep(min(self.shared, self.window) if kind == SLIDING else self.shared):
                self.graphs.clear()

    def fill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts to rows, all tokens but the last, which is the next step's.

        A row forgets what it held: an overflow would stay, masked or not.
        """
        row_indices = torch.tensor(rows, device=self.device)
        layer: Any
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row_indices], layer.values[row_indices] = 0, 0
        lengths = [len(prompt) - 1 for prompt in prompts]
        self.tokens[row_indices] = torch.tensor(
            [prompt[-1:] for prompt in prompts], device=self.device
        )
        self.places[row_indices] = torch.tensor(lengths, device=self.device)[:, None]
        width = max(lengths)
        if width:
            positions = torch.arange(width, device=self.device)[None]
            ids = pad_sequence(
                [torch.tensor(prompt[:-1], dtype=torch.long) for prompt in prompts],
                batch_first=True,
            )
            row, column = (positions <= self.places[row_indices] - 1).nonzero(as_tuple=True)
            self.reads, self.written = 0, ((row, column), (row_indices[row], column))
            self.logits(ids, positions, self.masks(positions, positions))

    def step(self, rows: int, reads: int) -> torch.Tensor:
        """Logits [rows, vocabulary] after the token of each of the first rows, which is written at
        its place. Rows that are over stay within the columns that are read: a window with nothing
        in it gives no numbers.
        """
        places, numbers = self.places[:rows].clamp(max=reads - 1), self.numbers[:rows, None]
        self.reads, self.written = reads, (..., (numbers, places))
        return self.logits(
            self.tokens[:rows], places, self.masks(places, self.numbers[None, :reads])
        )[:, 0]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows to rows that are free."""
        source, target = torch.tensor([sources, targets], device=self.device)
        layers: Any = self.layers
        for states in (
            self.tokens,
            self.places,
            *(part for layer in layers for part in (layer.keys, layer.values)),
        ):
            states[target] = states[source]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def masks(
        self, places: torch.Tensor, columns: torch.Tensor, visible: torch.Tensor | None = None
    ) -> Any:
        """What transformers leaves as it is: [rows, 1, tokens, keys], or one for each kind of layer
        where the model mixes them; of booleans, or added to the scores in eager attention.

        places [rows, tokens] and columns [rows, keys]: positions after the prefix of tokens and of
        the row's keys; visible [rows, tokens, keys]: which of these a token attends to, by default
        those up to its own position; and to all of the prefix, which has no columns where it is
        read once.
        """
        if visible is None:
            visible = places[:, :, None] >= columns[:, None]
        masks = {}
        for kind in dict.fromkeys(self.kinds):
            reach = self.shared
            if kind == SLIDING:
                reach = min(self.shared, self.window)
            elif self.reads and self.reads_once:
                reach = 0
            visible_prefix = visible.new_ones(*visible.shape[:2], reach)
            mask = torch.cat([visible_prefix, visible], dim=2)
            if kind == SLIDING:
                key_positions = torch.arange(-reach, 0, device=columns.device).expand(
                    len(columns), -1
                )
                key_positions = torch.cat([key_positions, columns], dim=1)
                mask &= places[:, :, None] - key_positions[:, None] < self.window
            if self.model.config.get_text_config()._attn_implementation == "eager":
                mask = torch.zeros_like(mask, dtype=self.model.dtype).masked_fill(
                    ~mask, torch.finfo(self.model.dtype).min
                )
            masks[kind] = mask[:, None].to(self.device)
        if len(masks) > 1:
            return masks
        return next(iter(masks.values()), None)

    def logits(
        self, ids: torch.Tensor, places: torch.Tensor, masks: Any, keep: int = 1
    ) -> torch.Tensor:
        """Logits after the last `keep` tokens, after all where it is 0. places [rows, tokens]:
        positions after the prefix.
        """
        return self.model(
            input_ids=ids.to(self.device),
            position_ids=(self.shared + places).expand(ids.shape).to(self.device),
            attention_mask=masks,
            use_cache=True,
            logits_to_keep=keep,
            **{self.keyword: self},
        ).logits

    def attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scaling: Any = None,
        **other: Any,
    ) -> Any:
        """transformers' attention, which at a step reads the keys and values of the prefix once for
        all rows.

        query [rows, heads, tokens, width], key and value [rows, shared heads, positions, width] ->
        [rows, tokens, heads, width]. As in transformers' eager attention, weights are float32.
        """
        stored: Any = self.layers[module.layer_idx].prefix
        self.plain_layers += not self.shared and key is stored[0] and value is stored[1]
        if not (self.reads and self.reads_once):
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **other)
        keys, values = (states[0] for states in stored)
        rows, _, tokens, width = query.shape
        heads, positions, shared = key.shape[1], key.shape[2], keys.shape[1]
        query = (query * (width**-0.5 if scaling is None else scaling)).reshape(
            rows, heads, -1, width
        )
        together = query.transpose(0, 1).reshape(
            heads, -1, width
        )  # [heads, rows x group x tokens, width]
        prefix_weights = (
            (together @ keys.transpose(1, 2)).view(heads, rows, -1, shared).transpose(0, 1)
        )
        scores = torch.cat([prefix_weights, query @ key.transpose(2, 3)], dim=-1).view(
            rows, heads, -1, tokens, shared + positions
        )
        hidden = ~mask[:, :, None]  # of a window the prefix has columns too
        scores[..., -hidden.shape[-1] :].masked_fill_(hidden, torch.finfo(scores.dtype).min)
        weights = (
            scores.softmax(dim=-1, dtype=torch.float32)
            .to(query.dtype)
            .view(rows, heads, -1, shared + positions)
        )
        attended = weights[..., :shared].transpose(0, 1).reshape(heads, -1, shared) @ values
        attended = (
            attended.view(heads, rows, -1, attended.shape[-1]).transpose(0, 1)
            + weights[..., shared:] @ value
        )
        attended = attended.view(rows, heads, -1, tokens, attended.shape[-1])
        return attended.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1, attended.shape[-1]), None


def kept_bytes(model: Any) -> int:
    """Bytes of keys and values that a model keeps for its next prompts, which can take their
    place.
    """
    layers: Any = []
    cache = getattr(model, KEPT, None)
    if cache:
        layers = cache.layers
    states = []
    for layer in layers:
        if layer.is_initialized:
            for part in (layer.keys, layer.values, *layer.kept):
                states.append(part)
    return sum(part.nbytes for part in states)


def drop_cache(model: Any) -> None:
    """Free the memory that a model keeps for its next prompts."""
    cache = getattr(model, KEPT, None)
    if cache:
        cache.graphs.clear()
        cache.layers.clear()
        setattr(model, KEPT, None)


@contextmanager
def heads_as_they_are(device: torch.device) -> Iterator[None]:
    """Inside, on a CPU, attention reads the keys of grouped heads where they lie, also under a
    mask.

    transformers copies them for each query head first, a third of the time of attention to a long
    prefix; the result is the same. On a GPU it is right to: with a mask, the fast kernels do not
    take grouped heads.
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


@contextmanager
def attending(cache: SharedCache) -> Iterator[None]:
    """Inside, the model computes attention by `cache.attend`."""
    AttentionInterface.register(ATTENTION, cache.attend)
    cache.model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        cache.model.set_attn_implementation("sdpa")
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)  # lets go of the cache
