"""The backend that computes with a transformers model in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.backend import Tokens
from pipeline.evaluate.decode import Ending, decode, settings_beyond_greedy
from pipeline.evaluate.memory import MOST_ROWS, ROWS, Prompts, rows_that_fit
from pipeline.evaluate.prefix import (
    MOST_TOKENS,
    Trie,
    batch_tries,
    build_tries,
    group_prompts,
    places_by_prompt,
)
from pipeline.evaluate.shared_cache import (
    SharedCache,
    drop_cache,
    heads_as_they_are,
    kept_bytes,
    takes_masks,
)
from pipeline.evaluate.steps import Sampling
from pipeline.models import load
from pipeline.models.products import BF16X3, IEEE, split_products
from pipeline.models.shape import shape_of
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

Result = TypeVar("Result")


@dataclass(eq=False)
class TorchBackend:
    """A model in memory, on the GPU if there is a GPU.

    Args:
        rows: Rows computed together, halved when memory runs out. None: as many as fit in a GPU's
            memory.
        dtype: The dtype of the weights. auto: as in config.json.
        weights: The folder or merge that `load` reads.
        model: A loaded model, in place of `weights`.
        products: How linear layers multiply in float32 (models/products.py).
    """

    rows: int | None
    dtype: str = "auto"
    weights: Merging | Path | None = None
    model: Any = None
    products: str = IEEE

    def __post_init__(self) -> None:
        self.batch_size = self.most = most_rows(self.rows)
        self.halved = False

    def load(self) -> Any:
        """Load the model from safetensors, without running code of the checkpoint.

        A merge, and an adapter with its base, are merged in memory (merge/live.py).
        """
        from pipeline.merge.live import model_of

        if self.model is not None:
            return self.model
        weights = self.weights
        assert weights
        device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = weights if isinstance(weights, Path) else weights.layout.folder
        try:
            if isinstance(weights, Path):
                self.model = load.load_model(weights, dtype=self.dtype).to(device)
                if self.products == BF16X3:
                    split_products(self.model)
            else:
                live = model_of(weights, self.dtype, device, products=self.products)
                self.model = live.model
        except PipelineError:
            raise
        except (OSError, ValueError) as error:
            raise PipelineError(
                f"Checkpoint {folder} cannot be loaded ({first_line(error)}). Its weights must be"
                " safetensors."
            ) from error
        return self.model

    def close(self) -> None:
        """Do nothing: the model stays, because merge/resident.py may use it for the next merge."""

    # --- generation ---

    def can_share(self) -> bool:
        """Return True if log-likelihoods can be computed with a shared prefix.

        A model's own attention may add terms to the scores that no mask expresses: ALiBi (BLOOM,
        MPT), a local window (GPT-Neo).
        """
        own_attention = not self.model._supports_attention_backend
        return not own_attention and takes_masks(self.model.config, "sdpa", "eager")

    def can_generate(self) -> bool:
        """Return True if `generate` chooses the same tokens as transformers' greedy generate().

        The model's attention must accept the mask that `decode` computes.
        """
        model = self.model
        replaceable = model._supports_attention_backend and takes_masks(model.config, "sdpa")
        return replaceable and not settings_beyond_greedy(model)

    def generate(
        self,
        prompts: Sequence[Tokens],
        ending: Ending,
        share: bool,
        ended: Callable[[int, list[int]], None],
        sampling: Sampling | None = None,
    ) -> None:
        """Generate an answer to each prompt.

        Args:
            prompts: The token ids of the prompts.
            ending: When an answer ends.
            share: Whether the common prefix of prompts is computed once.
            ended: Called once for each prompt, when its answer ends, with the prompt's place and
                the answer's tokens, including the end token.
            sampling: The settings of sampling. None: greedy.
        """
        places_of = places_by_prompt(prompts)  # sampled answers have the same prompt
        distinct = list(places_of)
        grouped = [(0, list(range(len(distinct))))]
        if share:
            grouped = group_prompts(distinct)
        groups = []
        for shared, members in grouped:
            groups.append((shared, [*chain(*(places_of[distinct[member]] for member in members))]))
        finished = set[int]()
        self._fit_rows(groups, prompts, ending.room)

        def answer(shared: int, left: list[int]) -> None:
            def store(row: int, tokens: list[int]) -> None:
                finished.add(left[row])
                ended(left[row], tokens)

            prefix = prompts[left[0]][:shared]
            rests = [prompts[place][shared:] for place in left]
            draws = sampling.of(left) if sampling else None
            decode(self.model, prefix, rests, self.batch_size, ending, store, draws)

        self._for_each(groups, finished, answer)

    # --- likelihoods ---

    def loglikelihood(
        self,
        requests: Sequence[tuple[Tokens, Tokens]],
        share: bool,
        scored: Callable[[int, float, bool], None],
    ) -> None:
        """Score (context, continuation) pairs.

        Tokens that several requests begin with are computed once, in tries. If all continuations
        are single tokens, such as the letters of choices, the prompts of a batch share only their
        prefix.

        Args:
            requests: Token ids of contexts and continuations.
            share: Whether the common prefix of prompts is computed once.
            scored: Called once for each request, with its place, the log-probability of its
                continuation, and whether the continuation is the greedy choice.
        """
        asked = _Likelihoods(requests, scored)
        token_limit = 0
        if share and max(asked.keep, default=0) > 1:
            token_limit = MOST_TOKENS
        groups = [(0, list(range(len(asked.prompts))))]
        if share:
            pairs = zip(asked.prompts, asked.keep, strict=True)
            longest = [len(prompt) - kept for prompt, kept in pairs]
            groups = group_prompts(asked.prompts, longest, token_limit)
        self._fit_rows(groups, asked.prompts)

        def score(shared: int, left: list[int]) -> None:
            tries = build_tries(asked.prompts, left, shared, token_limit)
            cache = None
            if shared or token_limit:
                cache = SharedCache(self.model)
                cache.share(asked.prompts[left[0]][:shared])
            for batch in batch_tries(tries, self.batch_size):
                asked.score_tries(self.model, cache, batch)

        self._for_each(groups, asked.finished, score)

    # --- memory ---

    def _fit_rows(
        self, groups: Sequence[tuple[int, list[int]]], prompts: Sequence[Tokens], room: int = 0
    ) -> None:
        """Without a batch size, choose as many rows as the GPU's free memory holds.

        Answers reuse the memory of the last prompts' keys and values, log-likelihoods do not.
        """
        if self.rows is not None or self.model.device.type != "cuda":
            return
        try:
            shape = shape_of(self.model.config.to_dict())
        except PipelineError:  # not a dense decoder
            self.batch_size = min(ROWS, self.most)
            return
        prefixes = []
        rests = []
        for shared, members in groups:
            prefixes.append(shared)
            rests += [len(prompts[index]) - shared for index in members]
        longest = Prompts(max(prefixes), max(rests), room)
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if room:
            free += kept_bytes(self.model)
        size = self.model.dtype.itemsize
        memory = free + shape.parameters * size
        self.batch_size = rows_that_fit(shape, size, longest, memory, self.most)

    def _for_each(
        self,
        groups: Sequence[tuple[int, list[int]]],
        finished: set[int],
        work: Callable[[int, list[int]], None],
    ) -> None:
        """Call `work` with each group's shared tokens and its members.

        If memory runs out, it is called again with the members that are not in `finished`.
        """
        for shared, members in groups:

            def work_on_unfinished(shared: int = shared, members: list[int] = members) -> None:
                work(shared, [member for member in members if member not in finished])

            with torch.no_grad(), heads_as_they_are(self.model.device):
                self.halving(work_on_unfinished)

    def halving(self, work: Callable[[], Result]) -> Result:
        """Call `work`; if memory runs out, call it again with half the batch size."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if self.batch_size == 1 or not should_reduce_batch_size(error):
                    raise
            self.batch_size //= 2  # outside the handler, which keeps the tensors alive
            self.most = self.batch_size
            self.halved = True
            drop_cache(self.model)
            say(f"out of memory: continuing with eval.batch_size={self.batch_size}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@dataclass
class _Likelihoods:
    """The distinct prompts of log-likelihood requests, and the prompts that are scored.

    A prompt is a context and a continuation without its last token. `keep` has for each prompt how
    many of its last tokens need logits.
    """

    requests: Sequence[tuple[Tokens, Tokens]]
    scored: Callable[[int, float, bool], None]

    def __post_init__(self) -> None:
        inputs = [(*context, *continuation[:-1]) for context, continuation in self.requests]
        self.places_of = places_by_prompt(inputs)
        self.prompts = list(self.places_of)
        self.finished: set[int] = set()
        self.keep = []
        for places in self.places_of.values():
            self.keep.append(max(len(self.requests[place][1]) for place in places))

    def score_tries(self, model: Any, cache: SharedCache | None, tries: Sequence[Trie]) -> None:
        """Score the requests of all prompts in a batch of tries."""
        indices = []
        places = []
        for row, trie in enumerate(tries):
            for index, path in trie.paths.items():
                indices.append(index)
                places += [(row, node) for node in path[-self.keep[index] :]]
        logits = logits_of(model, cache, tries, places)
        sizes = [self.keep[index] for index in indices]
        for index, part in zip(indices, logits.split(sizes), strict=True):
            self._score_prompt(index, part)

    def _score_prompt(self, index: int, logits: torch.Tensor) -> None:
        """Score the requests of a prompt from the logits [tokens, vocabulary] of its end."""
        log_probabilities = torch.log_softmax(logits, dim=-1)
        for place in self.places_of[self.prompts[index]]:
            _, continuation = self.requests[place]
            tokens = torch.tensor(continuation, device=logits.device)
            predicted = log_probabilities[-len(tokens) :]
            is_greedy = (predicted.argmax(dim=-1) == tokens).all()
            likelihood = predicted.gather(1, tokens[:, None]).sum()
            self.scored(place, float(likelihood), bool(is_greedy))
        self.finished.add(index)


def most_rows(batch_size: int | None) -> int:
    """Return the largest number of rows that eval.batch_size allows."""
    return batch_size or (MOST_ROWS if torch.cuda.is_available() else ROWS)


def logits_of(
    model: Any, cache: SharedCache | None, tries: Sequence[Trie], places: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the logits [places, vocabulary] at places, which are pairs (trie, token of the trie).

    Padding is on the right. Without a cache, for models that take no masks of positions, each trie
    is a separate prompt.

    The model's head, half of the work for a vocabulary of 262,144, is computed only at these
    places. `logits_to_keep` would compute it at the same tokens of all rows.
    """
    unpadded = [torch.tensor(trie.tokens) for trie in tries]
    ids = pad_sequence(unpadded, batch_first=True)
    rows, columns = map(list, zip(*places, strict=True))

    def keep(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0][rows, columns][None],)

    with model.get_output_embeddings().register_forward_pre_hook(keep):
        if cache is None:
            return model(input_ids=ids.to(model.device), use_cache=False).logits[0]
        visible, positions = visible_tokens(tries)
        masks = cache.masks(positions, positions, visible)
        return cache.logits(ids, positions, masks, keep=0)[0]


def visible_tokens(tries: Sequence[Trie]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens of its row each token attends to, and the tokens' positions.

    The tries are padded on the right to the same width. Padding attends to itself.

    Returns:
        [tries, width, width] of booleans, and [tries, width] positions after the prefix.
    """
    width = max(len(trie.tokens) for trie in tries)
    visible = torch.eye(width, dtype=torch.bool).repeat(len(tries), 1, 1)
    positions = torch.zeros(len(tries), width, dtype=torch.long)
    for seen, row_positions, trie in zip(visible.numpy(), positions.numpy(), tries, strict=True):
        for index, parent in enumerate(trie.parents):
            if parent >= 0:
                seen[index] |= seen[parent]
                row_positions[index] = row_positions[parent] + 1
    return visible, positions
