"""Stored floats to float32 and back, a piece of a tensor at a time, in NumPy alone.

Widening is exact; narrowing rounds to nearest, ties to even, as torch does. Buffers are reused within a thread: fresh
memory costs more in page faults than the arithmetic on it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from pipeline.errors import PipelineError

T = TypeVar("T")
PIECE = 2**17  # entries worked on together: a handful of such buffers stays in a core's cache
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # bfloat16 as its bits: NumPy has no such type
_LARGEST_BITS = {
    "F32": 0x7F800000,
    "BF16": 0x7F7F8000,
    "F16": 0x477FF000,
}  # of float32: from here on stored as infinite


class Buffers(threading.local):
    """Arrays by name, one set a thread. The content of a name is valid until it is requested again."""

    def __init__(self) -> None:
        self.held: dict[str, np.ndarray] = {}
        self.views: dict[Any, np.ndarray] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        view = self.views.get((name, shape, dtype))
        if view is None:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if name not in self.held or self.held[name].nbytes < size:
                self.held[name] = np.empty(size, np.uint8)
                self.views = {key: cached for key, cached in self.views.items() if key[0] != name}
            view = self.views[name, shape, dtype] = self.held[name][:size].view(dtype).reshape(shape)
        return view


buffers = Buffers()


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a tensor processed as a matrix: output by input features; a vector is one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of about PIECE entries and never less than a row."""
    rows, columns = matrix(shape)
    step = max(1, PIECE // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows if columns else 0, step))


def widen(stored: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """The values of a stored array (BF16 as its bits) as float32, into `out` of the same shape."""
    if dtype == "BF16":
        bits = out.view(np.uint32)
        np.copyto(bits, stored)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, stored)


def squared_rounding_error(exact: np.ndarray, stored: np.ndarray, dtype: str) -> np.ndarray:
    """(sum of squared errors, sum of squares) of float32 values that were stored narrower."""
    error = buffers("lost", exact.shape)
    widen(stored, dtype, error)
    error -= exact
    return np.array([np.vdot(error, error), np.vdot(exact, exact)], np.float64)


def narrow(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """float32 values as they are stored; `values` may be overwritten, the result is a buffer of this thread.

    Raises PipelineError, naming the tensor, where one is not finite as stored: NaN, infinite, or too large for float16.
    """
    bits, spare = values.view(np.uint32), buffers("narrow bits", values.shape, np.uint32)
    np.bitwise_and(bits, 0x7FFFFFFF, out=spare)
    if spare.size and int(spare.max()) >= _LARGEST_BITS[dtype]:
        raise PipelineError(f"{name} is not finite after merging as {dtype}: check sources and merge.dtype")
    if dtype == "F32":
        return values
    stored = buffers("narrow", values.shape, STORED[dtype])
    if dtype == "BF16":  # half of the last place kept, and one more where that is odd: nearest, ties to even
        np.right_shift(bits, 16, out=spare)
        np.bitwise_and(spare, 1, out=spare)
        np.add(spare, 0x7FFF, out=spare)
        np.add(spare, bits, out=spare)
        np.right_shift(spare, 16, out=spare)
        np.copyto(stored, spare, casting="unsafe")
    else:
        np.copyto(stored, values, casting="unsafe")
    return stored


def in_threads(tasks: Sequence[Callable[[], T]], threads: int | None = None) -> list[T]:
    """The results of tasks that do not depend on one another, in their order; the first error stops what has not begun.

    Each task works alone, so a core busy with other work delays only its own tasks. Results do not depend
    on the number of threads. None: one thread per core, at most eight.
    """
    count = threads or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if count == 1 or len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(min(count, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
        failed = [error for task in futures if not task.cancelled() and (error := task.exception())]
        if failed:
            raise failed[0]
        return [future.result() for future in futures]
