"""Questions as the evaluation harness puts them: its tasks read, their requests built, and the
lengths of these.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetGenerationError
from lm_eval.api import task as harness_task
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.config.evaluation import Eval, is_sampled
from pipeline.errors import PipelineError, first_line, suggest
from pipeline.evaluate.decode import can_decode
from pipeline.evaluate.model import DRAW, open_model
from pipeline.evaluate.tasks import data_sets
from pipeline.evaluate.templates import RefusedTemplate, remember_places
from pipeline.hub import reach
from pipeline.hub.lock import Lock, unusable_cache
from pipeline.models.load import date_of_templates
from pipeline.progress import say
from pipeline.text import one_line

FEWSHOT_SEED = 1234  # of simple_evaluate


@contextlib.contextmanager
def harness_tamed() -> Iterator[None]:
    """Habits of the harness: each look at a task's name draws from Python's random numbers; a bar
    for each task's prompts, done in no time, and warnings that a model in memory is not a model's
    name.
    """
    state, logger = random.getstate(), logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with reach.replaced(
            harness_task, "tqdm", functools.partial(harness_task.tqdm, disable=True)
        ):
            yield
    finally:
        logger.setLevel(level)
        random.setstate(state)


@harness_tamed()
def load_tasks(specs: Sequence[TaskSpec], lock: Lock) -> list[Task]:
    """Load the harness' task objects with their data, those of the Hub at their locked revisions,
    in the order of `specs`.

    Raises: PipelineError: data cannot be read, neither from the Hub, which is asked once, nor from
    its cache.
    """
    manager, refusal_of_set = (
        TaskManager(include_defaults=False),
        functools.cache(reach.refusal_of_set),
    )
    tasks: list[Task] = []
    for spec in specs:
        benchmark, name = spec.benchmark, spec.part or spec.task
        sets = dict.fromkeys(repository for repository, _, _ in data_sets(spec))
        kept_from = []
        for one in sets:
            error = refusal_of_set(one)
            if error:
                kept_from.append(f"{one}: {first_line(error)}")
        remember_places(spec.file)
        try:
            with (
                reach.at_locked_revisions(lock),
                reach.force_offline() if kept_from else nullcontext(),
            ):
                tasks += manager.load([str(spec.file)])["tasks"].values()
        except RefusedTemplate:
            raise
        except Exception as error:  # datasets raises whatever its readers and the network raise
            remedy = "write its files below data_root again"
            if sets:
                remedy = (
                    "run stage=prefetch on a node that reaches the Hub, or set data_root to a"
                    " folder that has it"
                )
            if sets and benchmark.gated:
                remedy = (
                    f"accept the conditions of {benchmark.gated} on the Hub and log in, {remedy}"
                )
            elif benchmark.of_harness and kept_from:
                remedy += f" as harness/{name}/SPLIT.jsonl"
            elif spec.own_folder:
                remedy = "correct its task file in eval.include_path, or the rows that it names"
            elif benchmark.of_harness:
                remedy = f"give its rows the columns that the harness' {spec.task} reads"
            if isinstance(error, DatasetGenerationError) and error.__cause__:
                cause = error.__cause__
            else:
                cause = error
            if isinstance(cause, OSError):
                reason = unusable_cache()
                if reason:
                    raise PipelineError(reason) from error
            not_there = kept_from and not isinstance(cause, PipelineError)
            if not_there:
                problem = f"{kept_from[0]}; its cache here has none"
            else:
                problem = first_line(cause)
            raise PipelineError(
                f"the data of {spec.name} cannot be read ({problem}): {remedy}"
            ) from error
        _refuse_too_few_rows(spec, tasks[-1])
        if spec.own_folder:
            _refuse_misread_rows(spec, tasks[-1])
    return tasks


def _refuse_misread_rows(spec: TaskSpec, task: Any) -> None:
    """Raise PipelineError for a task file of one's own that reads no column, or a target that is
    none of the choices: the harness takes the key itself as text, and counts every answer as wrong,
    with a warning.
    """
    remedy = "correct its task file in eval.include_path, or its rows"
    of_choices = task.OUTPUT_TYPE == "multiple_choice"
    for key in ("doc_to_text",) if of_choices else ("doc_to_text", "doc_to_target"):
        column = getattr(task.config, key)
        if isinstance(column, str) and column.isidentifier() and column not in task.features:
            raise PipelineError(
                f"{spec.name}: {key}={column} is no column of its rows,"
                f" {suggest(column, task.features)} {remedy}"
            )
    if not of_choices or callable(task.config.process_results):
        return
    if task.multiple_input:
        target_of = task.doc_to_text
    else:
        target_of = task.doc_to_target
    for number, row in enumerate(task.eval_docs, start=1):
        choices, targets = task.doc_to_choice(row), target_of(row)
        for target in targets if isinstance(targets, list) else [targets]:
            if target not in (choices if isinstance(target, str) else range(len(choices))):
                raise PipelineError(
                    f"{spec.name}: the target of row {number}, {target!r}, is none of its"
                    f" {len(choices)} choices (the first is 0): {remedy}"
                )


def _refuse_too_few_rows(spec: TaskSpec, task: Any) -> None:
    """Raise PipelineError for a data set of the Hub without questions, or with fewer exemplars than
    shots; local files are checked before.
    """
    if not len(task.eval_docs):
        raise PipelineError(
            f"{spec.name} has no questions: leave the task out, or give data_root with its rows"
        )
    if spec.num_fewshot:
        subjects = getattr(task, "exemplars", {"": list(task.fewshot_docs())})
        subject, fewest = min(
            ((name, len(docs)) for name, docs in subjects.items()), key=lambda counted: counted[1]
        )
        if fewest < spec.num_fewshot:
            raise PipelineError(
                f"{spec.name}: num_fewshot={spec.num_fewshot}, but there are {fewest} exemplars"
                + (f" of {subject}" if subject else "")
                + f": ask for at most {fewest}"
            )


def rows_asked(spec: TaskSpec, task: Task, settings: Eval) -> range:
    """Return the rows to score: those of the first eval.limit questions.

    It is a range, not a list: the harness asks `row in rows` for each row.
    """
    rows, column = range(spec.first, len(task.eval_docs)), spec.benchmark.question_column
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
    """Build what the harness will ask for, of each sampled answer to each question.

    Raises: PipelineError: the model's chat template cannot render the prompts, or answers would
    differ each time.
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
        except Exception as error:  # a template is a program, and raises what it likes
            if not templated or isinstance(error, RefusedTemplate):
                raise
            problem = f"raises on the prompts of {spec.name} ({plain_line(error)})"
            raise PipelineError(template_problem(problem)) from error
        if templated:
            refuse_empty_prompts(spec, task, lm.tokenizer)
        requests += task.instances
    kwargs = []
    for request in requests:
        if request.request_type == "generate_until":
            kwargs.append(request.args[1])
    if any(
        DRAW not in options and normalize_gen_kwargs(options)["do_sample"] for options in kwargs
    ):
        raise PipelineError(
            f"{spec.name} draws its answers by itself (do_sample in its task file), others each"
            " time: give eval.temperature, or leave the task out"
        )
    return requests


def refuse_empty_prompts(spec: TaskSpec, task: Any, tokenizer: Any) -> None:
    """Raise PipelineError for a question of which a chat template leaves every prompt empty:
    acc_mutual_info has an empty one for each option besides the question's own.
    """
    written = set()
    for request in task.instances:
        if without_marks(request.args[0], tokenizer):
            written.add(request.doc_id)
    for request in task.instances:
        if request.doc_id not in written and str(task.doc_to_text(request.doc)).strip():
            raise PipelineError(
                template_problem(f"renders an empty prompt for a question of {spec.name}")
            )


def prepare(task: Any, spec: TaskSpec, settings: Eval, answer: int) -> None:
    """Set what the requests of the sampled answer of this number differ in; draw exemplars as the
    harness' command line does.
    """
    if is_sampled(settings):
        draw = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            DRAW: f"{settings.sample_seed} {answer}",
        }
        task.set_config("generation_kwargs", {"do_sample": True, **draw}, update=True)
    if settings.exemplars == "random" or spec.benchmark.of_harness:
        task.set_fewshot_seed(FEWSHOT_SEED)


def prompt_settings(settings: Eval) -> dict[str, Any]:
    """Return what the harness makes prompts with, in its names."""
    turns = settings.chat_template and settings.fewshot_as_multiturn
    how = {"apply_chat_template": settings.chat_template, "fewshot_as_multiturn": turns}
    return how | {"system_instruction": settings.system_instruction}


def model_settings(lm: Any, settings: Eval) -> None:
    """Give a model the settings that its prompts and answers depend on: the variables of its chat
    template, with the date of eval.template_date as today's, and the end of its thoughts.
    """
    lm.chat_template_args = date_of_templates(settings.template_date) | settings.chat_template_args
    lm.think_end = settings.think_end


def tokens_needed(lm: Any, requests: Sequence[Instance]) -> dict[int, int]:
    """Question -> the tokens of its longest prompt as this model's tokenizer cuts it, with the
    longest of what is asked after it, or the room for an answer.
    """
    room = 0
    put: dict[
        tuple[int, str], str
    ] = {}  # a question's prompt -> the longest of what is asked after it
    for request in requests:
        if request.request_type == "loglikelihood_rolling":
            continue  # the harness scores it in windows
        prompt, after = request.args
        if request.request_type == "generate_until":
            room, after = normalize_gen_kwargs(after, lm.max_gen_toks)["max_gen_toks"], ""
        put[request.doc_id, prompt] = max(put.get((request.doc_id, prompt), ""), after, key=len)
    needed: dict[int, int] = {}
    for (doc_id, prompt), after in put.items():
        tokens = len(lm.tok_encode(prompt + after)) - bool(
            after
        )  # the last token is only predicted
        needed[doc_id] = max(needed.get(doc_id, 0), tokens + room)
    return needed


def measured(
    spec: TaskSpec, folder: Path, settings: Eval, lock: Lock
) -> tuple[dict[int, int], int]:
    """(`tokens_needed`, tokens that the model takes) of one task and the model in `folder`, whose
    weights are not read.

    Raises:
        PipelineError: its data cannot be read, or the model's files are not those of its
            config.json.
    """
    with contextlib.redirect_stdout(sys.stderr), harness_tamed():
        (task,) = load_tasks([spec], lock)
        lm = open_model(folder)
        model_settings(lm, settings)
        rows = rows_asked(spec, task, settings)
        requests = build_requests(lm, spec, task, rows, settings)
        if task.OUTPUT_TYPE == "generate_until" and not can_decode(lm.model):
            say(
                f"{spec.name}: {folder.name} answers by transformers' generate, which takes longer:"
                " its layers or its generation_config.json do not allow other batches"
            )
        return tokens_needed(lm, requests), lm.max_length


def template_problem(problem: str) -> str:
    return (
        f"eval.chat_template=true, but the checkpoint's chat template {problem}: correct it, or"
        " leave it off"
    )


def plain_line(error: Exception) -> str:
    """Return what an error says, in one line of at most 200 printable characters."""
    text = one_line(str(error)) or type(error).__name__
    return "".join(letter for letter in text if letter.isprintable())[:200]


def without_marks(text: str, tokenizer: Any) -> str:
    """Return a text without special tokens and the space around it."""
    for mark in tokenizer.all_special_tokens:
        text = text.replace(mark, "")
    return text.strip()
