"""The task files of an evaluation: each of its tasks in each of its languages, defined by its
benchmark.

Constructed languages take the English stock file: the prompt's words (`Question:`, `Step-by-Step
Answer:`) are English, question and answer are not.

Everything that can be wrong with the data is found here, before any weights load. Imports nothing
heavy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.benchmarks import BENCHMARKS, benchmark_of
from pipeline.benchmarks.benchmark import Ask, TaskSpec
from pipeline.benchmarks.local_files import Missing
from pipeline.config.evaluation import Eval
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, missing_row
from pipeline.languages import language, named_language


def task_specs(
    settings: Eval,
    languages: Sequence[str],
    data_root: Path | None,
    folder: Path,
    left_out: list[ScoreRow] | None = None,
) -> list[TaskSpec]:
    """Check the data of each task in each language and write a task file of the harness for each
    into `folder`.

    `data_root`: the folder with the data, None for the Hub. `left_out`: takes the tasks that are
    wanted `where_possible` and are not. FLORES gives two tasks a language, from and into English.
    Raises PipelineError for an unknown task or language, missing or broken data, and more exemplars
    than there are.
    """
    counts = Counter(eval_task.task for eval_task in settings.tasks)
    for task, count in counts.items():
        benchmark_of(task)  # or an error
        if count > 1:
            raise PipelineError(
                f"{task} stands {count} times in one evaluation: score each number of shots in one"
                " of its own"
            )
    if data_root is None and settings.split != "test":
        raise PipelineError(
            f"eval.split={settings.split} has no items on the Hub: set data_root to a folder that"
            " has them"
        )
    without_drawn = []
    for task in counts:
        if not benchmark_of(task).exemplars_drawn:
            without_drawn.append(task)
    if settings.exemplars == "random" and without_drawn:
        drawn = ", ".join(item.title for item in BENCHMARKS.values() if item.exemplars_drawn)
        raise PipelineError(
            f"eval.exemplars=random is for {drawn}: {without_drawn[0]} has its exemplars in the"
            " order of its file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    specs: list[TaskSpec] = []
    for eval_task in settings.tasks:
        benchmark = benchmark_of(eval_task.task)
        if benchmark.one_set:
            find = named_language
        else:
            find = language
        requested = [find(code) for code in dict.fromkeys(languages)]
        spoken = []
        for target in requested:
            if benchmark.kind != "translation" or target.code != "en":
                spoken.append(target)
        if not spoken:
            raise PipelineError(
                f"{eval_task.task} translates between English and another language: add one to"
                " languages"
            )
        for target in spoken:
            if target.constructed and data_root is None and not benchmark.one_set:
                raise PipelineError(
                    f"{target.code} is a constructed language and not on the Hub: set data_root"
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
                left_out.append(
                    missing_row(eval_task.task, target.code, eval_task.num_fewshot, str(error))
                )
    return specs


def data_sets(spec: TaskSpec) -> list[tuple[str, str | None, str]]:
    """(repository, configuration, split) of each set on the Hub that a task reads; none where data
    is local.
    """
    body = spec.body
    if body.get("dataset_path") == "json":
        return []
    if "custom_dataset" in body:
        spoken = [language(code) for code in spec.where.split("-")]
        sources = []
        for target in spoken:
            for source in spec.benchmark.sources(target):
                sources.append(source)
        return [(source.hub or "", source.hub_config, source.split) for source in sources]
    splits = {body.get(f"{kind}_split") for kind in ("test", "training", "fewshot", "validation")}
    return [
        (body["dataset_path"], body.get("dataset_name"), split)
        for split in sorted(filter(None, splits))
    ]
