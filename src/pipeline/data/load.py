"""Where the rows of a source come from: a file below data_root, a repository on the Hub, or one file elsewhere.

Whatever is wrong with them is reported in one sentence. `datasets` refuses repositories that hold a loading
script, whatever files are requested; `files` of a source reads their raw files, past the script.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.rows import JSON_COLUMNS
from pipeline.data.sources import (
    READERS,
    Example,
    Row,
    Unusable,
    is_blank,
    is_text,
    is_wanted,
    may_be_blank,
    source_columns,
)
from pipeline.errors import PipelineError
from pipeline.hub.addresses import plain_addresses, without_credentials
from pipeline.hub.reach import reach_or_offline
from pipeline.progress import Bar

MOST_CANDIDATES = 10_000_000  # rows looked at: their digests and places stay below 2 GB; of more, a sample is drawn
SHUFFLE_BUFFER = 10_000  # rows of a stream that are shuffled at a time, besides the order of its files
BUILDERS = "3"  # raised when data/lines.py reads otherwise: `datasets` keeps what was read under it
LOADING_ERRORS = (OSError, RuntimeError, ValueError, TypeError, EOFError, StopIteration)  # what datasets lets through
LIBRARIES = (
    "datasets",
    "huggingface_hub",
    "httpx",
    "httpx2",
    "pyarrow",
    "yaml",
    "zlib",
)  # whose errors are put in words
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass
class Rows:
    """An iteration over rows, how many there will be (None: not known before the end), and of how many."""

    rows: Iterator[Row]
    columns: list[str]
    count: int | None = None
    sampled_from: int | None = None  # rows there are, where only a sample is looked at


def read_source(
    name: str,
    source: Source,
    data_root: Path | None,
    seed: int = 0,
    locked: list[Path] | None = None,
    counts: dict[str, int] | None = None,
    row_counts: list[int | None] | None = None,
    bar: Bar | None = None,
) -> Iterator[Example | Unusable]:
    """The examples of a source, in its order (a stream's is shuffled by the seed); the reason for a row without any.

    locked: its files in the Hub's cache. counts: gets sampled_from, the rows there are, where only a sample is read.
    there: gets how many rows are read, None where that is not known. bar: counts them.

    Raises:
        PipelineError: the source is missing, unreadable or empty, or lacks a column.
    """
    required = source_columns(name, source)
    with readable_errors(name, source):
        opened = open_rows(name, source, data_root, seed, locked)
        missing = [column for column in required if column not in opened.columns]
        if missing and opened.columns:
            raise PipelineError(
                f"source {name} has no column {', '.join(missing)}: it has {', '.join(opened.columns)}; "
                + (f"it must look like {source.hub}" if source.hub else "change the file, or what reads it")
            )
        if opened.sampled_from and counts is not None:
            counts["sampled_from"] = opened.sampled_from
        if row_counts is not None:
            row_counts.append(opened.count)
        any_row = False
        for row in bar.over(opened.rows) if bar else opened.rows:
            if is_wanted(row, source):
                any_row = True
                yield example_of(row, source, required, counts)
    if not any_row:
        in_language = f" in language {source.language}" if source.language else ""
        raise PipelineError(
            f"source {name} has no rows{in_language}: give another file under data_root, or another expert"
        )


def example_of(row: Row, source: Source, required: list[str], counts: dict[str, Any] | None) -> Example | Unusable:
    """What a row teaches: nothing where a column that its text is made of is blank, which `counts` has by column."""
    if source.rows != "conversation" and not all(is_text(row[column]) for column in required):
        return "not_text"
    blank = [column for column in required if is_blank(row[column]) and column not in may_be_blank(source)]
    if blank and counts is not None:
        blanks = counts.setdefault("blank", {})
        blanks |= {column: blanks.get(column, 0) + 1 for column in blank}
    if blank:
        return "empty"
    reading = READERS[source.rows](row, source)
    if isinstance(reading, dict) and (left_out := reading.pop("left_out", 0)) and counts is not None:
        counts["messages_left_out"] = counts.get("messages_left_out", 0) + left_out
    return reading


def open_rows(name: str, source: Source, data_root: Path | None, seed: int, locked: list[Path] | None) -> Rows:
    limit = min(source.candidates or MOST_CANDIDATES, MOST_CANDIDATES)
    if data_root is not None:
        path = local_file(source, data_root)
        if path.suffix == ".jsonl":
            return json_lines(path, limit, seed)
        return of_dataset(open_packaged(source, [str(path)]), limit, seed, path)
    if locked is not None:
        return of_dataset(open_packaged(source, [str(path) for path in locked]), limit, seed, source.hub or locked[0])
    if source.url is not None:
        return of_dataset(open_packaged(source, [source.url]), limit, seed, plain_addresses(source.url))
    if source.hub is None:
        raise PipelineError(f"source {name} is on no hub: give data_root, a folder that holds {source.file}")
    with nullcontext() if Path(source.hub).is_dir() else reach_or_offline(source.hub):
        return of_dataset(of_repository(source), limit, seed, source.hub)


def of_repository(source: Source) -> Any:
    """What `datasets` makes of a repository, or of some of its raw files. CSV is read as text, as files are."""
    if source.files is not None:
        return open_packaged(source, [raw_files(source)])
    from datasets import load_dataset_builder

    return build_dataset(
        load_dataset_builder(source.hub, source.hub_config, revision=source.revision), source, ("Csv",)
    )


def build_dataset(builder: Any, source: Source, replaced: Container[str]) -> Any:
    """The dataset of a builder; of those of the names in `ours`, as data/lines.py reads the same files."""
    from pipeline.data.lines import Cells, Lines, Objects

    names = (base.__name__ for base in type(builder).__mro__)  # they are subclassed
    kind = next((name for name in names if name in replaced), None)
    if kind == "Csv":
        builder = Cells(data_files=builder.config.data_files, delimiter=builder.config.sep, hash=BUILDERS)
    elif kind:
        builder = {"Text": Lines, "Json": Objects}[kind](data_files=builder.config.data_files, hash=BUILDERS)
    if source.stream:
        return builder.as_streaming_dataset(source.split)
    builder.download_and_prepare()
    return builder.as_dataset(source.split)


def raw_files(source: Source) -> str:
    """Where the files of a repository are, past its loading script: on the Hub, or below a folder."""
    assert source.hub is not None
    if Path(source.hub).is_dir():
        return f"{source.hub}/{source.files}"
    return f"hf://datasets/{source.hub}{f'@{source.revision}' if source.revision else ''}/{source.files}"


def open_packaged(source: Source, files: list[str]) -> Any:
    """Files through the builder of their format. Bitext is read as lines: a lone quote is a letter in it."""
    from datasets import load_dataset_builder

    kind = "text" if source.rows == "nllb" else source.format or format_of(files[0])
    tabs = {"sep": "\t"} if kind == "csv" and ".tsv" in files[0] else {}
    builder = load_dataset_builder(kind, data_files={source.split: files}, **tabs)
    if not builder.config.data_files[source.split]:
        raise FileNotFoundError(files[0])
    return build_dataset(builder, source, ("Csv", "Json", "Text"))


def format_of(file: str) -> str:
    suffixes = Path(plain_addresses(file)).suffixes
    formats = [FORMATS[suffix] for suffix in suffixes if suffix in FORMATS]
    if not formats:
        raise PipelineError(f"{file} says no format by its name: give format=json, csv, parquet or text of its source")
    return formats[-1]


def of_dataset(loaded: Any, limit: int, seed: int, origin: Path | str) -> Rows:
    """Rows of a `datasets` object: a stream is shuffled and cut, a set at hand is sampled without order lost."""
    import datasets

    available: int | None = None
    rows: Iterator[Row]
    if isinstance(loaded, datasets.IterableDataset):
        names, count = column_names(loaded), read_stream(loaded, limit)
        rows = islice(unbatch(loaded.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)), limit)
    else:
        if len(loaded) > limit:
            available = len(loaded)
            loaded = loaded.select(draw_indices(available, limit, seed))
        names, count, rows = loaded.column_names, len(loaded), unbatch(loaded)
    if names == JSON_COLUMNS:
        return of_objects(rows, count, available, origin)
    return Rows(rows, names, count, available)


def of_objects(rows: Iterator[Row], count: int | None, available: int | None, origin: Path | str) -> Rows:
    """Rows of lines of JSON. A column that a row lacks is null; the first row says which there are."""
    number, text = JSON_COLUMNS
    objects = (parse_line(row[text], row[number], origin) for row in rows)
    first = next(objects, {})
    names = dict.fromkeys(first)
    return Rows(({**names, **row} for row in chain([first], objects)), list(first), count, available)


def read_stream(loaded: Any, limit: int) -> int | None:
    """The rows that are read of a stream; None where its repository does not say how many it has."""
    split = (loaded.info.splits or {}).get(str(loaded.split))
    return min(limit, split.num_examples) if split is not None and split.num_examples else None


def column_names(loaded: Any) -> list[str]:
    """The column names of a stream; from its first row where it does not know them."""
    return list(loaded.column_names or next(iter(loaded.take(1)), {}))


def unbatch(loaded: Any) -> Iterator[Row]:
    for batch in loaded.iter(batch_size=1000):
        names = list(batch)
        yield from (dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True))


def draw_indices(available: int, count: int, seed: int) -> Any:
    """`most` of `there` indices, each as likely, in order."""
    import numpy as np

    return np.sort(np.random.default_rng(seed).choice(available, size=count, replace=False))


def json_lines(path: Path, limit: int, seed: int) -> Rows:
    with open(path, "rb") as file:
        available = sum(1 for line in file if line.strip())
    keep = iter(draw_indices(available, limit, seed).tolist()) if available > limit else None
    first = next(_json_rows(path, None), {})
    return Rows(_json_rows(path, keep), list(first), min(available, limit), available if keep is not None else None)


def _json_rows(path: Path, keep: Iterator[int] | None) -> Iterator[Row]:
    """The rows of a JSONL file, or those numbered by `keep`. A column that a row lacks is null."""
    index, next_kept, names = -1, next(keep, None) if keep is not None else None, None
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                index += 1
                if keep is not None and index != next_kept:
                    continue
                next_kept = next(keep, None) if keep is not None else None
                row = parse_line(line, number, path)
                names = names or dict.fromkeys(row)
                yield {**names, **row}
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path} is not readable as UTF-8 text: {error}") from error


def parse_line(line: str, number: int, path: Path | str) -> Row:
    """The object of a line of JSON, its decimal numbers as the text that stands there."""
    try:
        row = json.loads(line, parse_float=str)
    except ValueError as error:
        problem = f"line {number} is not JSON ({getattr(error, 'msg', error)})"
        raise PipelineError(f"{path}, {problem}: write one object a line") from error
    if not isinstance(row, dict):
        raise PipelineError(f"{path}, line {number} is a {type(row).__name__}: write one object a line")
    return row


def local_file(source: Source, data_root: Path) -> Path:
    """The file of a source, checked to be below data_root, there and readable."""
    below = os.path.relpath(data_root / source.file, data_root)
    if Path(below).parts[:1] == (os.pardir,):
        name, folder = Path(source.file).name, os.path.dirname(os.path.normpath(data_root / source.file))
        raise PipelineError(
            f"a source's file={source.file} is not below data_root={data_root}: give file={name} and data_root={folder}"
        )
    path = data_root / below
    if not path.is_file():
        raise PipelineError(
            f"data_root={data_root} has no {source.file}: put the file there, or leave data_root out to use the Hub"
        )
    if path.stat().st_size == 0:
        raise PipelineError(f"{path} is empty: it must hold one JSON object a line")
    return path


# ---------------------------------------------------------------------------------------------------- what goes wrong


@contextmanager
def readable_errors(name: str, source: Source) -> Iterator[None]:
    """What `datasets` and the Hub raise, as one sentence that says what to do."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        inner_error = next(
            (cause for cause in causes_of(error) if isinstance(cause, PipelineError)), None
        )  # from inside a builder
        if inner_error:
            raise inner_error from error
        from_library = type(error).__module__.partition(".")[0] in LIBRARIES
        if not from_library and not isinstance(error, LOADING_ERRORS):
            raise
        raise PipelineError(why_unreadable(name, source, error)) from error


def causes_of(error: BaseException) -> list[BaseException]:
    """An error and those that it was raised from, eight at most."""
    errors = [error]
    while (inner := errors[-1].__cause__ or errors[-1].__context__) is not None and len(errors) < 8:
        errors.append(inner)
    return errors


def why_unreadable(name: str, source: Source, error: BaseException) -> str:
    """Why a source could not be read, and the remedy."""
    address = without_credentials(source.hub or source.url or source.file)
    place, knob = f"source {name} ({address})", f"expert.sources.{name}"
    errors = causes_of(error)
    words = " ".join(without_credentials(" ".join(map(str, errors))).split())
    kinds = {type(cause).__name__ for cause in errors}
    if "Dataset scripts are no longer supported" in words:
        return (
            f"{place} holds a loading script, which datasets refuses: give {knob}.files, a pattern of its raw files, "
            f"or {knob}.revision=refs/convert/parquet"
        )
    if "gated dataset" in words or "GatedRepoError" in kinds:
        return f"{place} is gated: accept its terms on its page and log in (hf auth login, or HF_TOKEN), then again"
    if match := re.search(r"BuilderConfig '([^']*)' not found. Available: (\[[^\]]*\])", words):
        hint = f"; if {match[1]} is a split, give {knob}.split={match[1]}"
        return f"{place} has no configuration {match[1]}: there are {match[2]}{hint}"
    if "Config name is missing" in words:
        return f"{place} has several configurations: give {knob}.hub_config ({words[:200]})"
    if match := re.search(r"Unknown split \"([^\"]*)\"\. Should be one of (\[[^\]]*\])", words):
        return f"{place} has no split {match[1]}: there are {match[2]}; give {knob}.split"
    if "Bad split" in words:
        return f"{place} has no split {source.split}: {words[:200]}; give {knob}.split"
    if match := re.search(r"Revision '([^']*)' doesn't exist", words):
        return f"{place} has no revision {match[1]} any more: run stage=prefetch again with prefetch.update=true"
    if kinds & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError"} or "OfflineMode" in words:
        return (
            f"{place} cannot be reached: run the same words with stage=prefetch where it can; data_root=FOLDER reads "
            f"local files ({without_credentials(' '.join(str(error).split()))[:200]})"
        )
    if "UnicodeDecodeError" in kinds or "codec can't decode" in words or "invalid UTF" in words.lower():
        return f"{place} is not UTF-8 text: convert the file, or leave the source out"
    if "DatasetNotFoundError" in kinds:
        return f"{place} is not on the Hub, or hidden from you: {words[:200]}"
    if kinds & {"FileNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError", "StopIteration"}:
        return f"{place} has no such files: check {knob}.hub, {knob}.files and {knob}.file ({words[:200]})"
    if kinds & {"ArrowInvalid", "DatasetGenerationError", "BadGzipFile", "EOFError", "CastError"}:
        return f"{place} could not be read, as a half-written file cannot: fetch it again ({words[:200]})"
    return f"{place} could not be loaded: {words[:300]}; data_root=FOLDER reads local files"
