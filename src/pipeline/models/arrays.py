"""Stored floats as NumPy arrays, a piece of a tensor at a time. `ml_dtypes` provides bfloat16."""

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
PIECE = 2**17  # entries of a piece: a few such arrays fit into a core's cache
STORED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_EXPONENT = {  # the item type, and the bits that are all 1 in infinities and NaNs
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # options of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next array.

    Page faults of fresh memory cost as much as the arithmetic. Without glibc this does nothing.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_TRIM_THRESHOLD, 2**28)


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor seen as a matrix, output by input features.

    A vector is one row.
    """
    if len(shape) > 1:
        return (shape[0], math.prod(shape[1:]))
    return (1, math.prod(shape))


def pieces(shape: tuple[int, ...], entries: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, each of about `entries` (PIECE) entries and at least a row."""
    rows, columns = matrix(shape)
    if not columns:
        return
    step = max(1, (entries or PIECE) // columns)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def is_finite(stored: Any, dtype: str) -> bool:
    """Return True if no value of an array, or of a piece of a tensor's bytes, is NaN or infinite.

    Such values have an exponent of ones.
    """
    if dtype not in _EXPONENT:
        return True
    item, ones = _EXPONENT[dtype]
    if isinstance(stored, np.ndarray):
        stored = stored.reshape(-1).view("u1")
    bits = np.frombuffer(stored, item)
    return not bits.size or bool((bits & ones).max() != ones)


def narrow(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Round float32 values to a dtype, to nearest with ties to even.

    Args:
        values: float32 values.
        dtype: the safetensors dtype.
        name: the tensor, for the message.

    Raises:
        PipelineError: a rounded value is NaN or infinite, for example too large for float16.
    """
    with np.errstate(over="ignore"):
        stored = values.astype(STORED[dtype], copy=False)
    if not is_finite(stored, dtype):
        raise PipelineError(
            f"{name} is not finite after merging as {dtype}. Check the sources and merge.dtype."
        )
    return stored


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> list[Result]:
    """Return function(item) of each item, in their order.

    An error cancels items that have not begun. Without `threads` there is a thread per core, at
    most eight.
    """
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads or min(8, cores())) as pool:
        return list(pool.map(function, items))
