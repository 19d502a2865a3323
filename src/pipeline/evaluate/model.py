"""The model that answers: a checkpoint or a merge, as the harness' model class, whose answers a
backend computes.

Tokens, stop strings and scores are the harness' own (backend.py has what is not). Weights are read
when the first request needs them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    GenKwargs,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from pipeline.errors import PipelineError
from pipeline.evaluate import metrics
from pipeline.evaluate.backend import without_weights
from pipeline.evaluate.decode import Ending, split_thoughts
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.hub import reach
from pipeline.progress import announced, say

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

GREEDY = {"until", "max_gen_toks", "do_sample", "temperature"}  # settings of a request
DRAW = "draw"  # setting of a sampled request: the seed and the number of the answer


def open_model(
    weights: Merging | Path,
    batch_size: int | None = 1,
    dtype: str = "auto",
    backend: Callable[..., Any] = TorchBackend,
) -> Answering:
    """Open the model of a folder or merge: its headers and tokenizer are read, its weights not yet.

    Raises: PipelineError: its files are not those of a model.
    """
    model, tokenizer = without_weights(weights)
    if tokenizer.eos_token_id is None:
        raise PipelineError(
            f"the tokenizer of {tokenizer.name_or_path} has no eos_token, at which answers end:"
            " name one"
        )
    return Answering(backend(batch_size, dtype, weights), pretrained=model, tokenizer=tokenizer)


def is_reproducible(settings: GenKwargs) -> bool:
    """Whether a request has one answer: the greedy one, or that of its draw."""
    greedy = settings.keys() <= GREEDY and not settings["do_sample"]
    return greedy or settings.keys() == {*GREEDY, "top_p", DRAW}


class Answering(HFLM):
    """HFLM that reports each answer when it ends.

    `engine`: the backend. `share_prefix`: compute what prompts have in common once; `unshared`: the
    model did not allow it. `think_end`: the end of a model's thoughts, in which stop strings are
    ignored. `ended`: is given the kind of a request, its arguments and its answer, as store.py has
    them.
    """

    def __init__(self, backend: Any, **kwargs: Any) -> None:
        self._encoded = functools.lru_cache(maxsize=8)(
            super().tok_encode
        )  # a context has several continuations
        self.engine = backend
        super().__init__(batch_size=backend.batch_size, **kwargs)
        self.share_prefix = self.unshared = False
        self.ended: Callable[[str, tuple[Any, ...], Any], Any] = lambda kind, args, answer: None
        self.think_end: str | None = None
        self._batch: list[bool] = []
        self.set_cache_hook(
            self
        )  # the harness tells its cache each answer, in the order of the batch

    def load(self) -> None:
        with announced("loading the model"):
            self._model = self.engine.load()
        self._device = self._model.device

    @property
    def batch_size(self) -> int:
        """Rows computed together: eval.batch_size or what memory holds, halved once it ran out."""
        return self.engine.batch_size

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(self._encoded(string, *args, **kwargs))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.load()
        settings = [
            normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests
        ]
        alike = all({**one, DRAW: ""} == {**settings[0], DRAW: ""} for one in settings)
        if alike and all(map(is_reproducible, settings)) and self.engine.can_generate():
            return self._decoded(requests, settings)
        if DRAW in settings[0]:
            raise PipelineError(
                f"eval.temperature={settings[0]['temperature']:g}: {self.model.config.model_type}"
                " cannot draw each token by itself, so that answers would differ each time: give"
                " eval.temperature=0"
            )
        self._shares(possible=False)
        generate = functools.partial(super().generate_until, requests, disable_tqdm=True)
        with reach.replaced(huggingface, "postprocess_generated_text", self._cut):
            return self.engine.halving(generate)

    def _decoded(self, requests: list[Instance], settings: list[GenKwargs]) -> list[str]:
        """As HFLM's, for requests that differ in their draws alone."""
        ends, eos = self._ends, self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        to_text = functools.partial(self.tok_decode, skip_special_tokens=False)
        endings = [
            Ending(
                ends,
                handle_stop_sequences(one.get("until"), eos=eos),
                one["max_gen_toks"],
                to_text,
                think_end=self.think_end,
            )
            for one in settings
        ]
        prompts = [self.tok_batch_encode([request.args[0]])[0][0].tolist() for request in requests]
        answers: dict[int, str] = {}

        def ended(place: int, tokens: list[int]) -> None:
            text, ending = self.tok_decode(tokens), endings[place]
            answers[place] = self._cut(text, [*ending.stop])
            cut_off = self._ran_out(tokens, text, ending.room, ending.stop)
            self.ended("generate_until", requests[place].args, (answers[place], cut_off))

        sampling = None
        if DRAW in settings[0]:
            put = (request.args for request in requests)
            keys = [
                f"{how[DRAW]} {hashlib.sha256(prompt.encode()).hexdigest()}" for prompt, how in put
            ]
            sampling = Sampling(settings[0]["temperature"], settings[0]["top_p"], keys)
        self.engine.generate(prompts, endings, self._shares(possible=True), ended, sampling)
        return [answers[place] for place in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list:
        """As HFLM's, requests being ((context, continuation), tokens, tokens); of a part of a text
        None, tokens, tokens.
        """
        self.load()
        answers: dict[int, tuple[float, bool]] = {}

        def scored(place: int, *answer: Any) -> None:
            answers[place] = answer
            if requests[place][0]:
                self.ended("loglikelihood", requests[place][0], answer)

        share = self._shares(self.engine.can_share())
        self.engine.loglikelihood([request[1:] for request in requests], share, scored)
        return [answers[place] for place in range(len(requests))]

    def _shares(self, possible: bool) -> bool:
        """Whether prompts share what they have in common.

        Reported once where it is asked for and not possible.
        """
        if self.share_prefix and not possible and not self.unshared:
            self.unshared = True
            say(
                "prompts do not share their exemplars: the model's layers or generation settings do"
                " not allow it"
            )
        return self.share_prefix and possible

    @property
    def _ends(self) -> set[int]:
        """The tokens that end an answer: the harness' and the model's own."""
        ends = self.model.generation_config.eos_token_id
        return {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def _cut(self, generation: str, stop: list[str], think_end_token: None = None) -> str:
        """Cut a text at its first stop string after the thoughts, which are kept.

        Called as the harness' `postprocess_generated_text`, which would drop them.
        """
        thoughts, answer = split_thoughts(generation, self.think_end)
        answer = postprocess_generated_text(answer, stop, think_end_token=None)
        if thoughts is None:
            return answer
        return f"{thoughts}{self.think_end}{answer}"

    def _ran_out(self, tokens: list[int], text: str, room: int, stop: Sequence[str]) -> bool:
        """Return True if an answer used all its tokens without an end token, or a stop string after
        the thoughts.
        """
        thoughts, answer = split_thoughts(text, self.think_end)
        thinks_still = self.think_end is not None and thoughts is None
        return metrics.ran_out(tokens, answer, room, [] if thinks_still else stop, self._ends)

    # --- answers of the harness' own loops ---

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        ends_at = stop if self.think_end is None else [eos]
        rows, start = (
            super()._model_generate(context, max_length, ends_at, **kwargs),
            context.shape[1],
        )
        self._batch = [
            self._ran_out(tokens, self.tok_decode(tokens), max_length - start, stop)
            for tokens in (row[start:].tolist() for row in rows)
        ]
        return rows

    def add_partial(self, attr: str, request: Any, response: Any) -> None:
        self.ended(
            attr, request, (response, self._batch.pop(0)) if attr == "generate_until" else response
        )
