"""Tasks put to a model: what is not stored is computed, then the evaluation harness scores all
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
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
    model_settings,
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
from pipeline.progress import Bar, announced, say
from pipeline.runs.provenance import processor_model

SCORING_SECONDS = 1800  # of processor time for the filters and metrics of one task
USED = "batch_size"  # the number of rows, among answers that it decides


@dataclass
class Asked:
    """A task put to a model: its rows, the requests of all answers to them, the answers that are
    there, and the requests that are left.
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
    """Put each task to the model and gather the harness' scores.

    A task whose answers are all stored needs no weights.

    Raises PipelineError, with the count, if prompts do not fit; checked for all tasks before
    anything is scored.
    """
    facts = facts_of(settings)
    model_settings(lm, settings)
    with announced("tokenizing the questions"):
        asked_tasks = [ask(lm, *pair, settings, store) for pair in zip(specs, tasks, strict=True)]
    unanswered = [task for task in asked_tasks if task.left]
    for task in asked_tasks:
        stored = len(task.requests) - len(task.left)
        if stored:
            say(
                f"{task.name}: {stored} of {len(task.requests)} answers are stored from an earlier"
                " evaluation"
            )
    if unanswered:
        say_if_rounded(settings)
        questions = settings.answers * sum(len(task.rows) for task in unanswered)
        with Bar(", ".join(task.name for task in unanswered), questions, "question") as bar:
            for task in unanswered:
                compute(lm, task, settings, bar)
    results = {task.name: score(lm, task, settings) for task in asked_tasks}
    packages = ("lm_eval", "transformers", "torch", "datasets", "sacrebleu")
    harness = {
        "packages": {package: version(package) for package in packages},
        "versions": {name: result.version for name, result in results.items()},
        "task_hashes": {name: result.task_hash for name, result in results.items()},
        **facts,
        "share_prefix": settings.share_prefix and not lm.unshared,
        "found_again": [task.name for task in asked_tasks if not task.left],
        **rows_used(asked_tasks, settings),
    }
    rows = []
    for result in results.values():
        for row in result.rows:
            rows.append(row)
    return EvaluationResult(
        rows, {name: result.samples for name, result in results.items()}, harness
    )


def facts_of(settings: Eval) -> dict[str, Any]:
    """How an evaluation is scored, as scores.json has it."""
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
    """Return what decides an answer besides the model and the request."""
    decides = {"backend": settings.backend, "dtype": settings.dtype} | rounding_settings(settings)
    if settings.products != "ieee":
        decides["products"] = settings.products
    if settings.think_end is not None:
        decides["think_end"] = settings.think_end
    return decides | ({"engine": engine} if (engine := engine_of(settings)) else {})


def rounds_together(settings: Eval) -> bool:
    """Whether an answer depends on those computed together with it: below float32, but for vLLM's
    batch invariance, which a GPU has.
    """
    invariant = torch.cuda.is_available() and engine_of(settings).get("batch_invariant") == "1"
    return below_float32(settings) and not invariant


def ask(lm: Answering, spec: TaskSpec, task: Task, settings: Eval, store: Store) -> Asked:
    """Return the requests of a task and what is stored of their answers.

    Where an answer depends on those computed together with it, all are stored or none.

    Raises: PipelineError: prompts do not fit the model. What is stored did.
    """
    rows = rows_asked(spec, task, settings)
    requests = build_requests(lm, spec, task, rows, settings)
    together = None
    if rounds_together(settings):
        together = digest([key_of(request) for request in requests])
    answers = store.answers(spec.name, decided_by(settings), together)
    unanswered = []
    for request in requests:
        if answers.look_up(key_of(request)) is None:
            unanswered.append(request)
    if unanswered and answers.together:
        answers.found, unanswered = {}, requests
    if unanswered:
        refuse_too_long(spec.name, tokens_needed(lm, requests), lm.max_length)
    answers.wanted = {digest(key_of(request)) for request in unanswered}
    return Asked(spec, task, rows, requests, answers, unanswered)


def key_of(request: Instance) -> tuple[Any, ...]:
    return (request.request_type, *request.args)


def compute(lm: Answering, asked: Asked, settings: Eval, bar: Bar) -> None:
    """Answer the requests of a task that are not stored, each kind together.

    The model reports each answer when it ends.
    """
    set_sharing(lm, asked.spec, settings)
    questions_a_request = settings.answers * len(asked.rows) / len(asked.left)

    def ended(kind: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if asked.answers.add(digest((kind, *arguments)), answer):
            bar.update(questions_a_request)

    lm.ended = ended
    for kind in dict.fromkeys(request.request_type for request in asked.left):
        getattr(lm, kind)(
            [request for request in asked.left if request.request_type == kind], disable_tqdm=True
        )
    asked.answers.found[USED] = lm.batch_size
    if asked.answers.together and not lm.engine.halved:
        asked.answers.write(asked.answers.found.items())
    asked.answers.close()


class Answered(LM):
    """Gives the harness the answers that are there."""

    def __init__(self, lm: Answering, answers: Answers, think_end: str | None) -> None:
        super().__init__()
        self.lm, self.answers, self.think_end = lm, answers, think_end

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
        return [split_thoughts(text, self.think_end)[1] for text, _ in self.stored(requests)]


def score(lm: Answering, asked: Asked, settings: Eval) -> TaskResult:
    """Score the answers of a task by the harness, each of several to a question by itself."""
    scored = [score_answer(lm, asked, settings, number) for number in range(settings.answers)]
    if len(scored) > 1:
        result = join_answers(asked.spec, scored)
    else:
        result = scored[0]
    result = replace(result, rows=[*result.rows, *share_rows(asked.spec, result.samples)])
    cut_off = sum(bool(sample.get("cut_off")) for sample in result.samples)
    if asked.left and cut_off > len(result.samples) / 2:
        if settings.max_gen_toks is None:
            limit = ""
        else:
            limit = f"={settings.max_gen_toks}"
        say(
            f"{asked.name}: {cut_off} of {len(result.samples)} answers ran out of"
            f" eval.max_gen_toks{limit}"
            " and were scored as they stood: the model does not stop, or needs more"
        )
    return result


def score_answer(lm: Answering, asked: Asked, settings: Eval, number: int) -> TaskResult:
    """Score the answers of this number, as the inner half of the harness' simple_evaluate does.

    The outer half reseeds the global generators and asks pip and git about the machine, which takes
    ten times as long as scoring a small task.
    """
    spec, put = asked.spec, Answered(lm, asked.answers, settings.think_end)
    prepare(asked.task, spec, settings, number)
    message = (
        f"{asked.name}: its filters and metrics take more than {SCORING_SECONDS} seconds. Simplify"
        " their patterns"
    )
    try:
        with time_limit(SCORING_SECONDS, message):
            output: Any = evaluate(
                lm=put,
                task_dict={"tasks": {asked.name: asked.task}},
                samples={asked.name: asked.rows},
                bootstrap_iters=0,
                log_samples=True,
                **prompt_settings(settings),
            )
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
    ) as error:  # of a metric that does not fit the task
        if isinstance(error, PipelineError) or not spec.benchmark.of_harness:
            raise
        raise PipelineError(
            f"{spec.name}: its answers cannot be scored ({plain_line(error)}). Correct metric_list"
            " in the task file; the answers are stored."
        ) from error
    records = [
        {**record, **{name: plain(record[name]) for name in ("target", *record["metrics"])}}
        for record in output["samples"][asked.name]
    ]
    _, chief = spec.primary
    samples = []
    for record in records:
        if record["filter"] == chief:
            text, cut_off = asked.answers.look_up(("generate_until", *record["arguments"][0])) or (
                "",
                None,
            )
            thoughts, _ = split_thoughts(text, settings.think_end)
            samples.append(
                sample_of(spec, record, cut_off)
                | ({} if thoughts is None else {"thinking": thoughts})
            )
    return TaskResult(
        rows=rows_of(spec, output["results"][asked.name], records),
        samples=samples,
        task_hash=hash_string(  # as the harness' command line makes it
            "".join(
                record["doc_hash"] + record["prompt_hash"] + record["target_hash"]
                for record in records
            )
        ),
        version=output["versions"].get(asked.name),
    )


def plain(value: Any) -> Any:
    """Return what a task's function gave with NumPy's numbers and arrays as Python's numbers and
    lists.
    """
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value


def set_sharing(lm: Answering, spec: TaskSpec, settings: Eval) -> None:
    """Prompts share their exemplars, choices by text their question."""
    benchmark = spec.benchmark
    texts = benchmark.kind == "choice" and not (benchmark.letters and settings.options == "letters")
    lm.share_prefix = settings.share_prefix and (spec.num_fewshot > 0 or texts)


def rounding_settings(settings: Eval) -> dict[str, Any]:
    """Return what decides how intermediate values are rounded, and so the answers below float32;
    empty in float32.
    """
    if not below_float32(settings):
        return {}
    on_gpu = torch.cuda.is_available()
    how: dict[str, Any] = {}
    if rounds_together(settings):
        how[USED] = settings.batch_size or (None if on_gpu else ROWS)
    how["share_prefix"] = settings.share_prefix
    cpu = f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"
    return how | {"processor": torch.cuda.get_device_name() if on_gpu else cpu}


def say_if_rounded(settings: Eval) -> None:
    """Say below float32 what else decides the answers than the model."""
    if rounds_together(settings):
        say(
            f"eval.dtype={settings.dtype}: answers depend on eval.batch_size, eval.share_prefix and"
            " the processor; in eval.dtype=float32 they do not"
        )


def rows_used(asked: Sequence[Asked], settings: Eval) -> dict[str, Any]:
    """Return the numbers of rows that answers were computed in, also of stored ones where the
    number decides them.
    """
    default_rows = None
    if rounds_together(settings):
        default_rows = settings.batch_size
    used = sorted(filter(None, {task.answers.found.get(USED, default_rows) for task in asked}))
    if used:
        return {USED: used if len(used) > 1 else used[0]}
    return {}
