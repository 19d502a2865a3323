"""The task files of an evaluation: a file for each task in each language, from its benchmark.

Constructed languages use the English stock file: the prompt's words (`Question:`, `Step-by-Step
Answer:`) are English, but question and answer are not.

All problems of the data are found here, before any weights load. Plans use this module, so its
imports are light.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.benchmark import Ask, TaskSpec
from pipeline.benchmarks.local_files import Missing
from pipeline.config.evaluation import Eval
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, missing_row
from pipeline.languages import Language, language, named_language


def task_specs(
    settings: Eval,
    languages: Sequence[str],
    data_root: Path | None,
    folder: Path,
    left_out: list[ScoreRow] | None = None,
) -> list[TaskSpec]:
    """Check the data of each task in each language and write its task file for the harness.

    FLORES has two tasks per language, from and into English.

    Args:
        settings: The settings of the evaluation.
        languages: Codes of languages.
        data_root: The folder of the data. None: the Hub.
        folder: The folder of the task files.
        left_out: Receives the `where_possible` tasks that cannot be defined.

    Raises:
        PipelineError: A task or language is unknown, data is missing or broken, or there are too
            few exemplars.
    """
    _check_settings(settings, data_root)
    folder.mkdir(parents=True, exist_ok=True)
    specs: list[TaskSpec] = []
    for eval_task in settings.tasks:
        benchmark = benchmark_of(eval_task.task)
        for target in _targets(eval_task.task, languages):
            if target.constructed and data_root is None and not benchmark.of_harness:
                raise PipelineError(
                    f"{target.code} is a constructed language and not on the Hub. Set data_root."
                )
            ask = Ask(
                task=eval_task.task,
                benchmark=benchmark,
                language=target,
                num_fewshot=eval_task.num_fewshot,
                data_root=data_root,
                split=settings.split,
                max_gen_toks=settings.max_gen_toks,
                run_code=settings.run_code,
                folder=folder,
                exemplars=settings.exemplars,
                options=settings.options,
            )
            try:
                specs += benchmark.define(ask)
            except Missing as error:
                if not eval_task.where_possible or left_out is None:
                    raise
                row = missing_row(eval_task.task, target.code, eval_task.num_fewshot, str(error))
                left_out.append(row)
    return specs


def _check_settings(settings: Eval, data_root: Path | None) -> None:
    tasks = [eval_task.task for eval_task in settings.tasks]
    for task in tasks:
        if tasks.count(task) > 1:
            raise PipelineError(
                f"{task} occurs {tasks.count(task)} times in one evaluation. Use a separate"
                " evaluation for each number of shots."
            )
        if settings.exemplars == "random" and not benchmark_of(task).exemplars_drawn:
            raise PipelineError(
                f"eval.exemplars=random: {task} uses its exemplars in the order of its file. Set"
                " eval.exemplars=first_n."
            )
    if data_root is None and settings.split != "test":
        raise PipelineError(
            f"eval.split={settings.split} has no items on the Hub. Set data_root to a folder that"
            " has them."
        )


def _targets(task: str, languages: Sequence[str]) -> list[Language]:
    """Return the languages of a task, without English if the task translates."""
    benchmark = benchmark_of(task)
    find = named_language if benchmark.of_harness else language
    targets = [find(code) for code in dict.fromkeys(languages)]
    if benchmark.kind == "translation":
        targets = [target for target in targets if target.code != "en"]
    if not targets:
        raise PipelineError(
            f"{task} translates between English and another language. Add another language to"
            " languages."
        )
    return targets


def data_sets(spec: TaskSpec) -> list[tuple[str, str | None, str]]:
    """Return (repository, configuration, split) of each set on the Hub that a task reads.

    The result is empty if the data is local.
    """
    body = spec.body
    sets: list[tuple[str, str | None, str]] = []
    if "custom_dataset" in body:
        for code in spec.where.split("-"):
            sources = spec.benchmark.sources(language(code))
            sets += [(source.hub or "", source.hub_config, source.split) for source in sources]
        return sets
    if body.get("dataset_path", "json") == "json":  # the harness refuses a task without data
        return []
    kinds = ("test", "training", "fewshot", "validation")
    splits = {body.get(f"{kind}_split") for kind in kinds}
    for split in sorted(filter(None, splits)):
        sets.append((body["dataset_path"], body.get("dataset_name"), split))
    return sets
