"""One line of progress per run, on standard error: the work done, its speed, and the remaining time.

At a terminal it is a bar, redrawn each second; elsewhere, as in a log, a line every 30 seconds. Progress bars and
messages of libraries are silenced (`quiet`).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
LOG_SECONDS = 30.0  # seconds between two lines without a terminal
WIDTH = 20  # of the bar, in characters
KNOWN = 0.03  # share of the work after which its rate tells the remaining time
SILENT = {  # read by the libraries on import, in this process and its children
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers reads it too
    "HF_HUB_VERBOSITY": "error",  # each retry would be a warning; a final failure is one sentence of ours
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "LMEVAL_LOG_LEVEL": "ERROR",
}


def quiet() -> None:
    """Silence the output of libraries, unless the environment sets it otherwise."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    warnings.showwarning = lambda message, category, file, line, *_: say(
        warnings.formatwarning(message, category, file, line, "").rstrip()
    )
    for name in ("torchao", "torch.utils._pytree"):  # warnings about missing GPU kernels at each import
        logging.getLogger(name).setLevel(logging.ERROR)


_screen = threading.RLock()  # what is on standard error is written by one thread at a time
_drawn = ""  # the line of progress that a terminal shows


def say(line: str) -> None:
    """Print a line above the line of progress."""
    with _screen:
        write_error(f"\r\033[K{line}\n{_drawn}" if sys.stderr.isatty() else f"{line}\n")


def draw_line(line: str, stays: bool = False) -> None:
    """Replace the line of progress of a terminal, cut to its width; stays: it is final, and others are drawn below."""
    global _drawn
    with _screen:
        shown = line[: terminal_columns()]
        write_error(f"\r\033[K{shown}" + "\n" * stays)
        _drawn = "" if stays else shown


def terminal_columns() -> int:
    """The width of a line that a terminal does not break."""
    return shutil.get_terminal_size().columns - 1


def write_error(text: str) -> None:
    """Write all of a text at once: `print` writes the end of a line separately, which another thread may precede."""
    sys.stderr.write(text)
    sys.stderr.flush()


@contextmanager
def announced(line: str, seconds: float = 2.0) -> Iterator[None]:
    """Print a line once if what is inside takes longer than `seconds`."""
    timer = threading.Timer(seconds, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_recorded: list[str] | None = None


def warn(line: str) -> None:
    """Print a warning above the progress bar; inside `recorded_warnings` it is recorded too."""
    say(f"warning: {line}")
    if _recorded is not None:
        _recorded.append(line)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """A list to which each warning of this process is added inside the context."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


class Bar:
    """Progress of `total` units of work, shown from start() to close(), or as a context. Thread-safe.

    total: None where it is unknown before the end. unit: in the singular; `byte` is printed as kB, MB, GB. stays:
    whether the last line remains at a terminal. at_once: units that are worked on together, each counted when it is
    done; those under way count half for the remaining time, which is unknown before as many are done.
    """

    def __init__(self, label: str, total: float | None, unit: str, stays: bool = False) -> None:
        self.label, self.total, self.unit, self.stays = label, total, unit, stays
        self.done, self.first, self.note, self.at_once = 0.0, 0.0, "", 0.0
        self.begun = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._at_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, units: float = 0) -> None:
        """Begin; `units`: done before, which do not count for the rate."""
        self.begun, self.done, self.first = time.monotonic(), units, units
        if self._at_terminal:
            draw_line(str(self))
        threading.Thread(target=self._keep_showing, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            if self._at_terminal:
                draw_line(str(self) if self.stays else "", self.stays)

    def update(self, count: float = 1) -> None:
        with self._lock:
            self.done += count

    def count_when_done(self, work: Callable[[], T], units: float) -> Callable[[], T]:
        """The same work, which counts `units` when it is done."""

        def run_and_count() -> T:
            result = work()
            self.update(units)
            return result

        return run_and_count

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over the items, each counted as a unit when the next is requested."""
        for item in items:
            yield item
            self.update()

    def to(self, units: float) -> None:
        """Set the number of units done."""
        with self._lock:
            self.done = units

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def _keep_showing(self) -> None:
        while not self._over.wait(1.0 if self._at_terminal else LOG_SECONDS):
            with self._lock:
                if self._over.is_set():
                    return
                if self._at_terminal:
                    draw_line(str(self))
                else:
                    say(str(self))

    def _time_left(self, units: float, seconds: float, total: float) -> str:
        done, half = units - self.first, min(self.at_once, max(total - units, 0)) / 2
        if done <= 0 or done < max(self.at_once, KNOWN * (total - self.first)):
            return "?"
        return format_duration(max(total - units - half, 0) * seconds / (done + half))

    def __str__(self) -> str:
        seconds, units = self.elapsed, self.done
        items = [f"{format_amounts(units, self.total, self.unit)} in {format_duration(seconds)}"]
        rate = (units - self.first) / seconds if seconds > 0 else 0.0
        if rate > 0:
            items.append(format_speed(rate, self.unit))
        if self.total is not None:
            items.append(f"{self._time_left(units, seconds, self.total)} left")
        items += [self.note] if self.note else []
        bar = ""
        if self._at_terminal and self.total:
            full = round(WIDTH * min(units / self.total, 1))
            bar = "█" * full + "░" * (WIDTH - full) + " "
        return f"{self.label}: {bar}{', '.join(items)}"


def format_amounts(count: float, total: float | None, unit: str) -> str:
    """`3/40 questions`, `1.5/16.1 GB`."""
    if unit == "byte":
        size, name = byte_unit(total or count)
        return f"{count / size:.1f}{f'/{total / size:.1f}' if total is not None else ''} {name}"
    of = f"/{total:,.0f}" if total is not None else ""
    return f"{int(count):,}{of} {unit}s"


def format_speed(rate: float, unit: str) -> str:
    """`5.5 steps/s`, `2.0 GB/s`, or `12 s a question` below one per second."""
    if unit == "byte":
        size, name = byte_unit(rate)
        return f"{rate / size:.1f} {name}/s"
    if rate < 1:
        return f"{1 / rate:.1f} s a {unit}"
    return f"{rate:,.{0 if rate >= 10 else 1}f} {unit}s/s"


def byte_unit(count: float) -> tuple[float, str]:
    """(bytes, name) of the unit for a number of bytes."""
    return next((unit for unit in ((1e9, "GB"), (1e6, "MB")) if count >= unit[0]), (1e3, "kB"))


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle of a longer text is left out."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[len(text) - (width - 1) // 2 :]}"


def format_duration(seconds: float) -> str:
    """`45 s`, `3:07 min`, `1:05 h`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    parts, unit = (rounded, "min") if rounded < 3600 else (round(seconds / 60), "h")
    return f"{parts // 60}:{parts % 60:02} {unit}"
