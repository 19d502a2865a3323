"""What a backend is: weights loaded, and answers to prompts of token ids. The rest of evaluate/ does not know which.

Texts, tokens, stored answers and scores are of `Answering` (model.py), which puts the harness' requests to a backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pipeline.evaluate.decode import Ending
    from pipeline.runs.run import Run

Tokens = Sequence[int]
Result = TypeVar("Result")


class Backend(Protocol):
    """`batch_size`: rows computed together, fewer than was asked for once memory ran out. `model`: has the config, and
    the weights where they are in this process. `live`: a merge in memory, and the model that holds it."""

    batch_size: int
    model: Any
    tokenizer: Any
    live: Any

    def load(self, weights: Run | Path) -> None:
        """Take the weights of a run's checkpoint or merge, or of a folder. Raises PipelineError where that fails."""

    def can_share(self) -> bool:
        """Whether likelihoods can be computed with what prompts have in common computed once."""

    def can_generate(self) -> bool:
        """Whether `generate` chooses the tokens that transformers' greedy generate() does."""

    def generate(
        self, prompts: Sequence[Tokens], ending: Ending, share: bool, ended: Callable[[int, list[int]], None],
        neighbours: Sequence[Sequence[Tokens]], counts: Counter[str],
    ) -> None:  # fmt: skip
        """Greedy answers. `ended` is given a prompt's place and its answer's tokens, the end token included, when it
        ends, once for each prompt. share: compute what prompts have in common once. neighbours: for each prompt, or
        none, answers of other models, which a backend may draft from; counts: to which it adds steps and drafts."""

    def loglikelihood(
        self, requests: Sequence[tuple[Tokens, Tokens]], share: bool, scored: Callable[[int], None]
    ) -> list[tuple[float, bool]]:
        """Of (context, continuation): log of the continuation's probability, and whether it is the greedy choice.
        `scored` is given the number of requests that were scored since its last call."""

    def halving(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, do it again with half of `batch_size`."""
