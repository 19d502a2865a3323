"""A task's log in the form that stage=compare reads, whatever tool wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import PipelineError, first_line

MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RecursionError,
    OverflowError,
    OSError,
)
Item = dict[str, Any]  # a sample: its texts, and under `scores` the recorded values


@dataclass(frozen=True)
class Log:
    """The answers of a model to a task, read with one filter.

    Args:
        model: the model's name.
        task: the task.
        filter: the filter.
        file: the log file.
        started: when the evaluation started.
        items: the samples by document.
        printed: the scores that the tool printed, by metric.
        settings: settings that change scores.
        version: the tool's name and version.
        num_fewshot: the number of few-shot examples.
        lower_is_better: metrics with a lower value for a better model.
        problems: missing parts of the log.
    """

    model: str
    task: str
    filter: str
    file: Path
    started: str
    items: dict[str, Item]
    printed: Mapping[str, float]
    settings: Mapping[str, str]
    version: str
    num_fewshot: int | None = None
    lower_is_better: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


class Reader(NamedTuple):
    """A format of logs: `recognizes` a file by its JSON content, and `read` returns its logs."""

    recognizes: Callable[[Path, Mapping[str, Any]], bool]
    read: Callable[[Path, dict[str, Any]], Iterable[Log]]


@contextmanager
def as_one_sentence(path: Path) -> Iterator[None]:
    """Turn errors from reading a malformed file into a PipelineError with its name."""
    try:
        yield
    except PipelineError:
        raise
    except MALFORMED as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise PipelineError(
            f"{path} is not a complete log ({problem}). Copy it again, or name other files in"
            " results."
        ) from error
