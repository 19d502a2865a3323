"""The one error that a user can fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches


class PipelineError(ValueError):
    """Something the user can fix.

    The message is one sentence: the knob, the value, the remedy; a line for each cause.

    output: text that was produced before the error, and is printed with it.
    """

    def __init__(self, *causes: str, output: str = "") -> None:
        super().__init__("\nerror: ".join(causes))
        self.output = output


class Held(PipelineError):
    """Another process computes the run, and this one does not wait: rerun the command later to
    resume (exit status 75).

    failed: run name -> reason of those of several runs that failed.
    """

    failed: dict[str, str] = {}


class Mistakes:
    """The mistakes of one file, which are reported together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the PipelineError that is raised in this context."""
        try:
            yield
        except PipelineError as error:
            self.found.append(str(error))

    def report(self) -> None:
        """Raise PipelineError with all mistakes that were found."""
        if self.found:
            raise PipelineError(*dict.fromkeys(self.found))


def shorten_words(text: str) -> str:
    """The text without the middle of words of more than 400 characters: a value may be a file
    pasted by mistake.
    """
    return re.sub(r"\S{400,}", lambda match: f"{match[0][:60]}…{match[0][-20:]}", text)


def first_line(error: BaseException) -> str:
    """The first line of a library's error message; the name of its class where it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def close_matches(value: str, options: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Up to three of the options that are similar to a word; those alone that are about as similar
    as the first.
    """
    close = get_close_matches(value, options, 3, cutoff)
    similar = [
        SequenceMatcher(a=name, b=value).ratio() for name in close
    ]  # in get_close_matches' order of arguments
    found = []
    for name, ratio in zip(close, similar, strict=True):
        if ratio > similar[0] - 0.1:
            found.append(name)
    return found


def suggest(value: object, options: Iterable[object]) -> str:
    """Hint for a word that is not in `options`: the close matches, else the first twelve
    options.
    """
    names = [str(name) for name in options]
    close = close_matches(str(value), names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    remainder = ""
    if len(names) > 12:
        remainder = f" and {len(names) - 12} more"
    if names:
        return f"there are {', '.join(names[:12])}{remainder}"
    return "there are none"
