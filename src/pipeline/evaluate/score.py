"""Scoring of tasks: missing answers are computed, then the harness scores all answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import torch
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.utils import hash_string

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.config.evaluation import Eval, below_float32, is_sampled
from pipeline.errors import PipelineError
from pipeline.evaluate.before import engine_of, refuse_too_long
from pipeline.evaluate.decode import split_thoughts
from pipeline.evaluate.memory import ROWS
from pipeline.evaluate.model import Answering
from pipeline.evaluate.prompts import (
    build_requests,
    harness_tamed,
    plain_line,
    prepare,
    prompt_settings,
    rows_asked,
    tokens_needed,
)
from pipeline.evaluate.records import (
    EvaluationResult,
    TaskResult,
    join_answers,
    rows_of,
    sample_of,
    share_rows,
)
from pipeline.evaluate.store import Answers, Store, digest
from pipeline.limits import time_limit
from pipeline.models.load import date_of_templates
from pipeline.progress import Bar, announced, say
from pipeline.runs.provenance import processor_model

SCORING_SECONDS = 1800  # the most processor time for the filters and metrics of one task
USED = "batch_size"  # key of the number of rows, stored among answers that depend on it


@dataclass
class Asked:
    """A task, its requests to a model, and the model's answers.

    Attributes:
        spec: The task.
        task: The harness' task object.
        rows: The rows that are scored.
        requests: The requests of all answers to the rows.
        answers: The stored answers.
        left: The requests without a stored answer.
    """

    spec: TaskSpec
    task: Task
    rows: Sequence[int]
    requests: list[Instance]
    answers: Answers
    left: list[Instance]

    @property
    def name(self) -> str:
        return self.spec.name


@harness_tamed()
def score_tasks(
    lm: Answering, specs: Sequence[TaskSpec], tasks: Sequence[Task], settings: Eval, store: Store
) -> EvaluationResult:
    """Answer each task with the model and return the harness' scores.

    If all answers are stored, the model's weights are not read.

    Raises:
        PipelineError: Some prompts do not fit the model. This is checked for all tasks before
            anything is scored.
    """
    facts = facts_of(settings)
    template_date = date_of_templates(settings.template_date)
    lm.chat_template_args = template_date | settings.chat_template_args
    lm.think_end = settings.think_end
    with announced("tokenizing the questions"):
        asked_tasks = [ask(lm, *pair, settings, store) for pair in zip(specs, tasks, strict=True)]
    _answer_all(lm, asked_tasks, settings)
    results = {asked.name: score(lm, asked, settings) for asked in asked_tasks}
    packages = ("lm_eval", "transformers", "torch", "datasets", "sacrebleu")
    harness: dict[str, Any] = {
        "packages": {package: version(package) for package in packages},
        "versions": {name: result.version for name, result in results.items()},
        "task_hashes": {name: result.task_hash for name, result in results.items()},
    }
    harness |= facts
    harness["share_prefix"] = settings.share_prefix and not lm.unshared
    harness["found_again"] = [asked.name for asked in asked_tasks if not asked.left]
    stored = [asked.answers.found for asked in asked_tasks]
    used = [found[USED] for found in stored if USED in found]
    if used:  # otherwise the answers were stored, and do not depend on it
        harness[USED] = max(used)
    rows = list(chain(*(result.rows for result in results.values())))
    samples = {name: result.samples for name, result in results.items()}
    return EvaluationResult(rows, samples, harness)


def _answer_all(lm: Answering, asked_tasks: Sequence[Asked], settings: Eval) -> None:
    """Compute the answers that are not stored."""
    for asked in asked_tasks:
        count = len(asked.requests)
        stored = count - len(asked.left)
        if stored:
            say(f"{asked.name}: {stored} of {count} answers are stored from an earlier evaluation")
    unanswered = [asked for asked in asked_tasks if asked.left]
    if not unanswered:
        return
    questions = settings.answers * sum(len(asked.rows) for asked in unanswered)
    with Bar(", ".join(asked.name for asked in unanswered), questions, "question") as bar:
        for asked in unanswered:
            compute(lm, asked, settings, bar)


def facts_of(settings: Eval) -> dict[str, Any]:
    """Return the settings of an evaluation in the form of scores.json."""
    facts = decided_by(settings) | {"chat_template": settings.chat_template}
    if settings.chat_template:
        facts["template_date"] = settings.template_date
        if settings.chat_template_args:
            facts["chat_template_args"] = settings.chat_template_args
        if not settings.fewshot_as_multiturn:
            facts["fewshot_as_multiturn"] = False
    if is_sampled(settings):
        sampling = ("temperature", "top_p", "answers", "sample_seed")
        facts["sampling"] = {name: getattr(settings, name) for name in sampling}
    if settings.system_instruction is not None:
        facts["system_instruction"] = settings.system_instruction
    return facts


def decided_by(settings: Eval) -> dict[str, Any]:
    """Return the settings that decide an answer, besides the model and the request."""
    decides = {"backend": settings.backend, "dtype": settings.dtype} | rounding_settings(settings)
    if settings.products != "ieee":
        decides["products"] = settings.products
    if settings.think_end is not None:
        decides["think_end"] = settings.think_end
    engine = engine_of(settings)
    if engine:
        decides["engine"] = engine
    return decides


def ask(lm: Answering, spec: TaskSpec, task: Task, settings: Eval, store: Store) -> Asked:
    """Build the requests of a task and look up their stored answers.

    If an answer depends on those computed together with it, stored answers are only used if all
    are stored.

    Raises:
        PipelineError: Prompts do not fit the model. This is not checked if all answers are stored.
    """
    rows = rows_asked(spec, task, settings)
    requests = build_requests(lm, spec, task, rows, settings)
    together = None
    if below_float32(settings):
        together = digest([key_of(request) for request in requests])
    answers = store.answers(spec.name, decided_by(settings), together)
    unanswered = [request for request in requests if answers.look_up(key_of(request)) is None]
    if unanswered and answers.together:
        answers.found = {}
        unanswered = requests
    if unanswered:
        refuse_too_long(spec.name, tokens_needed(lm, requests), lm.max_length)
    return Asked(spec, task, rows, requests, answers, unanswered)


def key_of(request: Instance) -> tuple[Any, ...]:
    return (request.request_type, *request.args)


def compute(lm: Answering, asked: Asked, settings: Eval, bar: Bar) -> None:
    """Compute the answers of a task that are not stored, one kind of request after the other.

    The model reports each answer when it ends.
    """
    set_sharing(lm, asked.spec, settings)
    questions_a_request = settings.answers * len(asked.rows) / len(asked.left)

    def ended(kind: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if asked.answers.add(digest((kind, *arguments)), answer):
            bar.update(questions_a_request)

    lm.ended = ended
    by_kind: dict[str, list[Instance]] = {}
    for request in asked.left:
        by_kind.setdefault(request.request_type, []).append(request)
    for kind, requests in by_kind.items():
        getattr(lm, kind)(requests, disable_tqdm=True)
    asked.answers.found[USED] = lm.batch_size
    if asked.answers.together and not lm.engine.halved:
        asked.answers.write(asked.answers.found.items())
    asked.answers.close()


class Answered(LM):
    """The harness' model class that returns stored answers."""

    def __init__(self, lm: Answering, answers: Answers) -> None:
        super().__init__()
        self.lm, self.answers = lm, answers

    @property
    def tokenizer_name(self) -> str:
        return str(self.lm.tokenizer_name)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(self.lm.apply_chat_template(chat_history, add_generation_prompt))

    def stored(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return [self.answers.look_up(key_of(request)) for request in requests]

    loglikelihood = loglikelihood_rolling = stored

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [split_thoughts(text, self.lm.think_end)[1] for text, _ in self.stored(requests)]


def score(lm: Answering, asked: Asked, settings: Eval) -> TaskResult:
    """Score the answers of a task with the harness.

    If there are several sampled answers to a question, each is scored separately.
    """
    scored = [score_answer(lm, asked, settings, number) for number in range(settings.answers)]
    result = scored[0]
    if len(scored) > 1:
        result = join_answers(asked.spec, scored)
    result = replace(result, rows=[*result.rows, *share_rows(asked.spec, result.samples)])
    cut_off = sum(bool(sample.get("cut_off")) for sample in result.samples)
    if asked.left and cut_off > len(result.samples) / 2:
        limit = "" if settings.max_gen_toks is None else f"={settings.max_gen_toks}"
        say(
            f"{asked.name}: {cut_off} of {len(result.samples)} answers ran out of"
            f" eval.max_gen_toks{limit} and were scored unfinished. Either the model does not stop,"
            " or it needs more tokens."
        )
    return result


def score_answer(lm: Answering, asked: Asked, settings: Eval, number: int) -> TaskResult:
    """Score the sampled answers with this number, like the inner half of simple_evaluate.

    The outer half of this function of the harness reseeds the global generators and calls pip and
    git, which takes ten times as long as scoring a small task.
    """
    spec = asked.spec
    prepare(asked.task, spec, settings, number)
    output = _harness_scores(lm, asked, settings)
    records = output["samples"][asked.name]
    for record in records:
        for name in ("target", *record["metrics"]):
            record[name] = plain(record[name])
    _, primary_filter = spec.primary
    samples = []
    hashes = ""
    for record in records:
        hashes += record["doc_hash"] + record["prompt_hash"] + record["target_hash"]
        if record["filter"] != primary_filter:
            continue
        stored = asked.answers.look_up(("generate_until", *record["arguments"][0]))
        text, cut_off = stored or ("", None)
        sample = sample_of(spec, record, cut_off)
        thoughts, _ = split_thoughts(text, settings.think_end)
        if thoughts is not None:
            sample["thinking"] = thoughts
        samples.append(sample)
    return TaskResult(
        rows=rows_of(spec, output["results"][asked.name], records),
        samples=samples,
        task_hash=hash_string(hashes),  # as in the harness' command line
        version=output["versions"].get(asked.name),
    )


def _harness_scores(lm: Answering, asked: Asked, settings: Eval) -> Any:
    """Return the output of the harness' `evaluate` for one task.

    Raises:
        PipelineError: The filters and metrics take too long, or a metric does not fit the task.
    """
    too_slow = (
        f"{asked.name}: its filters and metrics take more than {SCORING_SECONDS} seconds. Simplify"
        " their patterns"
    )
    try:
        with time_limit(SCORING_SECONDS, too_slow):
            return evaluate(
                lm=Answered(lm, asked.answers),
                task_dict={"tasks": {asked.name: asked.task}},
                samples={asked.name: asked.rows},
                bootstrap_iters=0,
                log_samples=True,
                **prompt_settings(settings),
            )
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        if isinstance(error, PipelineError) or not asked.spec.benchmark.of_harness:
            raise
        raise PipelineError(
            f"{asked.name}: its answers cannot be scored ({plain_line(error)}). Correct metric_list"
            " in the task file. The answers are stored."
        ) from error


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays in a task's result to Python's numbers and lists."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value


def set_sharing(lm: Answering, spec: TaskSpec, settings: Eval) -> None:
    """Let prompts share their exemplars, and the options of a choice between texts their question.

    Options that are letters are not compared as texts, so they share only exemplars.
    """
    benchmark = spec.benchmark
    shows_letters = benchmark.letters and settings.options == "letters"
    shares_question = benchmark.kind == "choice" and not shows_letters
    lm.share_prefix = settings.share_prefix and (spec.num_fewshot > 0 or shares_question)


def rounding_settings(settings: Eval) -> dict[str, Any]:
    """Return the settings that decide how intermediate values are rounded.

    They change answers only below float32. In float32 the result is empty.
    """
    if not below_float32(settings):
        return {}
    rows = settings.batch_size
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    else:
        processor = f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"
        rows = rows or ROWS
    return {USED: rows, "share_prefix": settings.share_prefix, "processor": processor}
