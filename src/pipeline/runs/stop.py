"""SIGTERM, SIGUSR1 and SIGHUP end a process in good order, with exit status 75: rerun the same
command to resume.

So does the first Ctrl-C, with exit status 130; a second one stops at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

UNFINISHED = (
    75  # exit status (EX_TEMPFAIL): rerun the same command to resume. Slurm scripts requeue on it
)
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# in the environment: the signal that came before the libraries were imported
EARLY = "PIPELINE_SIGNALLED"


class Stopped(SystemExit):
    """Ends the process with UNFINISHED, unless a caller sets another status; unfinished work is
    dropped.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(UNFINISHED)
        self.signal_name = signal_name


class NoProgress(SystemExit):
    """Ends a job that would make no progress if it were requeued: exit status 1."""

    def __init__(self, reason: str) -> None:
        super().__init__(1)
        self.reason = reason


_listeners: list[Callable[[str], None]] = []
_signal_name: str | None = None  # of the signal that this process received
_interrupted = False  # by a Ctrl-C


def _handle_signal(number: int, frame: Any) -> None:
    global _signal_name, _interrupted
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.__spec__, "_initializing", False):
        # its C++ code, which calls Python's, aborts the process at an exception: ask again when it
        # is imported
        threading.Timer(0.1, signal.raise_signal, [number]).start()
        return
    _signal_name = signal.Signals(number).name
    if number == signal.SIGINT:
        if _interrupted:
            raise KeyboardInterrupt
        _interrupted = True
        if parent_process() is None:  # which prints it too
            os.write(2, b"\ninterrupted: stopping in good order; Ctrl-C again stops at once\n")
    if _listeners:
        _listeners[-1](_signal_name)
    elif not isinstance(
        sys.exc_info()[1], Stopped
    ):  # Slurm sends a second signal: it must not cut short the ending by the first
        raise Stopped(_signal_name)


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end this process: SIGINT and STOPPING.

    SIGHUP and SIGINT are left out if they are ignored, as under nohup and in workers.
    """
    ignorable = (signal.SIGHUP, signal.SIGINT)
    signals = (*STOPPING, signal.SIGINT)
    found = []
    for number in signals:
        if number not in ignorable or signal.getsignal(number) != signal.SIG_IGN:
            found.append(number)
    return found


def answer_early() -> None:
    """Install handlers for the slow imports, before any run has started: the process ends at once.

    In a job of Slurm SIGUSR1 announces the time limit. It is then stored for the first run, which
    counts it as an
    attempt (launch/attempts.py): a job that only ended would be requeued as often as the site
        permits.
    """

    def end_process(number: int, _: Any) -> None:
        if number != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
            os._exit(130 if number == signal.SIGINT else UNFINISHED)
        os.environ[EARLY] = "SIGUSR1"

    for number in {*handled_signals(), signal.SIGINT}:
        signal.signal(number, end_process)


@contextmanager
def handle_signals() -> Iterator[None]:
    """Inside, each of `handled_signals` raises Stopped in the main thread; afterwards earlier
    handlers are restored.
    """
    global _signal_name, _interrupted
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, _handle_signal) for number in handled_signals()}
    _signal_name = _signal_name or os.environ.pop(EARLY, None)
    try:
        yield
    finally:
        if _handle_signal not in earlier.values():
            _signal_name, _interrupted = None, False
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, `listener` is called with a signal's name instead; it finishes what it must and then
    stops.
    """
    with handle_signals():
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.remove(listener)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Inside, Ctrl-C and the signals of STOPPING wait until the block has finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    earlier = {
        number: signal.signal(number, lambda received_number, _: received.append(received_number))
        for number in {*handled_signals(), signal.SIGINT}
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def stop_signal_name() -> str | None:
    """Return the name of the signal that asked this process to stop; None without one."""
    return _signal_name


@contextmanager
def convert_errors_after_signal() -> Iterator[None]:
    """Inside, an error after a signal becomes Stopped: libraries convert Stopped to errors of their
    own.
    """
    try:
        yield
    except Exception as error:
        if _signal_name is None:
            raise
        raise Stopped(_signal_name) from error


def raise_if_signalled() -> None:
    """Raise Stopped if a signal was received: called where no work is under way."""
    if _signal_name is not None:
        raise Stopped(_signal_name)
