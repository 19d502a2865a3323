"""A time limit for text from outside that computes something: a template, a regular expression."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import PipelineError


class TooLong(PipelineError):
    """A computation that did not end within its time limit."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Raise TooLong with a message if the context takes more processor time than this.

    Python's regular expressions and Jinja's templates are interrupted, too. There is no limit in
    other threads than the main one, which alone gets signals. A limit within another one is
    ignored.
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
    )  # again, if something takes the error for one of its own
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
