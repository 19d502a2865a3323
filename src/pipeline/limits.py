"""A time limit for untrusted text that computes: a template or a regular expression."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import PipelineError


class TooLong(PipelineError):
    """A computation exceeded its time limit."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Raise TooLong if the enclosed code takes more processor time than this.

    Python's regular expressions and Jinja's templates are interrupted, too. Only the main thread
    has a limit, because only it receives signals. A limit inside another limit is ignored.
    """
    is_within = signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL
    if is_within or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: Any) -> None:
        raise TooLong(message)

    signal.signal(signal.SIGPROF, expire)
    signal.setitimer(
        signal.ITIMER_PROF, seconds, 0.1
    )  # again, in case other code catches the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
