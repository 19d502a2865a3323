"""The backend that computes with a transformers model in this process: prefixes, tries, slots,
halved batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.backend import Tokens
from pipeline.evaluate.decode import Ending, can_decode, decode
from pipeline.evaluate.memory import MOST_ROWS, ROWS, Prompts, rows_that_fit
from pipeline.evaluate.prefix import (
    MOST_TOKENS,
    Trie,
    batch_places,
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
from pipeline.models.checkpoint import DTYPES
from pipeline.models.products import BF16X3, IEEE, split_layers, split_products
from pipeline.models.shape import shape_of
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

Result = TypeVar("Result")


class TorchBackend:
    """A model in memory, on the GPU where there is one.

    batch_size: rows computed together; None: on a GPU what its memory holds. They are halved where
    it runs out. products: how linear layers multiply in float32 (models/products.py).
    """

    def __init__(
        self,
        batch_size: int | None,
        dtype: str = "auto",
        weights: Merging | Path | None = None,
        model: Any = None,
        products: str = IEEE,
    ) -> None:
        self.batch_size, self.by_memory, self.halved = (
            most_rows(batch_size),
            batch_size is None,
            False,
        )
        self.dtype, self.weights, self.model, self.products = dtype, weights, model, products
        self.most = self.batch_size

    def load(self) -> Any:
        """safetensors, no code of its own, in the dtype (auto: as config.json names it).

        A merge, and an adapter with its base, are put together in memory (merge/live.py).
        """
        from pipeline.merge.live import model_of

        if self.model is None:
            assert self.weights
            device = "cpu"
            if torch.cuda.is_available():
                device = "cuda"
            if isinstance(self.weights, Path):
                folder = self.weights
            else:
                folder = self.weights.layout.folder
            try:
                if isinstance(self.weights, Path):
                    self.model = load.load_model(self.weights, dtype=self.dtype).to(device)
                    if self.products == BF16X3:
                        split_products(self.model)
                else:
                    self.model = model_of(
                        self.weights, self.dtype, device, products=self.products
                    ).model
            except PipelineError:
                raise
            except (OSError, ValueError) as error:
                raise PipelineError(
                    f"checkpoint {folder} cannot be loaded ({first_line(error)}): it needs"
                    " safetensors"
                ) from error
            refuse_other_dtype(self.model, self.dtype, str(folder))
        return self.model

    def close(self) -> None:
        """Leave the model to the garbage collector, or to merge/resident.py, which keeps it for the
        next merge.
        """

    # --- generation ---

    def can_share(self) -> bool:
        """Whether likelihoods can be computed with what prompts have in common computed once.

        Attention that is a model's own may add to the scores what no mask says: ALiBi (BLOOM, MPT),
        a local window (GPT-Neo).
        """
        own_attention = not self.model._supports_attention_backend
        return not own_attention and takes_masks(self.model.config, "sdpa", "eager")

    def can_generate(self) -> bool:
        """Whether `generate` chooses the tokens that transformers' greedy generate() does."""
        return can_decode(self.model)

    def generate(
        self,
        prompts: Sequence[Tokens],
        endings: Sequence[Ending],
        share: bool,
        ended: Callable[[int, list[int]], None],
        sampling: Sampling | None = None,
    ) -> None:
        """Answers, greedy where `sampling` is None.

        `ended` is given a prompt's place and its answer's tokens, the end token included, when it
        ends, once for each prompt. endings: of each prompt, all alike without a queue; share:
        compute what prompts have in common once.
        """
        places_of = places_by_prompt(prompts)  # sampled answers have the same prompt
        distinct = list(places_of)
        grouped = group_prompts(distinct) if share else [(0, range(len(distinct)))]
        groups = [
            (
                shared,
                [request_index for index in group for request_index in places_of[distinct[index]]],
            )
            for shared, group in grouped
        ]
        finished, ending = set[int](), endings[0]
        self._fit_rows(groups, prompts, ending.room)

        def answer(shared: int, left: list[int]) -> None:
            def store(row: int, tokens: list[int]) -> None:
                finished.add(left[row])
                ended(left[row], tokens)

            rests = [prompts[request_number][shared:] for request_number in left]
            draws = sampling.of(left) if sampling else None
            decode(
                self.model, prompts[left[0]][:shared], rests, self.batch_size, ending, store, draws
            )

        self._for_each(groups, finished, answer)

    # --- likelihoods ---

    def loglikelihood(
        self,
        requests: Sequence[tuple[Tokens, Tokens]],
        share: bool,
        scored: Callable[[int, float, bool], None],
    ) -> None:
        """Score (context, continuation) pairs: `scored` is given a request's place, the log of the
        continuation's probability, and whether it is the greedy choice, once for each request.

        Each token that several requests begin with is computed once, in tries. Where all
        continuations are single tokens, such as the letters of choices, the prompts of a batch
        share their prefix alone.
        """
        inputs = places_by_prompt(
            (*context, *continuation[:-1]) for context, continuation in requests
        )
        prompts = list(inputs)
        keep = [
            max(len(requests[request_number][1]) for request_number in inputs[prompt])
            for prompt in prompts
        ]

        finished: set[int] = set()

        def weigh(index: int, logits: torch.Tensor) -> None:
            """Answer the requests of a prompt from the logits [tokens, vocabulary] of its last
            tokens.
            """
            log_probabilities = torch.log_softmax(logits, dim=-1)
            for request_number in inputs[prompts[index]]:
                tokens = torch.tensor(requests[request_number][1], device=logits.device)
                predicted = log_probabilities[-len(tokens) :]
                likelihood = float(predicted.gather(1, tokens[:, None]).sum())
                scored(request_number, likelihood, bool((predicted.argmax(dim=-1) == tokens).all()))
            finished.add(index)

        token_limit = 0
        if share and max(keep, default=0) > 1:
            token_limit = MOST_TOKENS
        longest = [
            len(prompt) - scored_tokens for prompt, scored_tokens in zip(prompts, keep, strict=True)
        ]

        def weigh_all(shared: int, left: list[int]) -> None:
            prefix, rows = (
                prompts[left[0]][:shared],
                build_tries(prompts, left, shared, token_limit),
            )
            cache = None
            if shared or token_limit:
                cache = SharedCache(self.model)
            if cache:
                cache.share(prefix)
            sizes = [len(row.tokens) for row in rows], [len(row.paths) for row in rows]
            for batch in batch_places(*sizes, self.batch_size):
                tries = [rows[at] for at in batch]
                ends = []
                for at, trie in enumerate(tries):
                    for index, path in trie.paths.items():
                        ends.append((index, at, path[-keep[index] :]))
                places = []
                for _, at, path in ends:
                    for node in path:
                        places.append((at, node))
                found = logits_of(self.model, cache, tries, places).split(
                    [len(path) for *_, path in ends]
                )
                for (index, *_), logits in zip(ends, found, strict=True):
                    weigh(index, logits)

        if share:
            groups = group_prompts(prompts, longest, token_limit)
        else:
            groups = [(0, list(range(len(prompts))))]
        self._fit_rows(groups, prompts)
        self._for_each(groups, finished, weigh_all)

    # --- memory ---

    def _fit_rows(
        self, groups: Sequence[tuple[int, list[int]]], prompts: Sequence[Tokens], room: int = 0
    ) -> None:
        """Without a number of its own, as many rows as the free memory of the GPU holds of these
        groups. Answers take the place of the last prompts' keys and values, likelihoods leave them.
        """
        if not self.by_memory or self.model.device.type != "cuda":
            return
        try:
            shape = shape_of(self.model.config.to_dict())
        except PipelineError:  # not a dense decoder
            self.batch_size = min(ROWS, self.most)
            return
        rests = (len(prompts[index]) - shared for shared, members in groups for index in members)
        longest = Prompts(
            max((shared for shared, _ in groups), default=0), max(rests, default=1), room
        )
        free, _ = torch.cuda.mem_get_info()
        free += (
            torch.cuda.memory_reserved()
            - torch.cuda.memory_allocated()
            + (kept_bytes(self.model) if room else 0)
        )
        size = self.model.dtype.itemsize
        self.batch_size = rows_that_fit(
            shape, size, longest, free + shape.parameters * size, self.most
        )

    def _for_each(
        self,
        groups: Sequence[tuple[int, list[int]]],
        finished: set[int],
        work: Callable[[int, list[int]], None],
    ) -> None:
        """Do the work of each group, (shared tokens, members); out of memory, that of its members
        which are left.
        """
        for shared, members in groups:
            with torch.no_grad(), heads_as_they_are(self.model.device):

                def work_on_unfinished(shared: int = shared, members: list[int] = members) -> None:
                    work(shared, [member for member in members if member not in finished])

                self.halving(work_on_unfinished)

    def halving(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, do it again with half the batch."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if self.batch_size == 1 or not should_reduce_batch_size(error):
                    raise
            self.batch_size //= 2  # out of the handler, which holds on to the tensors
            self.most, self.halved = self.batch_size, True
            drop_cache(self.model)
            say(f"out of memory: going on with eval.batch_size={self.batch_size}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def most_rows(batch_size: int | None) -> int:
    """Rows that eval.batch_size allows."""
    return batch_size or (MOST_ROWS if torch.cuda.is_available() else ROWS)


def logits_of(
    model: Any, cache: SharedCache | None, tries: Sequence[Trie], places: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Logits [places, vocabulary] of places (trie, token of it) after the prefix.

    Padding is on the right. Without a cache, for models that take no masks of positions, tries are
    prompts by themselves.

    The model's head, half of the work for a vocabulary of 262,144, sees these places alone, where
    logits_to_keep would take the same ones of all rows.
    """
    ids = pad_sequence([torch.tensor(trie.tokens) for trie in tries], batch_first=True)
    rows, columns = map(list, zip(*places, strict=True))

    def keep(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0][rows, columns][None],)

    with model.get_output_embeddings().register_forward_pre_hook(keep):
        if cache is None:
            return model(input_ids=ids.to(model.device), use_cache=False).logits[0]
        visible, positions = visible_tokens(tries)
        return cache.logits(ids, positions, cache.masks(positions, positions, visible), keep=0)[0]


def visible_tokens(tries: Sequence[Trie]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of its row each attends to, [tries, width, width], and their positions after the
    prefix, [tries, width], of tries padded on the right to one width. Padding attends to itself.
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


def refuse_other_dtype(model: Any, dtype: str, folder: str) -> None:
    """Refuse a model that transformers loaded in another dtype than `dtype`; quantized tensors do
    not count.
    """
    if dtype == "auto":
        return
    parameters = []
    for name, parameter in model.named_parameters():
        if name not in split_layers(model):
            parameters.append(parameter)
    loaded = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters} & {
        "float64",
        *DTYPES,
    }
    if loaded != {dtype}:
        dtypes = " and ".join(sorted(loaded))
        raise PipelineError(
            f"eval.dtype={dtype}, but transformers loaded {folder} in {dtypes}: give a dtype it"
            " keeps"
        )
