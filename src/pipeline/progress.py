"""One line of progress a run, on standard error: what is done of its work, how fast, and the time that is left.

At a terminal it is a bar, drawn anew each second; elsewhere, as in a log, a line every 30 seconds. The bars and the
chatter of libraries are silenced (`quiet`).
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
EVERY = 30.0  # seconds between two lines where there is no terminal
WIDTH = 20  # of the bar, in characters
SILENT = {  # read by the libraries when they are imported, here and in processes that are started from here
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers asks it too
    "HF_HUB_VERBOSITY": "error",  # each retry is a warning: what fails in the end is one sentence of ours
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "LMEVAL_LOG_LEVEL": "ERROR",
}


def quiet() -> None:
    """Silence what libraries show of their own work; what the environment asks for stands above it."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    for name in ("torchao", "torch.utils._pytree"):  # kernels for GPUs that are absent, at each import
        logging.getLogger(name).setLevel(logging.ERROR)


def say(line: str) -> None:
    """A line of its own, above the bar that is being drawn."""
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


_recorded: list[str] | None = None


def warn(line: str) -> None:
    """A warning, on a line of its own; inside `recorded_warnings` it is kept too."""
    say(f"warning: {line}")
    if _recorded is not None:
        _recorded.append(line)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Gives a list that each warning of this process is added to, inside."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def draw(line: str) -> None:
    """At a terminal: the line that is being drawn, cut to its width, in place of what stood there."""
    print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


class Bar:
    """Work of which `total` units are to be done, shown from start() to close(), or as a context. Any thread counts.

    total: None where it is not known before the end. unit: in the singular; `byte` is written as kB, MB, GB. stays:
    whether the last line at a terminal is left there at the end.
    """

    def __init__(self, what: str, total: float | None, unit: str, stays: bool = False) -> None:
        self.what, self.total, self.unit, self.stays = what, total, unit, stays
        self.done, self.first, self.note = 0.0, 0.0, ""
        self.begun = time.monotonic()
        self.left: Callable[[], float | None] | None = None  # seconds; null: by the rate of what was done
        self._lock, self._over = threading.Lock(), threading.Event()
        self._at_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def start(self, done: float = 0) -> None:
        """`done`: what was done before; the rate is that of what comes after."""
        self.begun, self.done, self.first = time.monotonic(), done, done
        if self._at_terminal:
            draw(str(self))
        threading.Thread(target=self._keep_showing, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            if self._at_terminal:
                draw(str(self) if self.stays else "")
                if self.stays:
                    print(file=sys.stderr, flush=True)

    def update(self, count: float = 1) -> None:
        with self._lock:
            self.done += count

    def counting(self, work: Callable[[], T], units: float) -> Callable[[], T]:
        """The same work, counted when it is done."""

        def counted() -> T:
            found = work()
            self.update(units)
            return found

        return counted

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each counted as a unit when the next is asked for."""
        for item in items:
            yield item
            self.update()

    def to(self, done: float) -> None:
        """So much is done in all."""
        with self._lock:
            self.done = done

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return time.monotonic() - self.begun

    def _keep_showing(self) -> None:
        while not self._over.wait(1.0 if self._at_terminal else EVERY):
            with self._lock:
                if self._over.is_set():
                    return
                if self._at_terminal:
                    draw(str(self))
                else:
                    print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds, done = self.elapsed, self.done
        told = [f"{amounts(done, self.total, self.unit)} in {duration(seconds)}"]
        rate = (done - self.first) / seconds if seconds > 0 else 0.0
        if rate > 0:
            told.append(speed(rate, self.unit))
            if self.total is not None:
                left = self.left() if self.left else max(self.total - done, 0) / rate
                told += [f"{duration(left)} left"] if left is not None else []
        told += [self.note] if self.note else []
        bar = ""
        if self._at_terminal and self.total:
            full = round(WIDTH * min(done / self.total, 1))
            bar = "█" * full + "░" * (WIDTH - full) + " "
        return f"{self.what}: {bar}{', '.join(told)}"


class Pace:
    """The time left of answers that are generated in batches: prompts first (prefill), then a token a step (decoding).

    The two are timed apart. A batch is expected to take as many steps as those before it did, the first one all that an
    answer may have.
    """

    def __init__(self) -> None:
        self.prefill, self.decode = 0.0, 0.0  # seconds
        self.questions, self.steps = 0.0, 0  # whose prefill, and steps that were timed
        self.of_batches: list[int] = []  # steps of finished batches
        self.size, self.room, self.taken, self.last = 0.0, 0, 0, 0.0

    def begin(self, size: float, room: int) -> None:
        """A batch of so many questions, whose answers have at most `room` tokens."""
        self.size, self.room, self.taken, self.last = size, room, 0, time.monotonic()

    def step(self) -> None:
        """A token of each answer of the batch is there; the first ends the prefill."""
        now = time.monotonic()
        if self.taken:
            self.decode, self.steps = self.decode + now - self.last, self.steps + 1
        else:
            self.prefill, self.questions = self.prefill + now - self.last, self.questions + self.size
        self.taken, self.last = self.taken + 1, now

    def end(self) -> None:
        self.of_batches.append(self.taken)
        self.taken = self.room = 0

    def left(self, waiting: float, batch: float) -> float | None:
        """Seconds, with `waiting` questions that no batch has begun with, in batches of `batch`; None until both are
        timed."""
        if not self.steps or not self.questions:
            return None
        expected = sum(self.of_batches) / len(self.of_batches) if self.of_batches else self.room
        here = max(expected - self.taken, 0) if self.room else 0.0
        steps = here + math.ceil(waiting / batch - 1e-9) * expected
        prompts = waiting + (self.size if self.room and not self.taken else 0)
        return prompts * self.prefill / self.questions + steps * self.decode / self.steps


def amounts(done: float, total: float | None, unit: str) -> str:
    """`3/40 questions`, `1.5/16.1 GB`."""
    if unit == "byte":
        size, name = scale(total or done)
        return f"{done / size:.1f}{f'/{total / size:.1f}' if total is not None else ''} {name}"
    of = f"/{total:,.0f}" if total is not None else ""
    return f"{int(done):,}{of} {unit}s"


def speed(rate: float, unit: str) -> str:
    """`5.5 steps/s`, `2.0 GB/s`, or `12 s a question` below one a second."""
    if unit == "byte":
        size, name = scale(rate)
        return f"{rate / size:.1f} {name}/s"
    if rate < 1:
        return f"{1 / rate:.1f} s a {unit}"
    return f"{rate:,.{0 if rate >= 10 else 1}f} {unit}s/s"


def scale(count: float) -> tuple[float, str]:
    return next((one for one in ((1e9, "GB"), (1e6, "MB")) if count >= one[0]), (1e3, "kB"))


def duration(seconds: float) -> str:
    """`45 s`, `3:07 min`, `1:05 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    more, unit = (whole, "min") if whole < 3600 else (round(seconds / 60), "h")
    return f"{more // 60}:{more % 60:02} {unit}"
