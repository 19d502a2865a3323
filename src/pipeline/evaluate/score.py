"""Tasks put to a model by the evaluation harness: its tasks read, its prompts measured, its scores gathered."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from numbers import Real
from typing import Any

import torch
from datasets.exceptions import DatasetGenerationError
from lm_eval import evaluate
from lm_eval.api import task as harness_task
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import env as templates
from lm_eval.utils import hash_string

from pipeline.benchmarks import benchmark_of, primary_metric
from pipeline.benchmarks.task_files import Definition
from pipeline.config.evaluation import Eval, below_float32, is_sampled
from pipeline.config.harness_tasks import included_folder
from pipeline.errors import PipelineError, first_line
from pipeline.evaluate import score_cache
from pipeline.evaluate.before import Lengths, too_long, vllm_versions
from pipeline.evaluate.model import DRAW, Answering, request_key
from pipeline.evaluate.records import EvaluationResult, TaskResult, join_answers, rows_of, sample_of
from pipeline.evaluate.tasks import data_sets
from pipeline.hub import reach
from pipeline.models.load import date_of_templates
from pipeline.progress import Bar, announced, say
from pipeline.runs.provenance import processor_model

FEWSHOT_SEED = 1234  # of simple_evaluate
LONGEST_PROMPT = 10**7  # characters of a rendered prompt; no model takes as many


def load_tasks(definitions: Sequence[Definition]) -> list[Task]:
    """The harness' task objects, their data read, in the order of `definitions`.

    Raises PipelineError where data cannot be read: neither from the Hub, which is asked once, nor from its cache.
    """
    manager, why_not = TaskManager(include_defaults=False), functools.cache(reach.why_not)
    tasks: list[Task] = []
    for definition in definitions:
        sets = dict.fromkeys(name for name, _, _ in data_sets(definition))
        kept_from = [f"{name}: {reason}" for name in sets if (reason := why_not(name))]
        try:
            with harness_tamed(), reach.force_offline() if kept_from else nullcontext():
                tasks += manager.load([str(definition.file)])["tasks"].values()
        except Exception as error:  # datasets raises whatever its readers and the network raise
            remedy = "write its files below data_root again"
            if sets:
                remedy = "run stage=prefetch on a node that reaches the Hub, or set data_root to a folder that has it"
            if sets and (gated := benchmark_of(definition.task).gated):
                remedy = f"accept the conditions of {gated} on the Hub and log in, {remedy}"
            elif benchmark_of(definition.task).of_harness and kept_from:
                remedy += f" as harness/{definition.part or definition.task}/SPLIT.jsonl"
            elif included_folder(definition.part or definition.task):
                remedy = "correct its task file in eval.include_path, or the rows that it names"
            elif benchmark_of(definition.task).of_harness:
                remedy = f"give its rows the columns that the harness' {definition.task} reads"
            cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
            problem = f"{kept_from[0]}; its cache here has none" if kept_from else first_line(cause)
            raise PipelineError(f"the data of {definition.name} cannot be read ({problem}): {remedy}") from error
        _refuse_too_many_shots(definition, tasks[-1])
        if benchmark_of(definition.task).of_harness:
            _refuse_no_number(definition, tasks[-1])
    return tasks


def _refuse_no_number(definition: Definition, task: Any) -> None:
    """Raise PipelineError for a task without questions, or with a metric that is not a number: an empty answer to the
    first question is scored. What cannot be scored so is found when the answers are."""
    if not len(task.eval_docs):
        raise PipelineError(f"{definition.name} has no questions: leave the task out, or give data_root with its rows")
    doc = task.eval_docs[0]
    try:
        choices = len(task.doc_to_choice(doc)) if task.OUTPUT_TYPE == "multiple_choice" else 1
        answers = {"generate_until": [""], "loglikelihood_rolling": [-1.0]}
        scores = task.process_results(doc, answers.get(task.OUTPUT_TYPE, [(-1.0, False)] * choices))
        values = {metric: task.aggregation()[metric]([score]) for metric, score in scores.items()}
    except Exception:  # of the task's own functions, which may not take an empty answer
        return
    for metric, value in values.items():
        if not isinstance(value, Real):
            raise PipelineError(
                f"{definition.name}: its metric {metric} is {value!r}, which is not a number: leave the metric out of "
                "metric_list, or give it an aggregation that returns a number"
            )


def _refuse_too_many_shots(definition: Definition, task: Any) -> None:
    """What is checked of local files before, of the Hub's."""
    if definition.num_fewshot:
        subjects = getattr(task, "exemplars", {"": list(task.fewshot_docs())})
        subject, fewest = min(((name, len(docs)) for name, docs in subjects.items()), key=lambda one: one[1])
        if fewest < definition.num_fewshot:
            raise PipelineError(
                f"{definition.name}: num_fewshot={definition.num_fewshot}, but there are {fewest} exemplars"
                + (f" of {subject}" if subject else "")
                + f": ask for at most {fewest}"
            )


def score_tasks(
    load: Callable[[], LM],
    definitions: Sequence[Definition],
    tasks: Sequence[Task],
    settings_asked: Eval,
    cache: score_cache.Kept | None = None,
) -> EvaluationResult:
    """Put each task to the model of `load()` and gather the harness' scores; what is kept already is taken as it is.

    Raises PipelineError, with the count, if prompts do not fit; checked for all tasks before anything is scored.
    """
    settings: dict[str, Any] = {
        "backend": settings_asked.backend,
        "chat_template": settings_asked.chat_template,
        "dtype": settings_asked.dtype,
    }
    settings |= rounding_settings(settings_asked) | (
        {"template_date": settings_asked.template_date} if settings_asked.chat_template else {}
    )
    if is_sampled(settings_asked):
        sampling = ("temperature", "top_p", "answers", "sample_seed")
        settings["sampling"] = {name: getattr(settings_asked, name) for name in sampling}
    for name in ("think_end", "system_instruction"):
        if getattr(settings_asked, name) is not None:
            settings[name] = getattr(settings_asked, name)
    if settings_asked.chat_template and not settings_asked.fewshot_as_multiturn:
        settings["fewshot_as_multiturn"] = False
    if settings_asked.backend == "vllm":
        settings["engine"] = vllm_versions(settings_asked.vllm_python, settings_asked.vllm_suffix)
    put = list(zip(definitions, tasks, strict=True))
    rows_of_task = {definition.name: rows_asked(definition, task, settings_asked) for definition, task in put}
    keys: dict[str, score_cache.Key] = {}
    results: dict[str, TaskResult] = {}
    if cache:
        for definition, task in put:
            asks = score_cache.task_key(definition, task, rows_of_task[definition.name])
            keys[definition.name] = score_cache.whole_key(cache.model, asks, settings, cache.version)
            again = cache.look_up(keys[definition.name])
            if again and again.too_long <= settings_asked.too_long:
                results[definition.name] = again
                say(f"{definition.name}: found again, scored before on these weights")
    found_again = list(results)
    unscored = [(definition, task) for definition, task in put if definition.name not in results]
    if unscored:
        say_if_rounded(settings_asked)
    with harness_tamed():
        with announced(f"{', '.join(definition.name for definition, _ in unscored)}: loading the model"):
            lm = load() if unscored else None
        if lm and settings_asked.chat_template:
            set_template_date(lm, settings_asked)
        with announced("tokenizing the questions"):
            fitting = {
                d.name: _fitting_rows(lm, d, task, rows_of_task[d.name], settings_asked) for d, task in unscored if lm
            }
        asked = settings_asked.answers * sum(map(len, fitting.values()))
        with Bar(", ".join(fitting), asked, "question") if unscored else nullcontext() as bar:
            for definition, task in unscored:
                assert lm
                put_now = fitting[definition.name]
                if isinstance(lm, Answering):  # below float32, an answer depends on those computed together with it
                    apart = cache and not below_float32(settings_asked)
                    lm.kept = cache.answers(definition.name, settings) if cache and apart else None
                bar_before = bar.done if bar else 0
                if isinstance(lm, Answering):
                    set_sharing(lm, definition, settings_asked)
                    lm.bar = bar
                    if settings_asked.answers > 1:
                        lm.answer_ahead(requests_of_all_answers(lm, definition, task, put_now, settings_asked))
                numbers = range(settings_asked.answers)
                scored = [score_one(lm, definition, task, put_now, settings_asked, number) for number in numbers]
                if bar:
                    bar.to(bar_before + len(numbers) * len(put_now))
                result = join_answers(definition, scored) if len(scored) > 1 else scored[0]
                result = replace(result, too_long=len(rows_of_task[definition.name]) - len(put_now))
                results[definition.name] = result
                _report_endless_answers(definition, result, settings_asked)
                if cache and not (below_float32(settings_asked) and was_halved(lm, settings_asked)):
                    cache.keep(keys[definition.name], result)
    packages = ("lm_eval", "transformers", "torch", "datasets", "sacrebleu")
    names = [definition.name for definition in definitions]
    harness = {
        "packages": {package: version(package) for package in packages},
        "versions": {name: results[name].version for name in names},
        "task_hashes": {name: results[name].task_hash for name in names},
        **settings,
        "share_prefix": settings_asked.share_prefix and not (isinstance(lm, Answering) and lm.unshared),
        "found_again": found_again,
        **(
            {"halved_batch_size": lm.batch_size} if isinstance(lm, Answering) and was_halved(lm, settings_asked) else {}
        ),
        "too_long": {name: results[name].too_long for name in names if results[name].too_long},
    }
    rows = [row for name in names for row in results[name].rows]
    return EvaluationResult(rows, {name: results[name].samples for name in names}, harness)


def rounding_settings(settings: Eval) -> dict[str, Any]:
    """What decides how intermediate values are rounded, and so the answers below float32; empty in float32."""
    if not below_float32(settings):
        return {}
    shared = {"batch_size": settings.batch_size, "share_prefix": settings.share_prefix}
    shared |= {"suffix": True} if settings.vllm_suffix else {}
    if torch.cuda.is_available():
        return shared | {"processor": torch.cuda.get_device_name()}
    return shared | {"processor": f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"}


def say_if_rounded(settings: Eval) -> None:
    """Say below float32 what else decides the answers than the model."""
    if below_float32(settings):
        say(
            f"eval.dtype={settings.dtype}: answers depend on eval.batch_size, eval.share_prefix and the processor; "
            "in eval.dtype=float32 they do not"
        )


def was_halved(lm: LM | None, settings: Eval) -> bool:
    """Whether memory ran out, so that another batch size was used than eval.batch_size."""
    return isinstance(lm, Answering) and lm.batch_size < settings.batch_size


def _report_endless_answers(definition: Definition, result: TaskResult, settings: Eval) -> None:
    cut_off = sum(bool(sample.get("cut_off")) for sample in result.samples)
    if cut_off > len(result.samples) / 2:
        say(
            f"{definition.name}: {cut_off} of {len(result.samples)} answers ran out of eval.max_gen_toks"
            f"{'' if settings.max_gen_toks is None else f'={settings.max_gen_toks}'} and were scored as they stood: "
            "the model does not stop, or needs more"
        )


def rows_asked(definition: Definition, task: Task, settings: Eval) -> range:
    """The rows to score: those of the first eval.limit questions. A range, not a list: the harness asks `row in rows`
    for each row."""
    end, column = len(task.eval_docs), benchmark_of(definition.task).question_column
    if settings.limit is None:
        return range(definition.first, end)
    if not column:
        return range(definition.first, min(end, definition.first + settings.limit))
    questions: dict[Any, None] = {}
    for row in range(definition.first, end):
        questions[task.eval_docs[row][column]] = None
        if len(questions) > settings.limit:
            return range(definition.first, row)
    return range(definition.first, end)


def score_one(
    lm: LM, definition: Definition, task: Task, rows: Sequence[int], settings: Eval, answer: int = 0
) -> TaskResult:
    """One task put to a model: the inner half of the harness' simple_evaluate. `answer`: the number of the sampled
    answer to each question.

    The outer half reseeds the global generators and asks pip and git about the machine, which takes ten times as long
    as scoring a small task does.
    """
    set_draw(task, settings, answer)
    put: Any = {"tasks": {definition.name: task}}
    samples: Any = {definition.name: rows}
    seed_exemplars(task, definition, settings)
    how: Any = prompt_settings(settings)
    output = evaluate(lm=lm, task_dict=put, samples=samples, bootstrap_iters=0, log_samples=True, **how)
    records = output["samples"][definition.name]
    _, chief = primary_metric(definition.task)
    ran_out, thoughts = (lm.ran_out, lm.thoughts) if isinstance(lm, Answering) else ({}, {})
    task_samples = []
    for record in records:
        if record["filter"] == chief:
            key = request_key(record["arguments"][0])
            thinking = {"thinking": thoughts[key]} if key in thoughts else {}
            task_samples.append(sample_of(definition, record, ran_out.get(key)) | thinking)
    return TaskResult(
        rows=rows_of(definition, output["results"][definition.name], records, task_samples),
        samples=task_samples,
        task_hash=hash_string(  # as the harness' command line makes it
            "".join(record["doc_hash"] + record["prompt_hash"] + record["target_hash"] for record in records)
        ),
        version=output["versions"].get(definition.name),
    )


def set_sharing(lm: Answering, definition: Definition, settings: Eval) -> None:
    """Prompts share their exemplars, choices by text their question."""
    benchmark = benchmark_of(definition.task)
    texts = benchmark.kind == "choice" and not (benchmark.letters and settings.options == "letters")
    lm.share_prefix = settings.share_prefix and (definition.num_fewshot > 0 or texts)
    lm.think_end = settings.think_end


def set_draw(task: Any, settings: Eval, answer: int) -> None:
    if is_sampled(settings):
        draw = {"temperature": settings.temperature, "top_p": settings.top_p, DRAW: f"{settings.sample_seed} {answer}"}
        task.set_config("generation_kwargs", {"do_sample": True, **draw}, update=True)


def requests_of_all_answers(
    lm: Answering, definition: Definition, task: Any, rows: Sequence[int], settings: Eval
) -> list[Instance]:
    """What the harness will ask for, of each sampled answer to each question."""
    requests = []
    for answer in range(settings.answers):
        set_draw(task, settings, answer)
        seed_exemplars(task, definition, settings)
        task.build_all_requests(samples=rows, **prompt_settings(settings), **template_of(lm, settings))
        requests += task.instances
    return requests


def prompt_settings(settings: Eval) -> dict[str, Any]:
    """What the harness makes prompts with, in its names."""
    turns = settings.chat_template and settings.fewshot_as_multiturn
    how = {"apply_chat_template": settings.chat_template, "fewshot_as_multiturn": turns}
    return how | {"system_instruction": settings.system_instruction}


def template_of(lm: Any, settings: Eval) -> dict[str, Any]:
    """What `evaluate` gives the tasks where they are to apply the model's chat template."""
    names = {"chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name}
    return names if settings.chat_template else {}


@contextlib.contextmanager
def harness_tamed() -> Iterator[None]:
    """Habits of the harness: each look at a task's name draws from Python's random numbers; a prompt's template is
    compiled anew for each exemplar of each question, a millisecond each time; a bar for each task's prompts, done in no
    time, and warnings that a model in memory is not a model's name.
    """
    state, compile_template = random.getstate(), templates.from_string
    logger = logging.getLogger("lm_eval")
    bar, level = harness_task.tqdm, logger.level
    templates.from_string = functools.cache(compile_template)
    harness_task.tqdm = functools.partial(bar, disable=True)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        harness_task.tqdm = bar
        templates.from_string = compile_template
        random.setstate(state)


def seed_exemplars(task: Task, definition: Definition, settings: Eval) -> None:
    """As the harness' command line does, where exemplars are drawn."""
    if settings.exemplars == "random" or benchmark_of(definition.task).of_harness:
        task.set_fewshot_seed(FEWSHOT_SEED)


def set_template_date(lm: Any, settings: Eval) -> None:
    lm.chat_template_args = getattr(lm, "chat_template_args", {}) | date_of_templates(settings.template_date)


def lengths_of(lm: Any, definition: Definition, task: Task, rows: Sequence[int], settings: Eval) -> Lengths:
    """The prompts of a task as this model's tokenizer cuts them; of a question's continuations the longest counts."""
    templated = settings.chat_template
    if templated and not getattr(lm.tokenizer, "chat_template", None):
        raise PipelineError("eval.chat_template=true, but the checkpoint's tokenizer has none: leave it off")
    how = prompt_settings(settings) | template_of(lm, settings)
    seed_exemplars(task, definition, settings)
    for some in (rows[:1], rows) if templated else (rows,):  # one first: the text of a template may have any length
        try:
            task.build_all_requests(samples=some, **how)  # type: ignore[arg-type]
        except Exception as error:  # a template is a program, and raises what it likes
            if not templated:
                raise
            problem = f"raises on the prompts of {definition.name} ({plain_line(error)})"
            raise PipelineError(template_problem(problem)) from error
        for request in task.instances if templated else ():
            prompt = request.args[0]
            if len(prompt) > LONGEST_PROMPT:
                problem = f"renders a prompt of {len(prompt)} characters for a question of {definition.name}"
                raise PipelineError(template_problem(problem))
            if not without_marks(prompt, lm.tokenizer) and without_marks(str(task.doc_to_text(request.doc)), None):
                raise PipelineError(template_problem(f"renders an empty prompt for a question of {definition.name}"))
    answer = 0
    put: dict[tuple[int, str], str] = {}  # a question's prompt -> the longest of what is asked after it
    for request in task.instances:
        if request.request_type == "loglikelihood_rolling":
            continue  # the harness scores it in windows
        prompt, after = request.args
        if request.request_type == "generate_until":
            answer, after = after.get("max_gen_toks", lm.max_gen_toks), ""
        put[request.doc_id, prompt] = max(put.get((request.doc_id, prompt), ""), after, key=len)
    lengths = [  # the last token is only predicted
        (rows[doc_id], len(lm.tok_encode(prompt + after)) - bool(after)) for (doc_id, prompt), after in put.items()
    ]
    return Lengths(lengths, answer)


def template_problem(problem: str) -> str:
    return f"eval.chat_template=true, but the checkpoint's chat template {problem}: correct it, or leave it off"


def plain_line(error: Exception) -> str:
    """What an error says, in one line of at most 200 printable characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(letter for letter in text if letter.isprintable())[:200]


def without_marks(text: str, tokenizer: Any) -> str:
    """A text without special tokens and the space around it."""
    for mark in tokenizer.all_special_tokens if tokenizer else ():
        text = text.replace(mark, "")
    return text.strip()


def _fitting_rows(lm: Any, definition: Definition, task: Task, rows: range, settings: Eval) -> Sequence[int]:
    """The rows whose prompts fit the model. Raises PipelineError where more than eval.too_long do not."""
    if not hasattr(lm, "max_length"):
        return rows
    lengths = lengths_of(lm, definition, task, rows, settings)
    excluded = too_long(definition.name, lengths, len(rows), lm.max_length, settings.too_long)
    if excluded:
        say(f"{definition.name}: {len(excluded)} prompts that do not fit leave the score")
        return [row for row in rows if row not in excluded]
    return rows
