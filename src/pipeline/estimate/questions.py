"""The questions that an evaluation puts to its model: how many, and of how many tokens.

By the local files where they are here, else by the benchmarks' publications and the token counts of
estimate/flops.py, of a language without one as in English.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.harness import scored_rows
from pipeline.config.evaluation import EvalTask
from pipeline.estimate.flops import ROOM, QuestionSet, question_sets
from pipeline.estimate.models import Evaluation, tokenizer_of
from pipeline.runs.run import Run
from pipeline.stages.lengths import count_lines, sampled_lengths

THINKING = 0.25  # of eval.max_gen_toks


def kinds_of(run: Evaluation, task: EvalTask, language: str) -> list[QuestionSet]:
    """Return the questions that a task asks, with counts and lengths of local files if they are on
    this disk.

    A model that thinks is assumed to use a quarter of eval.max_gen_toks (THINKING).
    """
    config, benchmark = run.config.eval, benchmark_of(task.task)
    count = count_questions(run, task, language)
    kinds = question_sets(task.task, task.num_fewshot, language)
    file = scored_file(run, task, language)
    columns, worked = benchmark.columns, benchmark.kind == "number"
    if file and columns:
        lengths = sampled_lengths(file, columns, tokenizer := tokenizer_of(run))
        if lengths:
            question = statistics.fmean(lengths)
            if worked and benchmark.exemplar_file:
                exemplars = file.with_name(benchmark.exemplar_file)
            else:
                exemplars = file
            if worked:
                columns = (*columns, "answer")
            if exemplars.is_file():
                shot = statistics.fmean(sampled_lengths(exemplars, columns, tokenizer))
            else:
                shot = question
            kinds = [
                replace(kind, question=question, prefix=task.num_fewshot * shot) for kind in kinds
            ]
    room = config.max_gen_toks_of.get(language, config.max_gen_toks) or ROOM
    return [
        replace(
            kind,
            questions=config.answers * count,
            room=room,
            answer=room * THINKING if config.think_end and kind.answer else kind.answer,
            prefixes=min(kind.prefixes, count),
        )
        for kind in kinds
    ]


def scored_file(run: Evaluation, task: EvalTask, language: str) -> Path | None:
    """Return the local file of a task's questions, if it is on this disk."""
    benchmark, root = benchmark_of(task.task), run.parents.get("data_root")
    if root is None or benchmark.built_from:
        return None
    names = {"test": ("test", "devtest"), "dev": ("development", "dev")}[run.config.eval.split]
    files = {path.stem: path for path in benchmark.files(root.folder, language)}
    return next((files[stem] for stem in names if stem in files), None)


def count_questions(run: Evaluation, task: EvalTask, language: str, limited: bool = True) -> int:
    """Return the number of questions: those of the local file if it is here or is planned, else the
    benchmark's published size; one's own items may be more. limited: at most eval.limit.
    """
    config, root = run.config.eval, run.parents.get("data_root")
    benchmark = benchmark_of(task.task)
    file = scored_file(run, task, language)
    if benchmark.of_harness:
        file = scored_rows(task.task, root.folder if root else None)
    if file:
        count = count_lines(file)
    else:
        count = benchmark.questions
    if isinstance(root, Run) and not root.folder.is_dir():
        count = root.config.expert.questions(config.split) or count
    if config.limit and limited:
        return min(count, math.ceil(config.limit * benchmark.parts))
    return count


def question_sets_of(run: Evaluation) -> list[QuestionSet]:
    """Those of all its tasks and languages."""
    config = run.config
    found = []
    for task in config.eval.tasks:
        for code in config.languages:
            for kind in kinds_of(run, task, code):
                if kind.questions:
                    found.append(kind)
    return found
