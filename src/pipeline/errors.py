"""The one error that a user can fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PipelineError(ValueError):
    """Something the user can fix. The message is one sentence: the knob, the value, the remedy.

    shown: what was worked out before, and is printed all the same.
    """

    def __init__(self, message: str = "", shown: str = "") -> None:
        super().__init__(message)
        self.shown = shown


class Held(PipelineError):
    """Another process makes the run, and this one is not to wait: the same command goes on later (exit status 75).

    `failed`: of several runs those that failed, run name -> reason.
    """

    failed: dict[str, str] = {}


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def meant(word: object, known: Iterable[object]) -> str:
    """What a word that is none of `known` may mean: those that are near, else what there is."""
    names = [str(name) for name in known]
    close = get_close_matches(str(word), names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"there are {', '.join(names[:12])}{more}" if names else "there are none"
