"""How many rows a file has, and their tokens by a sample of them: the inputs of estimates."""

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
def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def rows_of(path: Path, source: Source) -> int | None:
    """Number of rows that a source takes from a JSON lines file; None for other formats and for a missing file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    return count_in_language(path, source.language) if source.rows == "aya" and source.language else count_lines(path)


@lru_cache(maxsize=256)
def count_in_language(path: Path, code: str) -> int:
    source = Source(rows="aya", language=code)
    with open(path, encoding="utf-8") as file:
        return sum(is_wanted(json.loads(line), source) for line in file if line.strip())


@lru_cache(maxsize=1024)
def sampled_lengths(file: Path, columns: tuple[str, ...], tokenizer: Path | None) -> tuple[float, ...]:
    """Sorted numbers of tokens of a file's first rows, in these columns or in all that hold text."""
    with open(file, encoding="utf-8") as rows:
        texts = [text_of(json.loads(row), columns) for row, _ in zip(rows, range(SAMPLE), strict=False) if row.strip()]
    if tokenizer is None:
        return tuple(sorted(len(text.encode()) / BYTES for text in texts))
    return tuple(sorted(len(encoding.ids) for encoding in load_tokenizer(tokenizer).encode_batch(texts)))


@lru_cache(maxsize=4)
def load_tokenizer(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer))


def text_of(row: Any, columns: tuple[str, ...]) -> str:
    values = [row.get(column) for column in columns] if columns else list(row.values())
    return "\n".join(value for value in values if isinstance(value, str))


def longest_of(lengths: Sequence[float], count: int, limit: float) -> float:
    """Expected length of the longest of `count` rows drawn from a sample, each cut to `limit`: a padded batch's."""
    shares = [(rank / len(lengths)) ** count for rank in range(len(lengths) + 1)]
    parts = zip(lengths, shares, shares[1:], strict=False)
    return sum(min(length, limit) * (share_up_to - share_below) for length, share_below, share_up_to in parts)
