"""The harness' model class for a checkpoint or a merge. A backend computes its answers.

Tokens, stop strings and scores are the harness' own. Weights are read when the first request needs
them.
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
from pipeline.evaluate.backend import without_weights
from pipeline.evaluate.decode import Ending, split_thoughts
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.hub import reach
from pipeline.progress import announced, say

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

GREEDY = {"until", "max_gen_toks", "do_sample", "temperature"}  # settings of a greedy request
DRAW = "draw"  # setting of a sampled request: the seed and the answer's number


def open_model(
    weights: Merging | Path,
    batch_size: int | None = 1,
    dtype: str = "auto",
    backend: Callable[..., Any] = TorchBackend,
) -> Answering:
    """Open the model of a folder or merge: read its headers and tokenizer, but not its weights.

    `backend` is the class of the backend. It is called with (batch_size, dtype, weights).

    Raises:
        PipelineError: The folder has no model, or its tokenizer has no eos_token.
    """
    model, tokenizer = without_weights(weights)
    if tokenizer.eos_token_id is None:
        raise PipelineError(
            f"The tokenizer of {tokenizer.name_or_path} has no eos_token, so answers would not"
            " end. Set eos_token in its tokenizer_config.json."
        )
    return Answering(backend(batch_size, dtype, weights), pretrained=model, tokenizer=tokenizer)


def is_reproducible(settings: GenKwargs) -> bool:
    """Return True if a request determines its answer: it is greedy or has a seed (DRAW)."""
    greedy = settings.keys() <= GREEDY and not settings["do_sample"]
    return greedy or settings.keys() == {*GREEDY, "top_p", DRAW}


class Answering(HFLM):
    """HFLM that reports each answer when it ends.

    Attributes:
        engine: The backend.
        share_prefix: Whether the common prefix of prompts is computed once.
        unshared: Whether sharing was requested and the model did not allow it.
        think_end: The end of a model's thoughts, in which stop strings are ignored.
        ended: Called with a request's kind, its arguments and its answer, in the form of store.py.
    """

    def __init__(self, backend: Any, **kwargs: Any) -> None:
        # a context has several continuations
        self._encoded = functools.lru_cache(maxsize=8)(super().tok_encode)
        self.engine = backend
        super().__init__(batch_size=backend.batch_size, **kwargs)
        self.share_prefix = self.unshared = False
        self.ended: Callable[[str, tuple[Any, ...], Any], Any] = lambda kind, args, answer: None
        self.think_end: str | None = None
        self._cut_off: list[bool] = []  # for the answers of the current batch
        # the harness reports each answer to its cache (`add_partial`), in the batch's order
        self.set_cache_hook(self)

    def load(self) -> None:
        with announced("loading the model"):
            self._model = self.engine.load()
        self._device = self._model.device

    @property
    def batch_size(self) -> int:
        """Rows computed together: eval.batch_size or as many as fit, halved if memory runs out."""
        return self.engine.batch_size

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(self._encoded(string, *args, **kwargs))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.load()
        limit = self.max_gen_toks
        settings = [normalize_gen_kwargs(request.args[1], limit) for request in requests]
        first = settings[0]
        alike = all({**one, DRAW: ""} == {**first, DRAW: ""} for one in settings)
        if alike and is_reproducible(first) and self.engine.can_generate():
            return self._decoded(requests, first)
        if DRAW in first:
            raise PipelineError(
                f"eval.temperature={first['temperature']:g}: {self.model.config.model_type} models"
                " cannot draw each token with its own seed, so answers would differ each time. Set"
                " eval.temperature=0."
            )
        self._shares(possible=False)
        generate = functools.partial(super().generate_until, requests, disable_tqdm=True)
        with reach.replaced(huggingface, "postprocess_generated_text", self._cut):
            return self.engine.halving(generate)

    def _decoded(self, requests: list[Instance], settings: GenKwargs) -> list[str]:
        """Answer requests as HFLM does. Their settings are the same except for the draws."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        ending = Ending(
            self._ends,
            handle_stop_sequences(settings.get("until"), eos=eos),
            settings["max_gen_toks"],
            functools.partial(self.tok_decode, skip_special_tokens=False),
            think_end=self.think_end,
        )
        prompts = []
        for request in requests:
            encoded, _ = self.tok_batch_encode([request.args[0]])
            prompts.append(encoded[0].tolist())
        answers: dict[int, str] = {}

        def ended(place: int, tokens: list[int]) -> None:
            text = self.tok_decode(tokens)
            answers[place] = self._cut(text, [*ending.stop])
            cut_off = self._ran_out(tokens, text, ending.room, ending.stop)
            self.ended("generate_until", requests[place].args, (answers[place], cut_off))

        sampling = _sampling_of(requests, settings) if DRAW in settings else None
        self.engine.generate(prompts, ending, self._shares(possible=True), ended, sampling)
        return [answers[place] for place in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list:
        """Answer requests as HFLM does.

        A request is ((context, continuation), tokens of the context, tokens of the continuation).
        Its first element is None if the request is a part of a longer text.
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
        """Return True if prompts share their common prefix.

        If sharing was requested but is not possible, a message is printed once.
        """
        if self.share_prefix and not possible and not self.unshared:
            self.unshared = True
            say(
                "prompts do not share their exemplars, because the model's layers or generation"
                " settings do not allow it"
            )
        return self.share_prefix and possible

    @property
    def _ends(self) -> set[int]:
        """The tokens that end an answer: the harness' and the model's own."""
        ends = self.model.generation_config.eos_token_id
        if not isinstance(ends, list):
            ends = [ends]
        return {self.eot_token_id, *ends} - {None}

    def _cut(self, generation: str, stop: list[str], think_end_token: None = None) -> str:
        """Cut a text at its first stop string after the thoughts, and keep the thoughts.

        Replaces the harness' `postprocess_generated_text`, which drops the thoughts.
        """
        thoughts, answer = split_thoughts(generation, self.think_end)
        answer = postprocess_generated_text(answer, stop, think_end_token=None)
        if thoughts is None:
            return answer
        return f"{thoughts}{self.think_end}{answer}"

    def _ran_out(self, tokens: list[int], text: str, room: int, stop: Sequence[str]) -> bool:
        """Return True if an answer used all its tokens without reaching an end.

        An end is an end token, or a stop string after the thoughts. A batch may continue `tokens`
        past the answer's end. `text` is all of them, decoded.
        """
        if len(tokens) < room or not self._ends.isdisjoint(tokens):
            return False
        thoughts, answer = split_thoughts(text, self.think_end)
        if self.think_end is not None and thoughts is None:
            return True
        return not any(string and string in answer for string in stop)

    # --- called by the harness' own loops ---

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        ends_at = stop
        if self.think_end is not None:
            ends_at = [self.tok_decode(self.eot_token_id, skip_special_tokens=False)]
        rows = super()._model_generate(context, max_length, ends_at, **kwargs)
        start = context.shape[1]
        self._cut_off = []
        for row in rows:
            tokens = row[start:].tolist()
            text = self.tok_decode(tokens)
            self._cut_off.append(self._ran_out(tokens, text, max_length - start, stop))
        return rows

    def add_partial(self, attr: str, request: Any, response: Any) -> None:
        answer = (response, self._cut_off.pop(0)) if attr == "generate_until" else response
        self.ended(attr, request, answer)


def _sampling_of(requests: Sequence[Instance], settings: GenKwargs) -> Sampling:
    keys = []
    for prompt, options in (request.args for request in requests):
        keys.append(f"{options[DRAW]} {hashlib.sha256(prompt.encode()).hexdigest()}")
    return Sampling(settings["temperature"], settings["top_p"], keys)
