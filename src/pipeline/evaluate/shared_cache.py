"""A cache with the shared prefix of prompts, stored once, and rows of tokens after it.

A token attends to the shared prefix and to the tokens of its row that are visible to it: the
earlier tokens of its prompt, or its ancestors in a trie (tree attention, as in SpecInfer: Miao et
al. 2024, section 4.2). Each row has its own positions. A sliding window counts positions, not
columns, so models with windows are exact too.

transformers' continuous batching also shares prefixes, in blocks of its paged cache. It is not
used for three reasons. It generates, but cannot score given continuations. It ends an
answer only at end tokens, not at the stop strings of the tasks. On a CPU its attention over all
requests at once costs eight times as much (measured at commit fb35b6d).
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
ATTENTION = "prefix_read_once"  # its name in transformers
KEPT = "shared_cache"  # attribute of a model: its cache, reused for the next prompts
FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of attention of each layer.

    FULL reads all earlier tokens, and SLIDING a window of them. A model may have other kinds.
    """
    config = config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return list(layer_types)
    kind = SLIDING if getattr(config, "sliding_window", None) else FULL
    return [kind] * config.num_hidden_layers


def takes_masks(config: Any, *attentions: str) -> bool:
    """Return True if masks by positions determine each layer's attention.

    The model must also compute attention by one of `attentions`.
    """
    implementation = config.get_text_config()._attn_implementation
    return {*layer_kinds(config)} <= {FULL, SLIDING} and implementation in attentions


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, of the prefix and of the rows.

    Both are [rows, heads, positions, width]; the prefix has one row.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: SharedCache) -> None:
        super().__init__()
        self.cache = cache
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None
        self.kept: list[torch.Tensor] = []  # memory of prefixes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        memory = []
        for states in (key_states, value_states):
            _, heads, _, width = states.shape
            # zeroed, because masked numbers must be finite
            memory.append(states.new_zeros(self.cache.rows, heads, self.cache.room, width))
        self.keys, self.values = memory
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        cache = self.cache
        new_states = (key_states, value_states)
        if self.prefix is None and cache.prefix:
            self.prefix = new_states
            return new_states
        count = len(key_states)
        if cache.written is not None:
            if not self.is_initialized:
                self.lazy_initialization(*new_states)
            stored: Any = self.keys, self.values
            source, target = cache.written
            for states, new in zip(stored, new_states, strict=True):
                states.transpose(1, 2)[target] = new.transpose(1, 2)[source]
            if cache.reads:
                new_states = tuple(states[:count, :, : cache.reads] for states in stored)
        if self.prefix is None or (cache.reads and cache.reads_once):
            return new_states
        keys, values = (states.expand(count, -1, -1, -1) for states in self.prefix)
        return torch.cat([keys, new_states[0]], dim=2), torch.cat([values, new_states[1]], dim=2)

    def keep(self, length: int) -> bool:
        """Keep the last `length` positions of the prefix, in the memory of earlier prefixes.

        Returns:
            True if that memory is large enough, False if new memory was allocated.
        """
        assert self.prefix
        parts = [states[:, :, -length:] for states in self.prefix]
        has_room = bool(self.kept) and self.kept[0].shape[2] >= length
        if not has_room:
            self.kept = [states.clone() for states in parts]
        for buffer, states in zip(self.kept, parts, strict=True):
            buffer[:, :, :length] = states
        keys, values = (buffer[:, :, :length] for buffer in self.kept)
        self.prefix = (keys, values)
        return has_room

    def get_seq_length(self) -> int:
        return 0  # each forward pass has explicit positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # for forward passes without a mask

    def get_max_length(self) -> int:
        return -1


class SharedCache(Cache):
    """A prefix, which may be empty (see `share`), and `rows` stored rows of `room` tokens.

    `written` selects the tokens whose keys and values a forward pass stores, and their places in
    the cache. If it is None, no keys and values are stored. A step reads `reads` columns of each
    row that it writes. Inside `attending`, a step reads the prefix once for all rows
    (`reads_once`), if the model's attention uses keys and values as they are stored. If it does
    not, as in DeepSeek, each row reads the prefix.

    Attributes:
        tokens: [rows, 1] The last token of each row, which no forward pass has processed yet.
        places: [rows, 1] The position of that token after the prefix.
        drawn: [rows] The numbers that decide about the next token in sampling.
        graphs: Steps recorded on CUDA (steps.py), which read the memory of this cache.
        recordable: Whether the model's steps can be recorded.
    """

    def __init__(self, model: Any, rows: int = 0, room: int = 0) -> None:
        self.model = weakref.proxy(model)  # the model keeps the cache
        self.rows, self.room = rows, room
        self.keyword = "past_key_values"
        if "cache" in inspect.signature(model.forward).parameters:
            self.keyword = "cache"  # its name since transformers 5.24
        self.kinds = layer_kinds(model.config)
        self.window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
        self.layers: list[Any]
        super().__init__(layers=[_Layer(self) for _ in self.kinds])
        self.tokens, self.places = torch.zeros(2, rows, 1, dtype=torch.long, device=self.device)
        self.numbers = torch.arange(max(rows, room), device=self.device)
        self.drawn = torch.zeros(rows, device=self.device)
        self.graphs: dict[Any, Any] = {}
        self.recordable = self.device.type == "cuda"
        self._forget([])

    @classmethod
    def of(cls, model: Any, rows: int, room: int) -> SharedCache:
        """Return the model's last cache with its steps, or a new cache if it is too small."""
        cache = getattr(model, KEPT, None)
        if cache is None or cache.rows < rows or cache.room < room:
            drop_cache(model)  # frees its memory for the next cache
            cache = cls(model, rows, room)
            setattr(model, KEPT, cache)
        return cache

    def _forget(self, prefix: Sequence[int]) -> None:
        self.prefix = list(prefix)
        self.written: tuple[Any, Any] | None = None
        self.shared = self.reads = self.plain_layers = 0
        self.reads_once = False
        for layer in self.layers:
            layer.prefix = None

    def share(self, prefix: Sequence[int]) -> None:
        """Compute the keys and values of a prefix, which replaces the last prefix.

        A layer with a sliding window keeps only the tokens that its window reaches.
        """
        self._forget(prefix)
        if not prefix:
            return
        positions = torch.arange(len(prefix), device=self.device)[None]
        masks = self.masks(positions, positions) if SLIDING in self.kinds else None
        self.logits(torch.tensor([self.prefix]), positions, masks)
        self.shared = len(prefix)
        self.reads_once = self.plain_layers == len(self.layers)
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            length = min(self.shared, self.window) if kind == SLIDING else self.shared
            if not layer.keep(length):
                self.graphs.clear()

    def fill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts to rows, except their last tokens, which the next step processes.

        The rows are zeroed first, because an earlier overflow would spread even if it is masked.
        """
        row_indices = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row_indices], layer.values[row_indices] = 0, 0
        last_tokens = [prompt[-1:] for prompt in prompts]
        lengths = [len(prompt) - 1 for prompt in prompts]
        self.tokens[row_indices] = torch.tensor(last_tokens, device=self.device)
        self.places[row_indices] = torch.tensor(lengths, device=self.device)[:, None]
        width = max(lengths)
        if width:
            positions = torch.arange(width, device=self.device)[None]
            unpadded = [torch.tensor(prompt[:-1], dtype=torch.long) for prompt in prompts]
            ids = pad_sequence(unpadded, batch_first=True)
            row, column = (positions <= self.places[row_indices] - 1).nonzero(as_tuple=True)
            source = (row, column)
            target = (row_indices[row], column)
            self.reads = 0
            self.written = (source, target)
            self.logits(ids, positions, self.masks(positions, positions))

    def step(self, rows: int, reads: int) -> torch.Tensor:
        """Write the token of each of the first rows and return the logits after it.

        The places of rows whose answers are over are limited to the columns that are read, because
        attention to an empty window is not a number.

        `reads` is the number of columns that are read.

        Returns:
            [rows, vocabulary]
        """
        places = self.places[:rows].clamp(max=reads - 1)
        row_numbers = self.numbers[:rows, None]
        columns = self.numbers[None, :reads]
        self.reads = reads
        self.written = (..., (row_numbers, places))
        masks = self.masks(places, columns)
        return self.logits(self.tokens[:rows], places, masks)[:, 0]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows to free rows."""
        source, target = torch.tensor([sources, targets], device=self.device)
        moved = [self.tokens, self.places]
        for layer in self.layers:
            moved += [layer.keys, layer.values]
        for states in moved:
            states[target] = states[source]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def masks(
        self, places: torch.Tensor, columns: torch.Tensor, visible: torch.Tensor | None = None
    ) -> Any:
        """Return masks that transformers uses unchanged.

        A mask has booleans, or in eager attention numbers that are added to the scores. Every token
        attends to all of the prefix, which has no columns in the mask if it is read once.

        Args:
            places: [rows, tokens] The positions of the tokens after the prefix.
            columns: [rows, keys] The positions of the row's keys after the prefix.
            visible: [rows, tokens, keys] The keys that each token attends to. None: those up to its
                position.

        Returns:
            [rows, 1, tokens, keys], by kind of layer if the model mixes them.
        """
        if visible is None:
            visible = places[:, :, None] >= columns[:, None]
        kinds = dict.fromkeys(self.kinds)
        masks = {kind: self._mask(kind, places, columns, visible) for kind in kinds}
        if len(masks) > 1:
            return masks
        return next(iter(masks.values()), None)

    def _mask(
        self, kind: str, places: torch.Tensor, columns: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        reach = self.shared
        if kind == SLIDING:
            reach = min(self.shared, self.window)
        elif self.reads and self.reads_once:
            reach = 0
        visible_prefix = visible.new_ones(*visible.shape[:2], reach)
        mask = torch.cat([visible_prefix, visible], dim=2)
        if kind == SLIDING:
            prefix_positions = torch.arange(-reach, 0, device=columns.device)
            by_row = prefix_positions.expand(len(columns), -1)
            key_positions = torch.cat([by_row, columns], dim=1)
            distance = places[:, :, None] - key_positions[:, None]
            mask &= distance < self.window
        if self.model.config.get_text_config()._attn_implementation == "eager":
            zeros = torch.zeros_like(mask, dtype=self.model.dtype)
            mask = zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)
        return mask[:, None].to(self.device)

    def logits(
        self, ids: torch.Tensor, places: torch.Tensor, masks: Any, keep: int = 1
    ) -> torch.Tensor:
        """Return the logits after the last `keep` tokens of each row.

        Args:
            ids: [rows, tokens]
            places: [rows, tokens] Positions after the prefix.
            masks: The result of `masks`.
            keep: The number of tokens. 0: all.
        """
        positions = (self.shared + places).expand(ids.shape)
        output = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=masks,
            use_cache=True,
            logits_to_keep=keep,
            **{self.keyword: self},
        )
        return output.logits

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
        """Compute transformers' attention, reading the prefix once for all rows at a step.

        Args:
            module: The attention module of a layer.
            query: [rows, heads, tokens, width]
            key: [rows, shared heads, positions, width]
            value: [rows, shared heads, positions, width]
            mask: The mask of the layer.
            scaling: The factor of the scores. None: width ** -0.5.
            **other: Further arguments of transformers' attention.

        Returns:
            [rows, tokens, heads, width], None
        """
        stored: Any = self.layers[module.layer_idx].prefix
        is_plain = key is stored[0] and value is stored[1]
        self.plain_layers += not self.shared and is_plain
        if not (self.reads and self.reads_once):
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **other)
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        prefix_keys, prefix_values = (states[0] for states in stored)
        attended = attend_with_prefix(query * scaling, key, value, mask, prefix_keys, prefix_values)
        return attended, None


def attend_with_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
) -> torch.Tensor:
    """Compute attention to a prefix and to each row's own keys, reading the prefix once.

    `heads` are the heads of keys and values, `group` is the number of query heads of each, and
    `columns` are the prefix and the row's own positions. Weights are float32.

    Args:
        query: [rows, heads x group, tokens, width], scaled.
        key: [rows, heads, positions, width]
        value: [rows, heads, positions, value width]
        mask: [rows, 1, tokens, columns], or without the prefix's columns.
        prefix_keys: [heads, prefix, width]
        prefix_values: [heads, prefix, value width]

    Returns:
        [rows, tokens, heads x group, value width]
    """
    rows, _, tokens, width = query.shape
    _, heads, positions, _ = key.shape
    prefix = prefix_keys.shape[1]
    columns = prefix + positions
    value_width = prefix_values.shape[-1]

    # Scores. The queries of all rows are one matrix for the prefix.
    by_row = query.reshape(rows, heads, -1, width)  # [rows, heads, group x tokens, width]
    together = by_row.transpose(0, 1).reshape(heads, -1, width)
    prefix_scores = together @ prefix_keys.transpose(1, 2)
    prefix_scores = prefix_scores.view(heads, rows, -1, prefix).transpose(0, 1)
    row_scores = by_row @ key.transpose(2, 3)
    scores = torch.cat([prefix_scores, row_scores], dim=-1)
    scores = scores.view(rows, heads, -1, tokens, columns)
    hidden = ~mask[:, :, None]  # in a layer with a window the prefix has columns too
    masked = scores[..., -hidden.shape[-1] :]
    masked.masked_fill_(hidden, torch.finfo(scores.dtype).min)

    # Weights, [rows, heads, group x tokens, columns]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = weights.view(rows, heads, -1, columns)

    # Values. The weights of all rows are one matrix for the prefix.
    prefix_weights = weights[..., :prefix].transpose(0, 1).reshape(heads, -1, prefix)
    attended = (prefix_weights @ prefix_values).view(heads, rows, -1, value_width).transpose(0, 1)
    attended = attended + weights[..., prefix:] @ value
    attended = attended.view(rows, heads, -1, tokens, value_width)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1, value_width)


def kept_bytes(model: Any) -> int:
    """Return the bytes of keys and values that the model keeps and its next prompts can reuse."""
    cache = getattr(model, KEPT, None)
    if not cache:
        return 0
    total = 0
    for layer in cache.layers:
        if layer.is_initialized:
            states = [layer.keys, layer.values, *layer.kept]
            total += sum(part.nbytes for part in states)
    return total


def drop_cache(model: Any) -> None:
    """Free the memory that a model keeps for its next prompts."""
    cache = getattr(model, KEPT, None)
    if cache:
        cache.graphs.clear()
        cache.layers.clear()
        setattr(model, KEPT, None)


@contextmanager
def heads_as_they_are(device: torch.device) -> Iterator[None]:
    """Let attention on a CPU read the keys of grouped heads without copying them, even if masked.

    transformers copies them for each query head first, which takes a third of the time of attention
    to a long prefix. The result is the same. On a GPU the copy stays, because with a mask the fast
    kernels do not accept grouped heads.
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
    """Let the model compute attention with `cache.attend`."""
    AttentionInterface.register(ATTENTION, cache.attend)
    cache.model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        cache.model.set_attn_implementation("sdpa")
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)  # drops the cache
