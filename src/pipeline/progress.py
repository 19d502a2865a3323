"""One line of progress per run, on standard error.

At a terminal it is tqdm's bar. Elsewhere, for example in a log, a line is printed every 30 seconds.
`quiet` silences progress bars and messages of libraries.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
LOG_SECONDS = 30.0  # seconds between two lines without a terminal
LOG_LINE = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
SILENT = {  # libraries read these on import, in this process and its children
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers reads it too
    # Each retry would be a warning. A final failure gets our own sentence.
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "LMEVAL_LOG_LEVEL": "ERROR",
}

tqdm.set_lock(
    threading.RLock()
)  # only threads draw; tqdm's own lock also needs a semaphore of the system


def quiet() -> None:
    """Silence the output of libraries, unless the environment requests it."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    warnings.showwarning = lambda message, category, file, line, *_: say(
        warnings.formatwarning(message, category, file, line, "").rstrip()
    )
    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # warnings about missing GPU kernels at each import
        logging.getLogger(name).setLevel(logging.ERROR)


def say(line: str) -> None:
    """Print a line above the line of progress."""
    if sys.stderr.isatty():
        tqdm.write(line, file=sys.stderr)
        return
    with tqdm.get_lock():
        sys.stderr.write(f"{line}\n")  # `print` would write the line break separately
        sys.stderr.flush()


@contextmanager
def redirected(target: int, *numbers: int) -> Iterator[None]:
    """Send what this process and its children write to these descriptors to `target`."""
    saved = [os.dup(number) for number in numbers]
    try:
        for number in numbers:
            os.dup2(target, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(
                OSError, ValueError
            ):  # a full disk cannot take a log, and a stream may be closed
                stream.flush()
        for number, descriptor in zip(numbers, saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def announced(line: str) -> Iterator[None]:
    """Print a line once if the enclosed code takes longer than two seconds."""
    timer = threading.Timer(2.0, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_recorded: list[str] | None = None


def warn(line: str) -> None:
    """Print a warning above the progress bar, and record it inside `recorded_warnings`."""
    say(f"warning: {line}")
    if _recorded is not None:
        _recorded.append(line)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yield a list that collects each warning of this process inside the context."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


class Bar(tqdm):  # type: ignore[type-arg]
    """Progress of `total` units of work, from construction to close(), or as a context.

    The bar is thread-safe.

    Args:
        total: None if it is unknown.
        unit: in the singular; `byte` is printed as kB, MB, GB.
        stays: keep the last line at a terminal.
    """

    def __init__(self, label: str, total: float | None, unit: str, stays: bool = False) -> None:
        self.at_terminal = sys.stderr.isatty()
        seconds, of_bytes = 1.0 if self.at_terminal else LOG_SECONDS, unit == "byte"
        if self.at_terminal:
            shown: dict[str, Any] = {}
        else:
            shown = {"bar_format": LOG_LINE, "delay": seconds}
        super().__init__(
            desc=label,
            total=total,
            unit="B" if of_bytes else unit,
            unit_scale=of_bytes,
            file=sys.stderr,
            smoothing=0,
            leave=stays and self.at_terminal,
            dynamic_ncols=self.at_terminal,
            mininterval=seconds,
            maxinterval=seconds,
            **shown,
        )

    def start(self, units: float) -> None:
        """Begin anew with `units` done before, which do not count for the rate."""
        self.initial = self.n = self.last_print_n = units
        self.start_t = self.last_print_t = time.time()

    def update(self, n: float | None = 1) -> bool | None:
        with self.get_lock():
            return super().update(n)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.at_terminal:
            return bool(super().display(msg, pos))
        if msg is None:
            say(str(self))
            self.last_print_t = (
                time.time()
            )  # tqdm's refresh every ten seconds reads it but does not set it
        return False

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over the items. Each counts as a unit when the next is requested."""
        for item in items:
            yield item
            self.update()


def format_duration(seconds: float) -> str:
    """Return a duration as `45 s`, `3:07 min` or `1:05 h`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        parts, unit = (rounded, "min")
    else:
        parts, unit = (round(seconds / 60), "h")
    return f"{parts // 60}:{parts % 60:02} {unit}"
