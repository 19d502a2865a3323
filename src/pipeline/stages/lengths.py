"""The number of rows of a file, and the tokens of a sample of its rows, for estimates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.lines import read_files
from pipeline.data.sources import is_wanted, language_column
from pipeline.errors import PipelineError
from pipeline.text import strings_in

BYTES = 4.0  # bytes of text per token, without a tokenizer
SAMPLE = 64  # rows
READABLE = (".jsonl", ".json", ".csv", ".tsv")  # files whose rows are counted


@lru_cache(maxsize=4096)
def count_lines(path: Path, changed: int) -> int:
    """Return the lines of a file that was `changed` at this time in nanoseconds."""
    content = path.read_bytes()
    return content.count(b"\n") + (content[-1:] not in (b"", b"\n"))


def is_here(source: Source) -> bool:
    """Return True if a source names a file of this machine as its url, whatever data_root is."""
    return source.url is not None and Path(source.url).is_file()


def rows_of(path: Path, source: Source) -> int | None:
    """Return the number of rows that a source reads from a file of JSON, CSV or TSV.

    Rows that the data run will drop, such as copies, count too. The result is None for other
    formats, missing files, and files that cannot be read. The data run's own checks report the
    reason.
    """
    if path.suffix not in READABLE or not path.is_file():
        return None
    return count_rows(path, path.stat().st_mtime_ns, json.dumps(asdict(source)))


@lru_cache(maxsize=256)
def count_rows(path: Path, changed: int, fields: str) -> int | None:
    """Compute `rows_of` for a source with these fields.

    The result is cached until the file changes.
    """
    source = Source(**json.loads(fields))
    if path.suffix == ".jsonl" and not language_column(source):
        return count_lines(path, changed) or None
    with suppress(PipelineError, KeyError):
        return sum(is_wanted(row, source) for row in read_rows(path)) or None
    return None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file of JSON, CSV or TSV. Raises PipelineError like the data run."""
    kind = "json" if file.suffix in (".jsonl", ".json") else "csv"
    separator = "\t" if file.suffix == ".tsv" else ","
    return read_files([str(file)], kind, separator, open)


@lru_cache(maxsize=1024)
def sampled_lengths(file: Path, tokenizer: Path | None) -> tuple[float, ...]:
    """Return the sorted numbers of tokens of a file's first rows.

    A conversation's roles count, in place of the text that a chat template adds.

    Args:
        file: The file.
        tokenizer: A tokenizer.json. None: tokens are estimated from bytes.
    """
    texts = ["\n".join(strings_in(row)) for row in islice(read_rows(file), SAMPLE)]
    if tokenizer is None:
        return tuple(sorted(len(text.encode()) / BYTES for text in texts))
    encodings = load_tokenizer(tokenizer).encode_batch(texts)
    return tuple(sorted(len(encoding.ids) for encoding in encodings))


@lru_cache(maxsize=4)
def load_tokenizer(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer))


def padded_length(lengths: Sequence[float], rows: int, micro: int, limit: float) -> float:
    """Return the mean positions that a row takes with padding.

    The rows of a step are sorted by length and cut into micro-batches. Each micro-batch is padded
    to its longest row.

    Args:
        lengths: The sorted lengths of a sample.
        rows: The rows of a step.
        micro: The rows of a micro-batch.
        limit: The length that rows are truncated to.
    """
    longest = []
    for rank in range(micro, rows + 1, micro):
        place = int(len(lengths) * (rank - 0.5) / rows)
        longest.append(min(lengths[place], limit))
    return statistics.fmean(longest)
