"""What a log of an evaluation tool says about one model on one task: its items, its scores, its settings.

The readers are lm_eval_logs.py and inspect_logs.py. The files come from other machines and are untrusted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.report.load.archive import without_private

SECRET = re.compile(r"(?i)token$|api_key|secret|password")
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError, OSError)
LONGEST_SETTING = 120  # characters shown


@dataclass(frozen=True)
class LoggedItem:
    """One item of a task and a model's answer to it.

    key: identity of the item, equal in all logs that scored it; values: metric -> what the tool recorded, a number or
    not; chosen: metric -> the answer that the tool read from the response, if it depends on the metric.
    """

    key: str
    values: Mapping[str, Any]
    prompt: str
    prompt_hash: str
    target: str
    response: str
    extracted: str
    chosen: Mapping[str, str] = field(default_factory=dict)
    cut_off: bool | None = None


@dataclass(frozen=True)
class TaskLog:
    """One task of one model, as one filter (lm_eval) read its answers.

    scores: metric -> the number that the tool printed, as far as it printed one; settings: dotted name -> value, which
    the page compares; lower_is_better: metrics, as far as the log tells; parts: the tasks of a group; problems:
    sentences about items that the log lacks; seconds: of the whole command.
    """

    tool: str
    model: str
    task: str
    filter: str
    file: Path
    started: str
    items: list[LoggedItem]
    scores: Mapping[str, float]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    num_fewshot: int | None = None
    lower_is_better: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float | None = None


@contextmanager
def as_one_sentence(path: Path, tool: str) -> Iterator[None]:
    """Raise PipelineError, naming the file, for whatever a malformed one raises while it is read."""
    try:
        yield
    except PipelineError:
        raise
    except MALFORMED as error:
        problem = f"{path} is not a complete log of {tool} ({type(error).__name__}: {first_line(error)})"
        raise PipelineError(f"{problem}: copy it again, or name other files in results") from error


def parse_json(content: bytes, path: Path) -> Any:
    """JSON in UTF-8; unpaired surrogates, which JSON can write and UTF-8 cannot, become question marks."""
    try:
        value = json.loads(content)
        if b"\\ud" in content.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except (ValueError, RecursionError) as error:
        problem = f"{path} is not valid JSON ({first_line(error)})"
        raise PipelineError(f"{problem}: copy it again, or name other files in results") from None


def finite_number(value: Any) -> float | None:
    """The number that a metric recorded for an item; None for anything else, also for nan."""
    if not isinstance(value, bool | int | float):
        return None
    with_overflow = abs(value) < 1e300
    return float(value) if with_overflow and math.isfinite(value) else None


def model_title(name: str) -> str:
    """A model's name on the page: of a local folder (also hf//FOLDER of inspect_ai) its last part, on one line."""
    is_path = name.startswith(("/", ".", "~")) or "//" in name
    last = name.rstrip("/").rsplit("/", 1)[-1] if is_path else name
    return " ".join(last.split())[:80] or "unnamed model"


def setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text on one line, without those unset, secrets and local paths."""
    texts = {}
    for name, value in settings.items():
        if value is None or value == {} or value == [] or SECRET.search(name):
            continue
        private = without_private(value)
        text = private if isinstance(private, str) else json.dumps(private, ensure_ascii=False, sort_keys=True)
        texts[name] = " ".join(text.split()) or repr(text)
    return texts


def with_ordinals(items: list[LoggedItem]) -> dict[str, LoggedItem]:
    """Items by key; a repeated item, as data sets have them, by its key and how often it came before."""
    counts: dict[str, int] = {}
    by_key = {}
    for item in items:
        number = counts[item.key] = counts.get(item.key, 0) + 1
        by_key[f"{item.key} {number}"] = item
    return by_key
