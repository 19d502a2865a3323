"""The one error that a user can fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches


class PipelineError(ValueError):
    """An error that the user can fix.

    The message names the key, the value and the remedy, with a line for each cause. `output` is
    text that was produced before the error and is printed with it.
    """

    def __init__(self, *causes: str, output: str = "") -> None:
        super().__init__("\nerror: ".join(causes))
        self.output = output


class Held(PipelineError):
    """Another process computes the run, and this process does not wait.

    Rerun the command later to resume (exit status 75). `failed` maps the names of other runs that
    failed to the reasons.
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
    """Return the text with long words shortened in the middle.

    A word of more than 400 characters may be a file that was pasted by mistake.
    """
    return re.sub(r"\S{400,}", lambda match: f"{match[0][:60]}…{match[0][-20:]}", text)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the class name if it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def close_matches(value: str, options: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three options that are similar to a word.

    Only options that are about as similar as the best are returned.
    """
    close = get_close_matches(value, options, 3, cutoff)
    # get_close_matches uses the same order of arguments
    similar = [SequenceMatcher(a=name, b=value).ratio() for name in close]
    best = []
    for name, ratio in zip(close, similar, strict=True):
        if ratio > similar[0] - 0.1:
            best.append(name)
    return best


def first_few(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first `most` items and, if more exist, "and 3 more"."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"and {len(items) - most} more")
    return separator.join(shown)


def suggest(value: object, options: Iterable[object]) -> str:
    """Return a hint for an unknown word: the close matches, or the first five options."""
    names = [str(name) for name in options]
    close = close_matches(str(value), names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {first_few(names, 5) or 'none'}"
