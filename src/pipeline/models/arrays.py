"""Stored floats as NumPy arrays, a piece of a tensor at a time; bfloat16 is a dtype of
`ml_dtypes`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from pipeline.errors import PipelineError
from pipeline.files import cores

Item = TypeVar("Item")
Result = TypeVar("Result")
PIECE = 2**17  # entries worked on together: a handful of such arrays stays in a core's cache
STORED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_EXPONENT = {  # item type and the bits that are all ones in infinities and NaNs
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let malloc keep what is freed for the next array: page faults cost as much as the arithmetic
    on fresh memory.

    Elsewhere than in glibc nothing changes but the time.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_TRIM_THRESHOLD, 2**28)


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a tensor processed as a matrix: output by input features; a vector is one
    row.
    """
    if len(shape) > 1:
        return (shape[0], math.prod(shape[1:]))
    return (1, math.prod(shape))


def pieces(shape: tuple[int, ...], entries: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of rows, each of about `entries` (PIECE) and never less than a row."""
    rows, columns = matrix(shape)
    step = max(1, (entries or PIECE) // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows if columns else 0, step))


def is_finite(stored: Any, dtype: str) -> bool:
    """Whether no value of an array, or of a piece of a tensor's bytes, is NaN or infinite: has an
    exponent of ones.
    """
    item, ones = _EXPONENT.get(dtype, ("u1", None))
    bits = np.frombuffer(
        stored.reshape(-1).view("u1") if isinstance(stored, np.ndarray) else stored, item
    )
    return ones is None or not bits.size or bool((bits & ones).max() != ones)


def narrow(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """float32 values as they are stored, rounded to nearest, ties to even.

    Raises PipelineError, naming the tensor, where one is not finite as stored: NaN, infinite, or
    too large for float16.
    """
    with np.errstate(over="ignore"):
        stored = values.astype(STORED[dtype], copy=False)
    if not is_finite(stored, dtype):
        raise PipelineError(
            f"{name} is not finite after merging as {dtype}: check sources and merge.dtype"
        )
    return stored


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> list[Result]:
    """function(item) of each, in their order; an error cancels what has not begun.

    None: a thread per core, at most eight.
    """
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads or min(8, cores())) as pool:
        return list(pool.map(function, items))
