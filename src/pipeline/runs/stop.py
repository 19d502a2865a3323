"""SIGTERM, SIGUSR1 and SIGHUP end a process in good order, with exit status 75: rerun the same command.

So does the first Ctrl-C, with exit status 130; a second one stops at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

UNFINISHED = 75  # exit status (EX_TEMPFAIL): the same command goes on. Slurm scripts requeue on it
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EARLY = "PIPELINE_SIGNALLED"  # in the environment: the signal that came before the libraries were imported


class Stopped(SystemExit):
    """Ends the process with UNFINISHED, unless what called it knows better; what is in work is dropped on the way."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(UNFINISHED)
        self.signal_name = signal_name


_listeners: list[Callable[[str], None]] = []
_asked: str | None = None
_interrupted = False  # by a Ctrl-C


def _hear(number: int, frame: Any) -> None:
    global _asked, _interrupted
    _asked = signal.Signals(number).name
    if number == signal.SIGINT:
        if _interrupted:
            raise KeyboardInterrupt
        _interrupted = True
        os.write(2, b"\ninterrupted: stopping in good order; Ctrl-C again stops at once\n")
    if _listeners:
        _listeners[-1](_asked)
    elif not isinstance(sys.exc_info()[1], Stopped):  # Slurm sends a second one: what the first ends is not cut short
        raise Stopped(_asked)


def heeded() -> list[signal.Signals]:
    """Ctrl-C and those of STOPPING that end this process: not SIGHUP and SIGINT where they are ignored, as nohup and
    workers have it."""
    ignorable = (signal.SIGHUP, signal.SIGINT)
    signals = (*STOPPING, signal.SIGINT)
    return [number for number in signals if number not in ignorable or signal.getsignal(number) != signal.SIG_IGN]


def answer_early() -> None:
    """Handlers for the time of the slow imports, when nothing is in work yet: the process ends at once.

    In a job of Slurm SIGUSR1 announces the time limit. There it is kept for the first run, which counts it as an
    attempt (launch/attempts.py): one that only ended would be requeued as often as the site permits.
    """

    def end(number: int, _: Any) -> None:
        if number != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
            os._exit(130 if number == signal.SIGINT else UNFINISHED)
        os.environ[EARLY] = "SIGUSR1"

    for one in {*heeded(), signal.SIGINT}:
        signal.signal(one, end)


@contextmanager
def listening() -> Iterator[None]:
    """Inside, a signal of `heeded` raises Stopped in the main thread; handlers are those of before when it is over."""
    global _asked, _interrupted
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, _hear) for number in heeded()}
    _asked = _asked or os.environ.pop(EARLY, None)
    try:
        yield
    finally:
        if _hear not in earlier.values():
            _asked, _interrupted = None, False
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, a signal's name goes to `listener` instead, which finishes what it must and then stops."""
    with listening():
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.remove(listener)


@contextmanager
def finishing() -> Iterator[None]:
    """Inside, Ctrl-C and the signals of STOPPING wait: what was begun is finished, then they are heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    earlier = {number: signal.signal(number, lambda one, _: came.append(one)) for number in {*heeded(), signal.SIGINT}}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def asked() -> str | None:
    """The name of the signal that asked this process to stop."""
    return _asked


@contextmanager
def as_asked() -> Iterator[None]:
    """Inside, an error after a signal is Stopped: libraries turn what ends them into errors of their own."""
    try:
        yield
    except Exception as error:
        if _asked is None:
            raise
        raise Stopped(_asked) from error


def check() -> None:
    """Stop where that was asked for and what was in work is finished."""
    if _asked is not None:
        raise Stopped(_asked)
