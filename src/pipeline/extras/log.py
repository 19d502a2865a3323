"""A task's log in the form that stage=compare reads, whatever tool wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.evaluate.metrics import finite_or_none
from pipeline.stats.statistics import is_mean_of


class Answer(NamedTuple):
    """An answer of a log.

    Attributes:
        document: identifies the question and its target.
        prompt: identifies the prompt.
        scores: the recorded values by metric.
    """

    document: str
    prompt: str
    scores: Mapping[str, Any]


@dataclass(frozen=True)
class Log:
    """The answers of a model to a task.

    Args:
        task: the task, with the filter if there is one.
        file: the log file.
        settings: settings that change scores.
        prompts: the prompt of each question.
        scores: metric -> question -> number.
        others: metrics that are not means over questions, such as BLEU and perplexity.
    """

    task: str
    file: Path
    settings: Mapping[str, Any]
    prompts: Mapping[str, str]
    scores: Mapping[str, Mapping[str, float]]
    others: list[str]


def log_of(
    task: str,
    file: Path,
    settings: Mapping[str, Any],
    answers: Iterable[Answer],
    printed: Mapping[str, float | None],
) -> Log:
    """Return the log of a task's answers.

    Args:
        task: the task.
        file: the log file.
        settings: settings that change scores.
        answers: the answers. A document that occurs twice is two questions.
        printed: the scores that the tool printed, by metric.
    """
    counts: Counter[str] = Counter()
    prompts: dict[str, str] = {}
    numbers: dict[str, dict[str, float]] = {}
    for answer in answers:
        counts[answer.document] += 1
        question = f"{answer.document} {counts[answer.document]}"
        prompts[question] = answer.prompt
        for metric, value in answer.scores.items():
            of_metric = numbers.setdefault(metric, {})
            number = finite_or_none(value)
            if number is not None:
                of_metric[question] = number
    scores, others = {}, []
    for metric, of_metric in numbers.items():
        is_complete = len(of_metric) == len(prompts)
        score = printed.get(metric)
        if is_complete and (score is None or is_mean_of(score, list(of_metric.values()))):
            scores[metric] = of_metric
        else:
            others.append(metric)
    return Log(task, file, settings, prompts, scores, others)
