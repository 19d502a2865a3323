"""How many rows a file has, and how many tokens they are, by a sample of them: what estimates are made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.sources import is_wanted

BYTES = 4.0  # of text a token, where no tokenizer is at hand
SAMPLE = 64  # rows


@lru_cache(maxsize=4096)
def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def rows_of(path: Path, source: Source) -> int | None:
    """Rows that a source gives of a file of JSON lines; None of another format, and of a file that is not there yet."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    return in_language(path, source.language) if source.rows == "aya" and source.language else lines(path)


@lru_cache(maxsize=256)
def in_language(path: Path, code: str) -> int:
    source = Source(rows="aya", language=code)
    with open(path, encoding="utf-8") as file:
        return sum(is_wanted(json.loads(line), source) for line in file if line.strip())


@lru_cache(maxsize=1024)
def sampled(file: Path, columns: tuple[str, ...], tokenizer: Path | None) -> tuple[float, ...]:
    """Tokens of each of a file's first rows, of these columns or of all that is text, sorted."""
    with open(file, encoding="utf-8") as rows:
        texts = [text_of(json.loads(row), columns) for row, _ in zip(rows, range(SAMPLE), strict=False) if row.strip()]
    if tokenizer is None:
        return tuple(sorted(len(text.encode()) / BYTES for text in texts))
    return tuple(sorted(len(one.ids) for one in loaded(tokenizer).encode_batch(texts)))


@lru_cache(maxsize=4)
def loaded(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer))


def text_of(row: Any, columns: tuple[str, ...]) -> str:
    values = [row.get(column) for column in columns] if columns else list(row.values())
    return "\n".join(value for value in values if isinstance(value, str))


def longest_of(lengths: Sequence[float], count: int, most: float) -> float:
    """The mean of the longest of `count` rows that are drawn from a sample, each cut to `most`: what a batch is padded
    to."""
    share = [(place / len(lengths)) ** count for place in range(len(lengths) + 1)]
    parts = zip(lengths, share, share[1:], strict=False)
    return sum(min(length, most) * (after - before) for length, before, after in parts)
