"""The model that answers: a checkpoint or a merge loaded, as the harness' model class with what a long sweep needs.

These are shared prefixes, generation in slots (decode.py), smaller batches when memory runs out, helpers on other GPUs,
answers stored when they end, and a note of which were cut off. Tokens, stop strings and scores are the harness' own.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    GenKwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from pipeline.errors import PipelineError, first_line
from pipeline.evaluate import metrics
from pipeline.evaluate.decode import Ending, can_decode, decode
from pipeline.evaluate.prefix import (
    Prefix,
    batch_places,
    group_prompts,
    heads_as_they_are,
)
from pipeline.evaluate.shards import Helpers
from pipeline.evaluate.tree import MOST_TOKENS, Trie, build_tries, can_score_tries, trie_logits
from pipeline.models import load
from pipeline.models.checkpoint import DTYPES
from pipeline.progress import Bar, say

if TYPE_CHECKING:
    from pipeline.config.evaluation import Eval
    from pipeline.config.stages import EvalStage
    from pipeline.evaluate.score_cache import Answers
    from pipeline.merge.live import Live
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Run

Result = TypeVar("Result")
ENCODED_AHEAD = 256  # texts
GREEDY = {"until", "max_gen_toks", "do_sample", "temperature"}  # settings of a request


def answering_model(run: Run[EvalStage], load: Callable[[], Answering]) -> LM:
    """The model that answers: `load()`, with helpers on other GPUs for eval.shards, or the harness' vLLM."""
    settings = run.config.eval
    if settings.backend == "vllm":
        return vllm_model(run.parents["checkpoint"].folder, settings)
    helpers = Helpers(load, settings.shards - 1) if settings.shards > 1 else None
    lm = load()
    if lm.tokenizer.eos_token_id is None:
        raise PipelineError(
            f"the tokenizer of {lm.tokenizer.name_or_path} has no eos_token, at which answers end: name one"
        )
    lm.helpers = helpers
    return lm


def vllm_model(checkpoint: Path, settings: Eval) -> LM:
    """The harness' own vLLM model of a folder. It shares prefixes by itself, and does not say which answers ran out."""
    from lm_eval.models.vllm_causallms import VLLM

    gpus = {"data_parallel_size": settings.shards} if settings.shards > 1 else {}
    return VLLM(pretrained=str(checkpoint), dtype=settings.dtype, batch_size="auto", enable_prefix_caching=True, **gpus)


def load_model(source: Run | Path, batch_size: int, dtype: str = "auto") -> Answering:
    """The model of a run's checkpoint or merge, or of a folder: safetensors, no code of its own, in `dtype` (auto:
    as its config.json names it). A merge, and an adapter with its base, are put together in memory (merge/live.py).
    """
    from pipeline.merge.live import merge_of_one, model_of
    from pipeline.merge.resident import keeps_models
    from pipeline.merge.stage import merge_of
    from pipeline.models.skeleton import build_skeleton
    from pipeline.runs.lineage import is_adapter

    device = "cuda" if torch.cuda.is_available() else "cpu"
    merge, folder = None, source
    if not isinstance(folder, Path):
        merge = None if "checkpoint" in folder.parents else merge_of(folder)
        folder = folder.parents["checkpoint"].folder if merge is None else merge.layout.folder
    if merge is None and (is_adapter(folder) or (keeps_models() and folder.is_dir())):
        merge = merge_of_one(folder)
    try:
        if merge is not None:
            live = model_of(merge, dtype, device)
            refuse_other_dtype(live.model, dtype, str(folder))
            lm = Answering(pretrained=live.model, tokenizer=live.tokenizer, batch_size=batch_size)
            lm.live = live, merge
            return lm
        build_skeleton(folder, "checkpoint")
        tokenizer, model = load.load_tokenizer(folder), load.load_model(folder, dtype=dtype)
    except PipelineError:
        raise
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"checkpoint {folder} cannot be loaded ({first_line(error)}): it needs safetensors and a tokenizer"
        ) from error
    refuse_other_dtype(model, dtype, str(folder))
    return Answering(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch_size)


def refuse_other_dtype(model: Any, dtype: str, folder: str) -> None:
    """Refuse a model that transformers loaded in another dtype than `dtype`; quantized tensors do not count."""
    loaded = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()} & {"float64", *DTYPES}
    if dtype != "auto" and loaded != {dtype}:
        dtypes = " and ".join(sorted(loaded))
        raise PipelineError(f"eval.dtype={dtype}, but transformers loaded {folder} in {dtypes}: give a dtype it keeps")


def request_key(request: Sequence[Any]) -> tuple[str, str]:
    """What `Answering.ran_out` knows a generation request (prompt, settings) by."""
    return request[0], json.dumps(request[1], sort_keys=True)


def is_greedy(settings: GenKwargs) -> bool:
    """Whether the settings of a request leave nothing but the likeliest token to choose."""
    return settings.keys() <= GREEDY and not settings["do_sample"]


class Answering(HFLM):
    """The model while it answers the questions of a task: HFLM with `ran_out`, the answers that used up max_gen_toks.

    `share_prefix`: compute what prompts have in common once; `unshared`: the model did not allow it. `helpers`:
    processes that answer a part of the questions. `kept`: answers stored before, which are not computed again; further
    ones are added when they end. `live`: of a merge, the model in memory and the merge that it holds. `bar`: counts
    questions; of several `processes` this one counts for all. `least_batch_size`: of this process and its helpers, once
    memory ran out. `drafts`: how many tokens were proposed and accepted (decode.py), without its helpers'.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._ahead: Iterator[str] = iter(())
        self._encoded: dict[str, list[int]] = {}
        super().__init__(**kwargs)
        self.ran_out: dict[tuple[str, str], bool] = {}
        self.least_batch_size = self.batch_size
        self.share_prefix = False
        self.unshared = False
        self.helpers: Helpers | None = None
        self.live: tuple[Live, Merging] | None = None
        self.bar: Bar | None = None
        self.kept: Answers | None = None
        self.drafts = Counter[str]()
        self.processes = 1
        self._each = 0.0  # questions that an answer counts as
        self._batch: list[bool] = []
        self.set_cache_hook(self)  # the harness tells its cache each answer, in the order of the batch

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if self.helpers:
            return self.helpers.answer(self, "loglikelihood", requests)
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
        if not all(is_greedy(normalize_gen_kwargs(request.args[1], self.max_gen_toks)) for request in requests):
            self.kept = None  # samples differ each time
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
        return [answers[place] for place in range(len(requests))]

    def _generate(self, requests: list[Instance]) -> list[str]:
        if self.helpers:
            texts = self.helpers.answer(self, "generate_until", requests)
            for request, text in zip(requests, texts, strict=True):
                self._keep(request.args, text)
            return texts
        self._count(requests)
        settings = normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        alike = all(request.args[1] == requests[0].args[1] for request in requests)
        if alike and is_greedy(settings) and can_decode(self.model):
            return self._decode(requests, settings)
        self._shares(possible=False)
        return self._as_a_whole(functools.partial(HFLM.generate_until, self, requests, disable_tqdm=True))

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        if self._shares(can_score_tries(self.model.config)):
            return self._loglikelihood_shared(requests)
        return self._as_a_whole(functools.partial(HFLM._loglikelihood_tokens, self, requests, True, override_bs))

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
        self._each = self.processes * questions / max(len(requests), 1)

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

        return self.halving(begin)

    # ------------------------------------------------------------------------------------------- shared prefixes

    def _loglikelihood_shared(self, requests: list) -> list[tuple[float, bool]]:
        """As HFLM's, requests being ((context, continuation), tokens, tokens): each token that several requests begin
        with is computed once (evaluate/tree.py). Where all continuations are single tokens, such as the letters of
        choices, the prompts of a batch share their prefix alone."""
        inputs: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, continuation) in enumerate(requests):
            inputs.setdefault((*context, *continuation[:-1]), []).append(place)
        prompts = list(inputs)
        keep = [max(len(requests[place][2]) for place in inputs[prompt]) for prompt in prompts]
        answers: list[Any] = [None] * len(requests)
        most = MOST_TOKENS if max(keep, default=0) > 1 else 0
        longest = [len(prompt) - kept for prompt, kept in zip(prompts, keep, strict=True)]
        for shared, members in group_prompts(prompts, longest, most):
            if not shared and not most:
                places = [place for index in members for place in inputs[prompts[index]]]
                alone = [requests[place] for place in places]
                likelihoods = self._as_a_whole(functools.partial(HFLM._loglikelihood_tokens, self, alone, True))
                for place, answer in zip(places, likelihoods, strict=True):
                    answers[place] = answer
                continue
            tries = build_tries(prompts, members, shared, most)

            def weigh(prefix: Prefix, batch: list[int], tries: list[Trie] = tries) -> None:
                scored = [tries[index] for index in batch]
                needed = [
                    sorted({node for index, path in trie.paths.items() for node in path[-keep[index] :]})
                    for trie in scored
                ]
                found = trie_logits(self.model, prefix, scored, needed, self._pad)
                for trie, nodes, logits in zip(scored, needed, found, strict=True):
                    row = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
                    at = {node: position for position, node in enumerate(nodes)}
                    for index, path in trie.paths.items():
                        for place in inputs[prompts[index]]:
                            tokens = torch.tensor(requests[place][2], device=row.device)
                            predicted = row[[at[node] for node in path[-len(tokens) :]]]
                            likelihood = float(predicted.gather(1, tokens[:, None]).sum())
                            answers[place] = likelihood, bool((predicted.argmax(dim=-1) == tokens).all())
                self._answered(sum(len(inputs[prompts[index]]) for trie in scored for index in trie.paths))

            lengths, counts = [len(trie.tokens) for trie in tries], [len(trie.paths) for trie in tries]
            self._in_batches(prompts[members[0]][:shared], lengths, counts, weigh)
        return answers

    def _decode(self, requests: list[Instance], settings: GenKwargs) -> list[str]:
        """As HFLM's, for requests of the same greedy settings."""
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
            self._keep(request, answers[place], tokens)
            self._answered(1)

        def go_on(shared: int, members: list[int]) -> None:
            left = [member for member in members if member not in answers]
            rests = [prompts[member][shared:] for member in left]
            neighbours = [self.kept.of_neighbours(requests[member].args) for member in left] if self.kept else []
            beginning, store = prompts[left[0]][:shared], lambda at, tokens: ended(left[at], tokens)
            decode(self.model, beginning, rests, self.batch_size, ending, store, neighbours, self.drafts)

        groups = group_prompts(prompts) if self.share_prefix else [(0, list(range(len(prompts))))]
        with self._computing():
            for group in groups:
                self.halving(functools.partial(go_on, *group))
        return [answers[place] for place in range(len(requests))]

    def _in_batches(
        self,
        prefix_tokens: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
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

    @contextmanager
    def _computing(self) -> Iterator[None]:
        autocast = torch.autocast(
            self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        )
        with torch.no_grad(), autocast, heads_as_they_are(self.device):
            yield

    @property
    def _ends(self) -> set[int]:
        """The tokens that end an answer: the harness' and the model's own."""
        ends = self.model.generation_config.eos_token_id
        return {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}

    @property
    def _pad(self) -> int:
        return self.tokenizer.pad_token_id or 0  # masked, so that any token does

    # ------------------------------------------------------------------------------------------- memory, lengths

    def halving(self, work: Callable[[], Result]) -> Result:
        """Do the work; out of memory, do it again with half the batch."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if self.batch_size == 1 or not should_reduce_batch_size(error):
                    raise
            self.batch_size_per_gpu = self.batch_size // 2  # out of the handler, which holds on to the tensors
            self.least_batch_size = self.batch_size
            say(f"out of memory: going on with eval.batch_size={self.batch_size}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

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

    def _keep(self, request: Any, answer: str, tokens: Sequence[int] = ()) -> None:
        if self.kept:
            self.kept.keep(request, answer, self.ran_out[request_key(request)], tokens)
