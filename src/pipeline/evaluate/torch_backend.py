"""The backend that computes with a transformers model in this process: prefixes, tries, slots, halved batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.backend import Tokens, merge_or_folder
from pipeline.evaluate.decode import Ending, Sampling, can_decode, decode
from pipeline.evaluate.prefix import Prefix, batch_places, group_prompts, heads_as_they_are
from pipeline.evaluate.tree import MOST_TOKENS, Trie, build_tries, can_score_tries, keep_places, trie_logits
from pipeline.models import load
from pipeline.models.checkpoint import DTYPES
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.merge.live import Live
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Run

Result = TypeVar("Result")


class TorchBackend:
    """A model in memory, on the GPU where there is one. See `Backend`."""

    def __init__(self, batch_size: int, dtype: str = "auto", model: Any = None, tokenizer: Any = None) -> None:
        self.batch_size, self.dtype = batch_size, dtype
        self.model, self.tokenizer = model, tokenizer
        self.live: tuple[Live, Merging] | None = None

    # --------------------------------------------------------------------------------------------------- weights

    def load(self, weights: Run | Path) -> None:
        """safetensors, no code of its own, in the dtype (auto: as config.json names it). A merge, and an adapter with
        its base, are put together in memory (merge/live.py)."""
        from pipeline.merge.live import model_of
        from pipeline.models.skeleton import build_skeleton

        device = "cuda" if torch.cuda.is_available() else "cpu"
        merge, folder = merge_or_folder(weights)
        try:
            if merge is not None:
                live = model_of(merge, self.dtype, device)
                self.live, self.model, self.tokenizer = (live, merge), live.model, live.tokenizer
            else:
                build_skeleton(folder, "checkpoint")
                self.tokenizer, model = load.load_tokenizer(folder), load.load_model(folder, dtype=self.dtype)
                self.model = model.to(device)
        except PipelineError:
            raise
        except (OSError, ValueError) as error:
            raise PipelineError(
                f"checkpoint {folder} cannot be loaded ({first_line(error)}): it needs safetensors and a tokenizer"
            ) from error
        refuse_other_dtype(self.model, self.dtype, str(folder))

    # --------------------------------------------------------------------------------------------------- generation

    def can_share(self) -> bool:
        return can_score_tries(self.model.config)

    def can_generate(self) -> bool:
        return can_decode(self.model)

    def generate(
        self, prompts: Sequence[Tokens], ending: Ending, share: bool, ended: Callable[[int, list[int]], None],
        neighbours: Sequence[Sequence[Tokens]], counts: Counter[str],
        sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        finished: set[int] = set()

        def finish(place: int, tokens: list[int]) -> None:
            finished.add(place)
            ended(place, tokens)

        for shared, members in group_prompts(prompts) if share else [(0, list(range(len(prompts))))]:

            def go_on(shared: int = shared, members: list[int] = members) -> None:
                left = [member for member in members if member not in finished]
                rests = [prompts[member][shared:] for member in left]
                beginning, store = prompts[left[0]][:shared], lambda at, tokens: finish(left[at], tokens)
                others = [neighbours[member] for member in left] if neighbours else []
                draws = sampling.of(left) if sampling else None
                decode(self.model, beginning, rests, self.batch_size, ending, store, others, counts, draws)

            with self._computing():
                self.halving(go_on)

    # --------------------------------------------------------------------------------------------------- likelihoods

    def loglikelihood(
        self, requests: Sequence[tuple[Tokens, Tokens]], share: bool, scored: Callable[[float], None]
    ) -> list[tuple[float, bool]]:
        """Each token that several requests begin with is computed once (tree.py). Where all continuations are single
        tokens, such as the letters of choices, the prompts of a batch share their prefix alone."""
        inputs: dict[tuple[int, ...], list[int]] = {}
        for place, (context, continuation) in enumerate(requests):
            inputs.setdefault((*context, *continuation[:-1]), []).append(place)
        prompts = list(inputs)
        keep = [max(len(requests[place][1]) for place in inputs[prompt]) for prompt in prompts]
        answers: list[Any] = [None] * len(requests)

        def weigh(index: int, logits: torch.Tensor) -> None:
            """Answer the requests of a prompt from the logits [tokens, vocabulary] of its last tokens."""
            log_probabilities = torch.log_softmax(logits, dim=-1)
            for place in inputs[prompts[index]]:
                tokens = torch.tensor(requests[place][1], device=logits.device)
                predicted = log_probabilities[-len(tokens) :]
                likelihood = float(predicted.gather(1, tokens[:, None]).sum())
                answers[place] = likelihood, bool((predicted.argmax(dim=-1) == tokens).all())

        def weigh_rows(places: list[int]) -> Callable[[Prefix, list[int]], None]:
            def answer(_: Prefix, batch: list[int]) -> None:
                members = [places[at] for at in batch]
                found = last_logits(self.model, [prompts[index] for index in members], [keep[at] for at in members])
                for index, logits in zip(members, found, strict=True):
                    weigh(index, logits)
                scored(sum(len(inputs[prompts[index]]) for index in members))

            return answer

        def weigh_tries(tries: list[Trie]) -> Callable[[Prefix, list[int]], None]:
            def answer(prefix: Prefix, batch: list[int]) -> None:
                rows = [tries[at] for at in batch]
                needed = [
                    sorted({node for index, path in trie.paths.items() for node in path[-keep[index] :]})
                    for trie in rows
                ]
                for trie, nodes, logits in zip(
                    rows, needed, trie_logits(self.model, prefix, rows, needed), strict=True
                ):
                    column = {node: at for at, node in enumerate(nodes)}
                    for index, path in trie.paths.items():
                        weigh(index, logits[[column[node] for node in path[-keep[index] :]]])
                scored(sum(len(inputs[prompts[index]]) for trie in rows for index in trie.paths))

            return answer

        most = MOST_TOKENS if share and max(keep, default=0) > 1 else 0
        longest = [len(prompt) - kept for prompt, kept in zip(prompts, keep, strict=True)]
        groups = group_prompts(prompts, longest, most) if share else [(0, list(range(len(prompts))))]
        for shared, members in groups:
            if shared or most:
                tries = build_tries(prompts, members, shared, most)
                lengths, counts = [len(trie.tokens) for trie in tries], [len(trie.paths) for trie in tries]
                self._in_batches(prompts[members[0]][:shared], lengths, counts, weigh_tries(tries))
            else:
                self._in_batches((), [len(prompts[index]) for index in members], None, weigh_rows(members))
        return answers

    def _in_batches(
        self,
        prefix_tokens: Tokens,
        lengths: Sequence[int],
        counts: Sequence[int] | None,
        answer: Callable[[Prefix, list[int]], None],
    ) -> None:
        """Put rows of `lengths` tokens, which hold `counts` prompts each, to the model after their prefix; `answer`
        gets the rows of a batch."""
        finished: set[int] = set()

        def go_on() -> None:
            pending = [row for row in range(len(lengths)) if row not in finished]
            batches = list(batch_places(pending, lengths, self.batch_size, counts))
            most_tokens = max(lengths[row] for row in pending)
            prefix = Prefix(self.model, prefix_tokens, max(map(len, batches)), most_tokens)
            for batch in batches:
                answer(prefix, batch)
                finished.update(batch)

        with self._computing():
            self.halving(go_on)

    # --------------------------------------------------------------------------------------------------- memory

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with torch.no_grad(), heads_as_they_are(self.model.device):
            yield

    def halving(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, do it again with half the batch."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if self.batch_size == 1 or not should_reduce_batch_size(error):
                    raise
            self.batch_size //= 2  # out of the handler, which holds on to the tensors
            say(f"out of memory: going on with eval.batch_size={self.batch_size}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def last_logits(model: Any, prompts: Sequence[Tokens], keep: Sequence[int]) -> list[torch.Tensor]:
    """Logits [keep, vocabulary] of the last `keep` tokens of each prompt. Padding, on the right, is not attended to."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=model.device)
    places = [range(len(prompt) - kept, len(prompt)) for prompt, kept in zip(prompts, keep, strict=True)]
    with keep_places(model, places):
        return list(model(input_ids=ids, use_cache=False).logits[0].split(list(keep)))


def refuse_other_dtype(model: Any, dtype: str, folder: str) -> None:
    """Refuse a model that transformers loaded in another dtype than `dtype`; quantized tensors do not count."""
    loaded = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()} & {"float64", *DTYPES}
    if dtype != "auto" and loaded != {dtype}:
        dtypes = " and ".join(sorted(loaded))
        raise PipelineError(f"eval.dtype={dtype}, but transformers loaded {folder} in {dtypes}: give a dtype it keeps")
