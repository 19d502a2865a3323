"""The model that answers: a checkpoint or a merge loaded, as the harness' model class with what a long sweep needs.

A backend computes the answers (backend.py). Here are answers stored when they end, and a note of which were cut off.
Tokens, stop strings and scores are the harness' own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    GenKwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from pipeline.errors import PipelineError
from pipeline.evaluate import metrics
from pipeline.evaluate.backend import Backend
from pipeline.evaluate.decode import Ending, Sampling
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.progress import Bar, say

if TYPE_CHECKING:
    from pipeline.evaluate.score_cache import Answers
    from pipeline.runs.run import Run

Result = TypeVar("Result")
ENCODED_AHEAD = 256  # texts
GREEDY = {"until", "max_gen_toks", "do_sample", "temperature"}  # settings of a request
DRAW = "draw"  # setting of a sampled request: the seed and the number of the answer


def load_model(
    source: Run | Path, batch_size: int, dtype: str = "auto", backend: Callable[[int, str], Backend] = TorchBackend
) -> Answering:
    """The model of a run's checkpoint or merge, or of a folder, as the backend loads it."""
    engine = backend(batch_size, dtype)
    engine.load(source)
    if engine.tokenizer.eos_token_id is None:
        raise PipelineError(
            f"the tokenizer of {engine.tokenizer.name_or_path} has no eos_token, at which answers end: name one"
        )
    return Answering(engine, pretrained=engine.model, tokenizer=engine.tokenizer)


def request_key(request: Sequence[Any]) -> tuple[str, str]:
    """What `Answering.ran_out` knows a generation request (prompt, settings) by."""
    return request[0], json.dumps(request[1:], sort_keys=True)


def is_reproducible(settings: GenKwargs) -> bool:
    """Whether a request has one answer: the greedy one, or that of its draw."""
    return is_greedy(settings) or settings.keys() == {*GREEDY, "top_p", DRAW}


def is_greedy(settings: GenKwargs) -> bool:
    """Whether the settings of a request leave nothing but the likeliest token to choose."""
    return settings.keys() <= GREEDY and not settings["do_sample"]


class Answering(HFLM):
    """The model while it answers the questions of a task: HFLM with `ran_out`, the answers that used up max_gen_toks.

    `engine`: the backend, by default torch. `share_prefix`: compute what prompts have in common once; `unshared`: the
    model did not allow it. `kept`: answers stored before, which are not computed again; further ones are added when
    they end. `bar`: counts questions. `think_end`: what ends the model's thoughts, which are no part of the answer;
    `thoughts`: those of each request. `ahead`: answers of `answer_ahead`.
    """

    def __init__(self, backend: Backend | None = None, batch_size: int = 1, **kwargs: Any) -> None:
        self._ahead: Iterator[str] = iter(())
        self._encoded: dict[str, list[int]] = {}
        self.engine = backend or TorchBackend(batch_size, model=kwargs["pretrained"])
        super().__init__(batch_size=self.engine.batch_size, **kwargs)
        self.ran_out: dict[tuple[str, str], bool] = {}
        self.share_prefix = False
        self.unshared = False
        self.bar: Bar | None = None
        self.kept: Answers | None = None
        self.think_end: str | None = None
        self.thoughts: dict[tuple[str, str], str] = {}
        self.ahead: dict[tuple[str, str], str] = {}
        self._each = 0.0  # questions that an answer counts as
        self._batch: list[bool] = []
        self.set_cache_hook(self)  # the harness tells its cache each answer, in the order of the batch

    @property
    def batch_size(self) -> int:
        """Less than eval.batch_size once memory ran out."""
        return self.engine.batch_size

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._count(requests)
        pairs = [request.args for request in requests]
        self._ahead = (
            text for context, continuation in pairs if context for text in (context + continuation, context.rstrip())
        )
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._ahead, self._encoded = iter(()), {}

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """As HFLM's, which encodes a context anew for each continuation: here the texts that come next are encoded
        together, each once, by the tokenizer's threads."""
        if args or kwargs:
            return super().tok_encode(string, *args, **kwargs)
        if string not in self._encoded:
            texts = list(dict.fromkeys(itertools.islice(self._ahead, ENCODED_AHEAD)))
            begin = self.tokenizer.decode(self.prefix_token_id)
            if string not in texts or any(has_bos_prefix(text, begin) for text in texts):
                return super().tok_encode(string)
            special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
            token_ids = self.tokenizer(texts, **special).input_ids
            self._encoded = dict(zip(texts, token_ids, strict=True))
        return list(self._encoded[string])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if not all(is_reproducible(normalize_gen_kwargs(request.args[1], self.max_gen_toks)) for request in requests):
            self.kept = None  # samples differ each time
        if all(request_key(request.args) in self.ahead for request in requests):
            return [self.ahead[request_key(request.args)] for request in requests]
        answers: dict[int, str] = {}
        for place, request in enumerate(requests):
            if self.kept and (kept := self.kept.look_up(request.args)):
                answers[place], self.ran_out[request_key(request.args)] = kept
        left = [place for place in range(len(requests)) if place not in answers]
        if answers:
            say(f"{len(answers)} of {len(requests)} answers are stored from an earlier evaluation")
            if self.bar:
                self.bar.update(len(answers))
        answers |= zip(left, self._generate([requests[place] for place in left]) if left else (), strict=True)
        return [self._without_thoughts(request, answers[place]) for place, request in enumerate(requests)]

    def answer_ahead(self, requests: list[Instance]) -> None:
        """Answer what `generate_until` will be asked for in several calls, so that all of it is computed together."""
        texts = self.generate_until(requests)
        self.ahead = {request_key(request.args): text for request, text in zip(requests, texts, strict=True)}

    def _without_thoughts(self, request: Instance, text: str) -> str:
        """The text after the model's thoughts, as the harness cuts it; all of it where they do not end."""
        if self.think_end is None:
            return text
        thoughts, ended, answer = text.rpartition(self.think_end)
        if ended:
            self.thoughts[request_key(request.args)] = thoughts
        return answer.lstrip()

    def _generate(self, requests: list[Instance]) -> list[str]:
        self._count(requests)
        settings = normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        alike = all({**request.args[1], DRAW: ""} == {**requests[0].args[1], DRAW: ""} for request in requests)
        if alike and is_reproducible(settings) and self.engine.can_generate():
            return self._decoded(requests, settings)
        if DRAW in settings:
            raise PipelineError(
                f"eval.temperature={settings['temperature']:g}: {self.model.config.model_type} cannot draw each "
                "token by itself, so that answers would differ each time: give eval.temperature=0"
            )
        self._shares(possible=False)
        return self._as_a_whole(functools.partial(HFLM.generate_until, self, requests, disable_tqdm=True))

    def _decoded(self, requests: list[Instance], settings: GenKwargs) -> list[str]:
        """As HFLM's, for requests of the same settings, but for the draws of a sample."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(settings.get("until"), eos=eos)
        to_text = functools.partial(self.tok_decode, skip_special_tokens=False)
        ending = Ending(self._ends, until, settings["max_gen_toks"], to_text)
        prompts = [self.tok_batch_encode([request.args[0]])[0][0].tolist() for request in requests]
        answers: dict[int, str] = {}

        def ended(place: int, tokens: list[int]) -> None:
            text, request = self.tok_decode(tokens), requests[place].args
            answers[place] = postprocess_generated_text(text, until, think_end_token=None)
            self.ran_out[request_key(request)] = metrics.ran_out(tokens, text, ending.room, until, self._ends)
            self._keep(request, answers[place])
            self._answered(1)

        sampling = None
        if DRAW in settings:
            put = [request.args for request in requests]
            keys = [f"{asked[DRAW]} {hashlib.sha256(prompt.encode()).hexdigest()}" for prompt, asked in put]
            sampling = Sampling(settings["temperature"], settings["top_p"], keys)
        self.engine.generate(prompts, ending, self._shares(possible=True), ended, sampling)
        return [answers[place] for place in range(len(requests))]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        """As HFLM's, requests being ((context, continuation), tokens, tokens)."""
        share = self._shares(self.engine.can_share())
        return self.engine.loglikelihood([request[1:] for request in requests], share, self._answered)

    def _shares(self, possible: bool) -> bool:
        """Whether prompts share what they have in common. Reported once where it is asked for and not possible."""
        if self.share_prefix and not possible and not self.unshared:
            self.unshared = True
            say("prompts do not share their exemplars: the model's layers or generation settings do not allow it")
        return self.share_prefix and possible

    # ------------------------------------------------------------------------------------------- progress

    def _count(self, requests: Sequence[Instance]) -> None:
        """A question of four choices is four requests."""
        questions = len({request.doc_id for request in requests})
        self._each = questions / max(len(requests), 1)
        if self.bar:
            self.bar.at_once = self.batch_size * self._each

    def _answered(self, requests: float) -> None:
        if self.bar:
            self.bar.update(requests * self._each)

    def _as_a_whole(self, work: Callable[[], Result]) -> Result:
        """The harness' own loop, which begins anew where memory ran out."""
        answered_before = self.bar.done if self.bar else 0

        def begin() -> Result:
            if self.bar:
                self.bar.to(answered_before)
            return work()

        return self.engine.halving(begin)

    @property
    def _ends(self) -> set[int]:
        """The tokens that end an answer: the harness' and the model's own."""
        ends = self.model.generation_config.eos_token_id
        return {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        rows, start = super()._model_generate(context, max_length, stop, **kwargs), context.shape[1]
        self._batch = [
            metrics.ran_out(tokens, self.tok_decode(tokens), max_length - start, stop, self._ends)
            for tokens in (row[start:].tolist() for row in rows)
        ]
        return rows

    def add_partial(self, attr: str, request: Any, response: Any) -> None:
        self._answered(1)
        if attr == "generate_until":
            self.ran_out[request_key(request)] = self._batch.pop(0)
            self._keep(request, response)

    def _keep(self, request: Any, answer: str) -> None:
        if self.kept:
            self.kept.keep(request, answer, self.ran_out[request_key(request)])
