"""The number and the lengths of the questions of an evaluation.

Numbers come from the local files if these are on this disk, otherwise from the benchmarks'
publications. Lengths are the token counts of estimate/flops.py. A language without counts has the
English ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.harness import scored_rows
from pipeline.config.evaluation import EvalTask
from pipeline.estimate.flops import ROOM, QuestionSet, question_set
from pipeline.estimate.models import Evaluation
from pipeline.runs.run import Run
from pipeline.stages.lengths import count_lines

THINKING = 0.25  # the share of eval.max_gen_toks that a model that thinks uses (assumed)


def questions_of(run: Evaluation, task: EvalTask, language: str) -> QuestionSet:
    """Return the questions of a task, with the counts of local files on this disk."""
    config = run.config.eval
    count = count_questions(run, task, language)
    if benchmark_of(task.task).kind == "translation":
        count *= 2  # both directions
    room = config.max_gen_toks_of.get(language, config.max_gen_toks) or ROOM
    kind = question_set(task.task, task.num_fewshot, language)
    if config.think_end and kind.answer:
        kind = replace(kind, answer=room * THINKING)
    prefixes = min(kind.prefixes, count)
    return replace(kind, questions=config.answers * count, room=room, prefixes=prefixes)


def scored_file(run: Evaluation, task: EvalTask, language: str) -> Path | None:
    """Return the local file of a task's questions, or None if it is not on this disk."""
    benchmark = benchmark_of(task.task)
    root = run.parents.get("data_root")
    if root is None or benchmark.built_from or benchmark.of_harness:
        return None
    files = {path.stem: path for path in benchmark.files(root.folder, language)}
    names = {"test": ("test", "devtest"), "dev": ("development", "dev")}
    for name in names[run.config.eval.split]:
        if name in files:
            return files[name]
    return None


def count_questions(run: Evaluation, task: EvalTask, language: str, limited: bool = True) -> int:
    """Return the number of a task's questions.

    It is the number of the local file if that exists or is planned, otherwise the benchmark's
    published size. A user's own items may be more.

    Args:
        run: The evaluation.
        task: The task.
        language: The language.
        limited: Whether eval.limit applies.
    """
    config = run.config.eval
    root = run.parents.get("data_root")
    benchmark = benchmark_of(task.task)
    file = scored_file(run, task, language)
    if benchmark.of_harness:
        file = scored_rows(task.task)
    count = benchmark.questions
    if file:
        count = count_lines(file, file.stat().st_mtime_ns)
    if isinstance(root, Run) and not root.folder.is_dir():
        count = root.config.expert.questions(config.split) or count
    if config.limit and limited:
        return min(count, math.ceil(config.limit * benchmark.parts))
    return count


def question_sets_of(run: Evaluation) -> list[QuestionSet]:
    """Return the questions of all tasks and languages of an evaluation."""
    sets = []
    for task in run.config.eval.tasks:
        for code in run.config.languages:
            kind = questions_of(run, task, code)
            if kind.questions:
                sets.append(kind)
    return sets
