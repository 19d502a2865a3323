"""What a backend is: weights loaded, and answers to prompts of token ids. The rest of evaluate/ does not know which.

Texts, tokens, stored answers and scores are of `Answering` (model.py), which puts the harness' requests to a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pipeline.evaluate.decode import Ending, Sampling
    from pipeline.merge.merge import Merging
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
        sampling: Sampling | None,
    ) -> None:  # fmt: skip
        """Answers, greedy where `sampling` is None. `ended` is given a prompt's place and its answer's tokens, the end
        token included, when it ends, once for each prompt. share: compute what prompts have in common once."""

    def loglikelihood(
        self, requests: Sequence[tuple[Tokens, Tokens]], share: bool, scored: Callable[[float], None]
    ) -> list[tuple[float, bool]]:
        """Of (context, continuation): log of the continuation's probability, and whether it is the greedy choice.
        `scored` is given the number of requests that were scored since its last call."""

    def halving(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, do it again with half of `batch_size`."""


def merge_or_folder(weights: Run | Path) -> tuple[Merging | None, Path]:
    """What is to be loaded: a merge that is put together in memory, such as of an adapter with its base, or else the
    folder, which of a merge is that of its layout."""
    from pipeline.merge.live import merge_of_one
    from pipeline.merge.resident import keeps_models
    from pipeline.merge.stage import merge_of
    from pipeline.runs.lineage import is_adapter

    merge, folder = None, weights
    if not isinstance(folder, Path):
        merge = None if "checkpoint" in folder.parents else merge_of(folder)
        folder = folder.parents["checkpoint"].folder if merge is None else merge.layout.folder
    if merge is None and (is_adapter(folder) or (keeps_models() and folder.is_dir())):
        merge = merge_of_one(folder)
    return merge, folder
