"""How many rows a file has, and their tokens by a sample of them: the inputs of estimates."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.lines import read_files
from pipeline.data.load import example_of
from pipeline.data.sources import is_wanted, language_column, source_columns
from pipeline.errors import PipelineError
from pipeline.text import strings_in

BYTES = 4.0  # of text a token, where no tokenizer is at hand
SAMPLE = 64  # rows
LARGE = 10_000_000  # bytes of a file above which its lines are counted, and not what they say
READABLE = (".jsonl", ".json", ".csv", ".tsv")  # files whose rows are counted


@lru_cache(maxsize=4096)
def count_lines(path: Path) -> int:
    content = path.read_bytes()
    return content.count(b"\n") + (content[-1:] not in (b"", b"\n"))


def is_here(source: Source) -> bool:
    """Whether a source is a file of this machine that it names itself, as url, whatever data_root
    is.
    """
    return source.url is not None and Path(source.url).is_file()


def rows_of(path: Path, source: Source) -> int | None:
    """Return the number of rows that a source takes from a file of JSON, CSV or TSV.

    In files that are not large, only usable rows count, and copies count once. None for other
    formats, missing files, and files whose first row cannot be read; the check of the data run says
    why.
    """
    if path.suffix not in READABLE or not path.is_file():
        return None
    return count_rows(path, path.stat().st_mtime_ns, json.dumps(asdict(source)))


@lru_cache(maxsize=256)
def count_rows(path: Path, changed: int, fields: str) -> int | None:
    """As `rows_of`, of a source whose fields are given, read once until the file is changed."""
    source = Source(**json.loads(fields))
    if not is_begun(path):
        return None
    if path.stat().st_size > LARGE and not language_column(source):
        if path.suffix == ".jsonl":
            return count_lines(path)
        return sum(1 for _ in read_rows(path))
    try:
        columns = source_columns(path.name, source)
        examples = []
        for row in read_rows(path):
            if is_wanted(row, source):
                examples.append(example_of(row, source, columns))
    except KeyError:  # a column that is not there, which the data run names
        return None
    return len({json.dumps(example) for example in examples if isinstance(example, dict)}) or None


def is_begun(path: Path) -> bool:
    """Whether a first row can be read."""
    try:
        return next(read_rows(path), None) is not None
    except PipelineError:
        return False


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file of JSON, CSV or TSV. Raises PipelineError as the data run would."""
    kind = "csv"
    if file.suffix in (".jsonl", ".json"):
        kind = "json"
    return read_files([[str(file)]], kind, "\t" if file.suffix == ".tsv" else ",", open)


@lru_cache(maxsize=1024)
def sampled_lengths(
    file: Path, columns: tuple[str, ...], tokenizer: Path | None, rows: int = SAMPLE
) -> tuple[float, ...]:
    """Sorted numbers of tokens of a file's first rows, in these columns or in all that hold
    text.
    """
    texts = [text_of(row, columns) for row in islice(read_rows(file), rows)]
    if tokenizer is None:
        return tuple(sorted(len(text.encode()) / BYTES for text in texts))
    return tuple(
        sorted(len(encoding.ids) for encoding in load_tokenizer(tokenizer).encode_batch(texts))
    )


@lru_cache(maxsize=4)
def load_tokenizer(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer))


def text_of(row: Any, columns: tuple[str, ...]) -> str:
    """Return the texts of a row's cells: of a conversation its roles too, which stand for what a
    template adds.
    """
    return "\n".join(strings_in([row.get(column) for column in columns] if columns else row))


def padded_length(lengths: Sequence[float], rows: int, micro: int, limit: float) -> float:
    """Positions that a row takes on average where the rows of a step are sorted by length and cut
    into micro-batches, each padded to its longest.

    Args:
        lengths: of a sample that the rows are drawn from, sorted; each is cut to `limit`.
        rows, micro: of a step, of a micro-batch.
    """
    shares = shares_of_longest(len(lengths), rows, micro)
    return sum(share * min(length, limit) for share, length in zip(shares, lengths, strict=True))


@lru_cache(maxsize=256)
def shares_of_longest(count: int, rows: int, micro: int) -> tuple[float, ...]:
    """For each of `count` sorted values the share of micro-batches of which it is the longest,
    where a step's `rows` are drawn from them and sorted: differences of binomial tails.
    """

    def up_to(share: float) -> float:
        chances = [
            math.comb(rows, k) * share**k * (1 - share) ** (rows - k) for k in range(rows + 1)
        ]
        return statistics.fmean(sum(chances[longest:]) for longest in range(micro, rows + 1, micro))

    edges = [up_to(number / count) for number in range(count + 1)]
    return tuple(upper - lower for lower, upper in pairwise(edges))
