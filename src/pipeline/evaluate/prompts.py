"""Tasks and requests of the evaluation harness, and the lengths of the requests."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from datasets.exceptions import DatasetGenerationError
from lm_eval.api import task as harness_task
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.config.evaluation import Eval, is_sampled
from pipeline.config.harness_tasks import included_folder
from pipeline.errors import PipelineError, first_line, suggest
from pipeline.evaluate.model import DRAW
from pipeline.evaluate.tasks import data_sets
from pipeline.evaluate.templates import RefusedTemplate, loaded
from pipeline.hub import reach
from pipeline.hub.lock import Lock, unusable_cache
from pipeline.text import one_line, printable

FEWSHOT_SEED = 1234  # the default of the harness' simple_evaluate


@contextlib.contextmanager
def harness_tamed() -> Iterator[None]:
    """Undo the harness' side effects.

    Looking up a task's name changes the state of Python's random numbers. Building a task's prompts
    shows a progress bar, although it takes no time. Warnings say that a model in memory has no
    name.
    """
    state = random.getstate()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    without_bar = functools.partial(harness_task.tqdm, disable=True)
    try:
        with reach.replaced(harness_task, "tqdm", without_bar):
            yield
    finally:
        logger.setLevel(level)
        random.setstate(state)


@harness_tamed()
def load_tasks(specs: Sequence[TaskSpec], lock: Lock) -> list[Task]:
    """Load the harness' task objects with their data, in the order of `specs`.

    Data sets on the Hub have their locked revisions.

    Raises:
        PipelineError: Data can be read neither from the Hub, which is asked once, nor from its
            cache. Or there are too few rows, or a user's task file misreads them.
    """
    manager = TaskManager(include_defaults=False)
    refusal_of_set = functools.cache(reach.refusal_of_set)
    tasks: list[Task] = []
    loaded[:] = [spec.file for spec in specs]
    for spec in specs:
        sets = dict.fromkeys(repository for repository, _, _ in data_sets(spec))
        refusals = []
        for repository in sets:
            refusal = refusal_of_set(repository)
            if refusal:
                refusals.append(f"{repository}: {first_line(refusal)}")
        offline = reach.force_offline() if refusals else nullcontext()
        try:
            with reach.at_locked_revisions(lock), offline:
                tasks += manager.load([str(spec.file)])["tasks"].values()
        except RefusedTemplate:
            raise
        except Exception as error:  # datasets raises whatever its readers and the network raise
            raise _unreadable(spec, error, bool(sets), refusals) from error
        _refuse_too_few_rows(spec, tasks[-1])
        if included_folder(spec.part or spec.task):
            _refuse_wrong_task(spec, tasks[-1])
    return tasks


def _unreadable(
    spec: TaskSpec, error: Exception, on_hub: bool, refusals: Sequence[str]
) -> PipelineError:
    """Return the error of a task whose data cannot be read.

    Args:
        spec: The task.
        error: The error of the reader.
        on_hub: Whether the data is on the Hub.
        refusals: The Hub's errors for the task's data sets.
    """
    cause: BaseException = error
    if isinstance(error, DatasetGenerationError) and error.__cause__:
        cause = error.__cause__
    if isinstance(cause, OSError):
        cache_problem = unusable_cache()
        if cache_problem:
            return PipelineError(cache_problem)
    problem = first_line(cause)
    if refusals and not isinstance(cause, PipelineError):
        problem = f"{refusals[0]}; its cache here has none"
    remedy = "Correct its task file, or its rows below data_root"
    if on_hub:
        remedy = (
            "Run stage=prefetch on a node that reaches the Hub, log in if the set is gated, or set"
            " data_root to a folder that has it"
        )
    return PipelineError(f"The data of {spec.name} cannot be read ({problem}). {remedy}.")


def _refuse_wrong_task(spec: TaskSpec, task: Any) -> None:
    """Raise PipelineError if a user's task file names a missing column, metric or target.

    The harness takes the name of a missing column as text. It counts every answer as wrong if the
    target is not among the choices, with only a warning.
    """
    of_choices = task.OUTPUT_TYPE == "multiple_choice"
    for key in ["doc_to_text"] if of_choices else ["doc_to_text", "doc_to_target"]:
        column = getattr(task.config, key)
        if isinstance(column, str) and column.isidentifier() and column not in task.features:
            raise PipelineError(
                f"{spec.name}: {key}={column}, but the rows have no column {column}"
                f" ({suggest(column, task.features)}). Correct its task file in eval.include_path,"
                " or its rows."
            )
    if callable(task.config.process_results):
        return
    for metric, function in task._metric_fn_list.items():
        if function is None:  # not found, which the harness only logs
            raise PipelineError(
                f"{spec.name}: the metric {metric} does not exist. Correct metric_list in its task"
                " file in eval.include_path."
            )
    if of_choices:
        _refuse_wrong_targets(spec, task)


def _refuse_wrong_targets(spec: TaskSpec, task: Any) -> None:
    target_of = task.doc_to_text if task.multiple_input else task.doc_to_target
    for number, row in enumerate(task.eval_docs, start=1):
        choices = task.doc_to_choice(row)
        targets = target_of(row)
        for target in targets if isinstance(targets, list) else [targets]:
            allowed = choices if isinstance(target, str) else range(len(choices))
            if target not in allowed:
                raise PipelineError(
                    f"{spec.name}: the target of row {number}, {target!r}, is not among its"
                    f" {len(choices)} choices (the first is 0). Correct its task file in"
                    " eval.include_path, or its rows."
                )


def _refuse_too_few_rows(spec: TaskSpec, task: Any) -> None:
    """Raise PipelineError for a task without questions or with too few exemplars."""
    if spec.num_fewshot:
        by_subject = getattr(task, "exemplars", {"": list(task.fewshot_docs())})
        scarcest = min(by_subject, key=lambda subject: len(by_subject[subject]))
        fewest = len(by_subject[scarcest])
        if fewest < spec.num_fewshot:
            of_subject = f" of {scarcest}" if scarcest else ""
            raise PipelineError(
                f"{spec.name}: num_fewshot={spec.num_fewshot}, but there are {fewest} exemplars"
                f"{of_subject}. Set num_fewshot to at most {fewest}."
            )
    if len(task.eval_docs) <= spec.first:
        raise PipelineError(
            f"{spec.name} has no questions besides its {spec.first} exemplars. Leave the task out,"
            " or set data_root to a folder that has its rows."
        )


def rows_asked(spec: TaskSpec, task: Task, settings: Eval) -> range:
    """Return the rows to score: the rows of the first eval.limit questions.

    The result is a range, not a list, because the harness tests `row in rows` for each row.
    """
    rows = range(spec.first, len(task.eval_docs))
    column = spec.benchmark.question_column
    if settings.limit is None or not column:
        return rows[: settings.limit]
    questions = set()
    for row in rows:
        questions.add(task.eval_docs[row][column])
        if len(questions) > settings.limit:
            return range(spec.first, row)
    return rows


def build_requests(
    lm: Any, spec: TaskSpec, task: Any, rows: Sequence[int], settings: Eval
) -> list[Instance]:
    """Build the harness' requests for each sampled answer to each question.

    Raises:
        PipelineError: The model's chat template cannot render the prompts, or answers would differ
            each time.
    """
    templated = settings.chat_template
    how = prompt_settings(settings)
    if templated:
        how |= {"chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name}
    requests: list[Instance] = []
    for answer in range(settings.answers):
        prepare(task, spec, settings, answer)
        try:
            task.build_all_requests(samples=rows, **how)
        except Exception as error:  # a template is a program and can raise any exception
            if not templated or isinstance(error, RefusedTemplate):
                raise
            problem = f"raises on the prompts of {spec.name} ({plain_line(error)})"
            raise PipelineError(template_problem(problem)) from error
        if templated:
            refuse_empty_prompts(spec, task, lm.tokenizer)
        requests += task.instances
    for request in requests:
        if request.request_type != "generate_until":
            continue
        options = request.args[1]
        if DRAW not in options and normalize_gen_kwargs(options)["do_sample"]:
            raise PipelineError(
                f"{spec.name} samples its answers without a seed (do_sample in its task file), so"
                " they would differ each time. Set eval.temperature, or leave the task out."
            )
    return requests


def refuse_empty_prompts(spec: TaskSpec, task: Any, tokenizer: Any) -> None:
    """Raise PipelineError if a chat template renders all prompts of a question empty.

    A single empty prompt is allowed: acc_mutual_info has one for each option.
    """
    by_question: dict[int, list[Instance]] = {}
    for request in task.instances:
        by_question.setdefault(request.doc_id, []).append(request)
    for requests in by_question.values():
        is_written = any(without_marks(request.args[0], tokenizer) for request in requests)
        if not is_written and str(task.doc_to_text(requests[0].doc)).strip():
            problem = f"renders an empty prompt for a question of {spec.name}"
            raise PipelineError(template_problem(problem))


def prepare(task: Any, spec: TaskSpec, settings: Eval, answer: int) -> None:
    """Set a task's options for the sampled answer of this number.

    Exemplars are drawn with the seed of the harness' command line.
    """
    if is_sampled(settings):
        draw = {
            "do_sample": True,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            DRAW: f"{settings.sample_seed} {answer}",
        }
        task.set_config("generation_kwargs", draw, update=True)
    if settings.exemplars == "random" or spec.benchmark.of_harness:
        task.set_fewshot_seed(FEWSHOT_SEED)


def prompt_settings(settings: Eval) -> dict[str, Any]:
    """Return the prompt settings under the harness' own names."""
    turns = settings.chat_template and settings.fewshot_as_multiturn
    how = {"apply_chat_template": settings.chat_template, "fewshot_as_multiturn": turns}
    return how | {"system_instruction": settings.system_instruction}


def tokens_needed(lm: Any, requests: Sequence[Instance]) -> dict[int, int]:
    """Return the tokens that each question needs with this model's tokenizer.

    They are the tokens of its longest prompt, with the longest continuation or the room for an
    answer.
    """
    room = 0
    longest: dict[tuple[int, str], str] = {}  # (question, prompt) -> the longest continuation
    for request in requests:
        if request.request_type == "loglikelihood_rolling":
            continue  # the harness scores it in windows
        prompt, after = request.args
        if request.request_type == "generate_until":
            room = normalize_gen_kwargs(after, lm.max_gen_toks)["max_gen_toks"]
            after = ""
        place = (request.doc_id, prompt)
        longest[place] = max(longest.get(place, ""), after, key=len)
    needed: dict[int, int] = {}
    for (doc_id, prompt), after in longest.items():
        tokens = len(lm.tok_encode(prompt + after)) + room
        if after:
            tokens -= 1  # the last token is only predicted
        needed[doc_id] = max(needed.get(doc_id, 0), tokens)
    return needed


def template_problem(problem: str) -> str:
    return (
        f"eval.chat_template=true, but the checkpoint's chat template {problem}. Correct the"
        " template, or set eval.chat_template=false."
    )


def plain_line(error: Exception) -> str:
    """Return an error's message in one line of at most 200 printable characters."""
    return printable(one_line(str(error)) or type(error).__name__)[:200]


def without_marks(text: str, tokenizer: Any) -> str:
    """Strip special tokens and surrounding whitespace from a text."""
    for mark in tokenizer.all_special_tokens:
        text = text.replace(mark, "")
    return text.strip()
