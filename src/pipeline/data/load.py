"""The rows of a source: a file below data_root, a repository on the Hub, or a file elsewhere.

All problems are reported in one sentence. `datasets` refuses repositories with a loading script,
even if other files are requested. `files` of a source reads their raw files in spite of the script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pipeline.benchmarks.task_safety import refuse_card
from pipeline.config.data import Source
from pipeline.data.lines import read_files
from pipeline.data.rows import Unusable, is_blank, is_text
from pipeline.data.sources import (
    READERS,
    Example,
    Row,
    is_wanted,
    language_column,
    source_columns,
)
from pipeline.errors import PipelineError
from pipeline.hub.addresses import plain_addresses, without_credentials
from pipeline.hub.reach import reach_or_offline
from pipeline.text import one_line

SHUFFLE_BUFFER = 10_000  # rows of a stream that are shuffled together; its files are shuffled too
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def open_source(
    name: str,
    source: Source,
    data_root: Path | None,
    seed: int = 0,
    locked: list[Path] | None = None,
) -> Iterator[Row]:
    """Open the rows of a source in its order, and read the first row.

    Args:
        name: The source's name.
        source: The source.
        data_root: The folder of local files. None: the Hub or `url`.
        seed: The seed that shuffles a stream.
        locked: The source's files in the Hub's cache.

    Raises:
        PipelineError: The source is missing, unreadable or empty, or lacks a column.
    """
    required = [*source_columns(name, source), *filter(None, [language_column(source)])]
    with readable_errors(name, source):
        rows = (with_nested(row, required) for row in open_rows(source, data_root, seed, locked))
        first = next(rows, None)
    if first is None:
        raise PipelineError(
            f"source {name}{place_of(source, data_root)} has no rows. Choose another file, or"
            " write rows to it."
        )
    missing = [column for column in required if column not in first]
    if missing:
        lacks, has = ", ".join(missing), ", ".join(first)
        raise PipelineError(
            f"source {name}{place_of(source, data_root)} has no column {lacks}. Its columns are"
            f" {has}. Change the file, or the source's templates."
        )
    return chain([first], rows)


def place_of(source: Source, data_root: Path | None) -> str:
    """Return the file of a source in brackets, for messages."""
    if data_root:
        return f" ({local_file(source, data_root)})"
    return f" ({without_credentials(source.url)})" if source.url else ""


def read_examples(name: str, source: Source, rows: Iterable[Row]) -> Iterator[Example | Unusable]:
    """Yield for each row in the source's language its example, or why the row is unusable.

    Raises:
        PipelineError: No row is in the source's language, or a row cannot be read.
    """
    required = source_columns(name, source)
    is_empty = True
    with readable_errors(name, source):
        for row in rows:
            if is_wanted(row, source):
                is_empty = False
                yield example_of(row, source, required)
    if is_empty:
        raise PipelineError(
            f"source {name} has no rows in language {source.language}. Choose another file under"
            " data_root, or another expert."
        )


def example_of(row: Row, source: Source, columns: dict[str, bool]) -> Example | Unusable:
    """Return the example of a row, or the reason why the row is unusable.

    Args:
        row: The row.
        source: The source.
        columns: The result of `source_columns`.
    """
    if source.rows != "conversation":
        for column in columns:
            if not is_text(row[column]):
                return "not_text"
    for column, must_fill in columns.items():
        if must_fill and is_blank(row[column]):
            return "empty"
    return READERS[source.rows](row, source)


def with_nested(row: Row, columns: Iterable[str]) -> Row:
    """Add the cells of nested columns under the names that templates use.

    Examples are OPUS' translation.en and translation[en].
    """
    absent = [column for column in columns if column not in row]
    for column in absent:
        value: Any = row
        keys = list(filter(None, re.split(r"[.\[\]]+", column))) or [column]
        for at, key in enumerate(keys):
            if not isinstance(value, dict) or (at == 0 and key not in value):
                break
            value = value.get(key)
        else:
            row = {**row, column: value}
    return row


def open_rows(
    source: Source, data_root: Path | None, seed: int, locked: list[Path] | None
) -> Iterator[Row]:
    """Open the rows of a source like `open_source`, without checking them."""
    if data_root is not None:
        return of_files([str(local_file(source, data_root))], source, seed)
    if locked is not None:
        return of_files([str(path) for path in locked], source, seed)
    if source.url is not None:
        return of_files([source.url], source, seed)
    if source.hub is None:
        raise PipelineError(
            f"{source.file} is not on the Hub. Set data_root to a folder that has it."
        )
    is_here = Path(source.hub).is_dir()
    if is_here:
        refuse_card(Path(source.hub))
    with nullcontext() if is_here else reach_or_offline(source.hub):
        from datasets import load_dataset_builder
        from datasets.data_files import resolve_pattern
        from datasets.packaged_modules.csv.csv import Csv

        if source.files is not None:
            return of_files(resolve_pattern(raw_files(source), ""), source, seed)
        builder = load_dataset_builder(source.hub, source.hub_config, revision=source.revision)
        if not isinstance(builder, Csv):
            return of_builder(builder, source, seed)
        files = builder.config.data_files
        if source.split not in files:
            raise unknown_split(source, [str(split) for split in files])
        return of_lines("csv", builder.config.sep, files[source.split], source, seed)


def unknown_split(source: Source, known: list[str]) -> ValueError:
    return ValueError(f'Unknown split "{source.split}". Should be one of {known}.')


def raw_files(source: Source) -> str:
    """Return the pattern of a repository's raw files, on the Hub or below a folder."""
    assert source.hub is not None
    if Path(source.hub).is_dir():
        return f"{source.hub}/{source.files}"
    revision = f"@{source.revision}" if source.revision else ""
    return f"hf://datasets/{source.hub}{revision}/{source.files}"


def of_files(files: list[str], source: Source, seed: int) -> Iterator[Row]:
    """Return rows of files by their format.

    Bitext is read as lines, because a single quotation mark is a letter in it.
    """
    if source.rows == "nllb":
        kind = "text"
    else:
        kind = source.format or format_of(files[0])
    split, _, part = source.split.partition("[")
    if kind == "parquet":
        from datasets import load_dataset_builder

        builder = load_dataset_builder("parquet", data_files={split: files})
        return of_builder(builder, source, seed)
    if part:  # slices such as train[:10%] are not supported
        raise unknown_split(source, [split])
    separator = "\t" if ".tsv" in files[0] else ","
    return of_lines(kind, separator, files, source, seed)


def format_of(file: str) -> str:
    suffixes = Path(plain_addresses(file)).suffixes
    formats = [FORMATS[suffix] for suffix in suffixes if suffix in FORMATS]
    if not formats:
        raise PipelineError(
            f"The name of {file} does not tell its format. Set format of its source to json, csv,"
            " parquet or text."
        )
    return formats[-1]


def of_builder(builder: Any, source: Source, seed: int) -> Iterator[Row]:
    """Return rows of a builder of `datasets`."""
    if source.stream:
        loaded = builder.as_streaming_dataset(source.split)
        return with_label_names(in_shuffled_order(loaded, source, seed), loaded.features)
    builder.download_and_prepare()
    loaded = builder.as_dataset(source.split)
    return with_label_names(unbatch(loaded), loaded.features)


def with_label_names(rows: Iterator[Row], features: Any) -> Iterator[Row]:
    """Yield rows with the names of their labels in place of a ClassLabel's numbers.

    The number -1 becomes None.
    """
    from datasets import ClassLabel

    labels = {}
    for name, kind in (features or {}).items():
        if isinstance(kind, ClassLabel):
            labels[name] = kind.names
    for row in rows:
        for name, names in labels.items():
            number = row[name]
            is_label = isinstance(number, int) and number >= 0
            row[name] = names[number] if is_label else None
        yield row


def of_lines(
    kind: str, separator: str, files: list[str], source: Source, seed: int
) -> Iterator[Row]:
    """Return rows of files that data/lines.py reads.

    The first row has the columns; a column that another row lacks is null there.
    """
    read = partial(read_files, kind=kind, separator=separator, opener=opener_of(files))
    rows: Iterator[Row] = read(files)
    if source.stream:
        from datasets import IterableDataset

        stream = IterableDataset.from_generator(read, gen_kwargs={"files": files})
        rows = in_shuffled_order(stream, source, seed)
    if kind != "json":
        return rows
    first = next(rows, {})
    names = dict.fromkeys(first)
    whole = chain([first] if first else [], rows)
    return ({**names, **row} for row in whole)


def opener_of(files: list[str]) -> Callable[..., Any]:
    """Return `open` for plain local files, and otherwise a function that unpacks and downloads."""
    paths = [Path(file) for file in files]
    if all(path.suffix in FORMATS and path.is_file() for path in paths):
        return open
    from datasets import StreamingDownloadManager
    from datasets.utils.file_utils import xopen

    manager = StreamingDownloadManager()
    return lambda file, mode: xopen(manager.extract(file), mode)


def in_shuffled_order(stream: Any, source: Source, seed: int) -> Iterator[Row]:
    shuffled = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return islice(unbatch(shuffled), source.candidates)


def unbatch(loaded: Any) -> Iterator[Row]:
    for batch in loaded.iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def local_file(source: Source, data_root: Path) -> Path:
    """Return the file of a source, after checking that it is below data_root and readable."""
    file = source.file
    below = os.path.relpath(data_root / file, data_root)
    if Path(below).parts[:1] == (os.pardir,):
        folder = os.path.dirname(os.path.normpath(data_root / file))
        raise PipelineError(
            f"file={file} of a source is not below data_root={data_root}. Set"
            f" file={Path(file).name} and data_root={folder}."
        )
    path = data_root / below
    if not path.is_file():
        raise PipelineError(
            f"data_root={data_root} has no {file}. Put the file there, or leave data_root out to"
            " use the Hub."
        )
    return path


# --- errors ---


@contextmanager
def readable_errors(name: str, source: Source) -> Iterator[None]:
    """Turn errors of `datasets` and the Hub into a PipelineError with a remedy."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:  # libraries raise any class for broken files
        raise PipelineError(why_unreadable(name, source, error)) from error


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that caused it, eight at most."""
    errors: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(errors) < 8:
        errors.append(cause)
        cause = cause.__cause__ or cause.__context__
    return errors


GATED = re.compile("gated dataset|GatedRepoError")
UNREACHABLE = re.compile("OfflineMode|ConnectionError|ConnectError")


def why_unreadable(name: str, source: Source, error: BaseException) -> str:
    """Return the reason why a source could not be read, and the remedy."""
    errors = causes_of(error)
    words = one_line(without_credentials(" ".join(map(str, errors))))[:300].rstrip(".")
    classes = " ".join(type(cause).__name__ for cause in errors)
    address = without_credentials(source.hub or source.url or source.file)
    if GATED.search(f"{words} {classes}"):
        return (
            f"source {name} ({address}) is gated. Accept its terms on its page and log in (hf auth"
            " login, or HF_TOKEN)."
        )
    if UNREACHABLE.search(f"{words} {classes}"):
        last = one_line(without_credentials(str(error)))[:200]
        return (
            f"source {name} ({address}) cannot be reached ({last}). Run the same keys with"
            " stage=prefetch on a machine that reaches it, or set data_root=FOLDER to read local"
            " files."
        )
    return (
        f"source {name} ({address}) could not be loaded ({type(error).__name__}): {words}. Correct"
        f" expert.sources.{name}, or set data_root=FOLDER to read local files."
    )
