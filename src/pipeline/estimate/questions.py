"""The questions that an evaluation puts to its model: how many, and of how many tokens.

By the local files where they are here, else by the benchmarks' publications and the token counts of estimate/flops.py,
of a language without one as in English.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.harness import scored_rows
from pipeline.config.evaluation import EvalTask
from pipeline.config.stages import EvalStage
from pipeline.estimate.flops import MGSM, QuestionSet, question_sets
from pipeline.estimate.models import tokenizer_of
from pipeline.runs.run import Run
from pipeline.stages.lengths import count_lines, sampled_lengths

THINKING = 0.25  # of eval.max_gen_toks


def kinds_of(run: Run[EvalStage], task: EvalTask, language: str) -> list[QuestionSet]:
    """What a task puts to the model, with the questions and lengths of its local files where they are here. A model
    that thinks is assumed to use a quarter of eval.max_gen_toks (THINKING)."""
    config, benchmark = run.config, benchmark_of(task.task)
    count, room = (
        count_questions(run, task, language),
        config.eval.max_gen_toks_of.get(language, config.eval.max_gen_toks),
    )
    kinds = question_sets(task.task, task.num_fewshot, language if language in MGSM else "en")
    file = scored_file(run, task, language)
    columns, worked = benchmark.columns, benchmark.kind == "number"
    if file and columns and (lengths := sampled_lengths(file, columns, tokenizer := tokenizer_of(run))):
        question = statistics.fmean(lengths)
        exemplars = file.with_name(benchmark.exemplar_file) if worked and benchmark.exemplar_file else file
        columns = (*columns, "answer") if worked else columns
        shot = statistics.fmean(sampled_lengths(exemplars, columns, tokenizer)) if exemplars.is_file() else question
        kinds = [replace(kind, question=question, prefix=task.num_fewshot * shot) for kind in kinds]
    return [
        replace(
            kind,
            questions=config.eval.answers * (count if file or benchmark.of_harness else min(kind.questions, count)),
            room=room or kind.room,
            answer=(room or kind.room) * THINKING if config.eval.think_end and kind.answer else kind.answer,
            prefixes=min(kind.prefixes, count),
        )
        for kind in kinds
    ]


def scored_file(run: Run[EvalStage], task: EvalTask, language: str) -> Path | None:
    """The local file of a task's questions, if it is here."""
    root = run.parents.get("data_root")
    if root is None or (isinstance(root, Run) and not root.folder.is_dir()) or benchmark_of(task.task).built_from:
        return None
    names = {"test": ("test", "devtest"), "dev": ("development", "dev")}[run.config.eval.split]
    files = {path.stem: path for path in benchmark_of(task.task).files(root.folder, language)}
    return next((files[stem] for stem in names if stem in files), None)


def count_questions(run: Run[EvalStage], task: EvalTask, language: str) -> int:
    """Number of questions: those of the local file if it is here or is planned, else the benchmark's published size."""
    config, root = run.config, run.parents.get("data_root")
    benchmark = benchmark_of(task.task)
    limit = config.eval.limit or benchmark.questions
    if config.eval.limit and benchmark.question_column:
        limit = min(math.ceil(config.eval.limit * benchmark.parts), benchmark.questions)
    if isinstance(root, Run) and not root.folder.is_dir():
        return min(limit, root.config.expert.questions(config.eval.split) or limit)
    if benchmark.of_harness and (rows := scored_rows(task.task, root.folder if root else None)):
        count = count_lines(rows)
        return min(config.eval.limit or count, count)
    local_file = scored_file(run, task, language)
    if local_file is None:
        return limit
    count = count_lines(local_file)  # also of one's own items, which may be more than were published
    return min(limit, count) if config.eval.limit else count


def question_sets_of(run: Run[EvalStage]) -> list[QuestionSet]:
    """Those of all its tasks and languages."""
    config = run.config
    return [kind for task in config.eval.tasks for code in config.languages for kind in kinds_of(run, task, code)
            if kind.questions]  # fmt: skip
