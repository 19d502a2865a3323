"""A task's log as stage=compare reads it, whatever wrote it."""

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
Item = dict[str, Any]  # a sample: texts, and under scores what the tool recorded, numbers or not


@dataclass(frozen=True)
class Log:
    """The answers of a model to a task, as one filter read them.

    printed: metric -> the number that the tool printed; lower_is_better: metrics of which less is
    better; problems: what the log lacks; version: the tool's, with its name.
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
    """How a format is read: `recognizes` a file by its JSON content, and `read` returns its
    logs.
    """

    recognizes: Callable[[Path, Mapping[str, Any]], bool]
    read: Callable[[Path, dict[str, Any]], Iterable[Log]]


@contextmanager
def as_one_sentence(path: Path) -> Iterator[None]:
    """Raise PipelineError, naming the file, for whatever a malformed one raises while it is
    read.
    """
    try:
        yield
    except PipelineError:
        raise
    except MALFORMED as error:
        problem = f"{path} is not a complete log ({type(error).__name__}: {first_line(error)})"
        raise PipelineError(f"{problem}: copy it again, or name other files in results") from error
