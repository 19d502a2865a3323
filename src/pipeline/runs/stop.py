"""Signals that end a process in good order.

After SIGTERM, SIGUSR1 and SIGHUP the exit status is 75: rerun the same command to resume. After the
first Ctrl-C it is 130. A second Ctrl-C stops at once.
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

# exit status (EX_TEMPFAIL): rerun the same command to resume. Slurm scripts requeue on it
UNFINISHED = 75
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# an environment variable with the signal that came before the libraries were imported
EARLY = "PIPELINE_SIGNALLED"


class Stopped(SystemExit):
    """Ends the process with UNFINISHED, unless a caller sets another status.

    Unfinished work is dropped.
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
_signal_name: str | None = None  # the signal that this process received
_interrupted = False  # by a Ctrl-C


def _handle_signal(number: int, frame: Any) -> None:
    global _signal_name, _interrupted
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.__spec__, "_initializing", False):
        # an exception in its C++ code would abort the process: try again when torch is imported
        threading.Timer(0.1, signal.raise_signal, [number]).start()
        return
    _signal_name = signal.Signals(number).name
    if number == signal.SIGINT:
        if _interrupted:
            raise KeyboardInterrupt
        _interrupted = True
        if parent_process() is None:  # a parent process prints it too
            os.write(2, b"\ninterrupted: stopping in good order; Ctrl-C again stops at once\n")
    if _listeners:
        _listeners[-1](_signal_name)
    elif not isinstance(sys.exc_info()[1], Stopped):
        # a second signal of Slurm must not cut short the ending by the first
        raise Stopped(_signal_name)


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end this process: SIGINT and STOPPING.

    SIGHUP and SIGINT are left out if they are ignored, as under nohup and in workers.
    """
    signals = [*STOPPING, signal.SIGINT]
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signals.remove(number)
    return signals


def answer_early() -> None:
    """Install signal handlers for the slow imports before any run, which end the process at once.

    In a Slurm job, SIGUSR1 announces the time limit. It is then stored for the first run, which
    counts it as an attempt (launch/attempts.py). If the job only ended, it would be requeued as
    often as the site permits.
    """

    def end_process(number: int, _: Any) -> None:
        if number != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
            os._exit(130 if number == signal.SIGINT else UNFINISHED)
        os.environ[EARLY] = "SIGUSR1"

    for number in {*handled_signals(), signal.SIGINT}:
        signal.signal(number, end_process)


@contextmanager
def handle_signals() -> Iterator[None]:
    """Inside, each of `handled_signals` raises Stopped in the main thread.

    Afterwards the earlier handlers are restored.
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
    """Inside, call `listener` with a signal's name instead.

    The listener finishes necessary work and then stops.
    """
    with handle_signals():
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.remove(listener)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Inside, delay Ctrl-C and the signals of STOPPING until the block has finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    earlier = {}
    for number in {*handled_signals(), signal.SIGINT}:
        earlier[number] = signal.signal(number, lambda caught, _: received.append(caught))
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def stop_signal_name() -> str | None:
    """Return the name of the signal that asked this process to stop, or None."""
    return _signal_name


@contextmanager
def convert_errors_after_signal() -> Iterator[None]:
    """Inside, turn an error after a signal into Stopped.

    Libraries convert Stopped to their own errors.
    """
    try:
        yield
    except Exception as error:
        if _signal_name is None:
            raise
        raise Stopped(_signal_name) from error


def raise_if_signalled() -> None:
    """Raise Stopped if a signal was received. Called between two pieces of work."""
    if _signal_name is not None:
        raise Stopped(_signal_name)
