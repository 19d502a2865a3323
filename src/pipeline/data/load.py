"""Where the rows of a source come from: a file below data_root, a repository on the Hub, or one
file elsewhere.

Whatever is wrong with them is reported in one sentence. `datasets` refuses repositories that hold a
loading script, whatever files are requested; `files` of a source reads their raw files, past the
script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
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

SHUFFLE_BUFFER = (
    10_000  # rows of a stream that are shuffled at a time, besides the order of its files
)
LOADING_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    EOFError,
    StopIteration,
)  # what datasets lets through
LIBRARIES = (
    "datasets",
    "huggingface_hub",
    "httpx",
    "httpx2",
    "pyarrow",
    "yaml",
    "zlib",
)  # whose errors are put in words
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


Rows = tuple[Iterator[Row], list[str]]  # and their columns


def open_source(
    name: str,
    source: Source,
    data_root: Path | None,
    seed: int = 0,
    locked: list[Path] | None = None,
) -> Iterator[Row]:
    """Open the rows of a source, in its order; a stream is shuffled by the seed.

    Its first row is read.

    Args: locked: its files in the Hub's cache.

    Raises: PipelineError: the source is missing, unreadable or empty, or lacks a column.
    """
    required = [*source_columns(name, source), *filter(None, [language_column(source)])]
    with readable_errors(name, source):
        rows, columns = open_rows(name, source, data_root, seed, locked)
        rows = (with_nested(row, required) for row in rows)
        first = next(rows, None)
        missing = []
        for column in required:
            if column not in (columns if first is None else first):
                missing.append(column)
        if missing and columns:
            file = local_file(source, data_root) if data_root else source.url
            place = f" ({file})" if file else ""
            raise PipelineError(
                f"source {name}{place} has no column {', '.join(missing)}: it has"
                f" {', '.join(columns)}; "
                + (
                    f"it must look like {source.hub}"
                    if source.hub
                    else "change the file, or what reads it"
                )
            )
        rows = chain([] if first is None else [first], rows)
        first = next((row for row in rows if is_wanted(row, source)), None)
    if first is None:
        in_language = ""
        if source.language:
            in_language = f" in language {source.language}"
        raise PipelineError(
            f"source {name} has no rows{in_language}: give another file under data_root, or another"
            " expert"
        )
    return chain([first], rows)


def read_examples(name: str, source: Source, rows: Iterable[Row]) -> Iterator[Example | Unusable]:
    """Return for each row in the source's language what it teaches, or the reason that it teaches
    nothing.
    """
    required = source_columns(name, source)
    with readable_errors(name, source):
        yield from (example_of(row, source, required) for row in rows if is_wanted(row, source))


def example_of(row: Row, source: Source, columns: dict[str, bool]) -> Example | Unusable:
    """Return what a row teaches: nothing if a column that its text needs is blank.

    Args: columns: see source_columns.
    """
    row = with_nested(row, columns)
    if source.rows != "conversation" and not all(is_text(row[column]) for column in columns):
        return "not_text"
    if any(must_fill and is_blank(row[column]) for column, must_fill in columns.items()):
        return "empty"
    return READERS[source.rows](row, source)


def with_nested(row: Row, columns: Iterable[str]) -> Row:
    """Add the cells of nested columns, such as OPUS' translation.en or translation[en], by the
    names of templates.
    """
    absent = [column for column in columns if column not in row]
    for column in absent:
        value: Any = row
        keys = [key for key in re.split(r"[.\[\]]+", column) if key] or [column]
        for at, key in enumerate(keys):
            if not isinstance(value, dict) or (at == 0 and key not in value):
                break
            value = value.get(key)
        else:
            row = {**row, column: value}
    return row


def open_rows(
    name: str, source: Source, data_root: Path | None, seed: int, locked: list[Path] | None
) -> Rows:
    """As `open_source`, without a look at the rows."""
    if data_root is not None:
        return of_files([str(local_file(source, data_root))], source, seed)
    if locked is not None:
        return of_files([str(path) for path in locked], source, seed)
    if source.url is not None:
        return of_files([source.url], source, seed)
    if source.hub is None:
        raise PipelineError(
            f"source {name} is on no hub: give data_root, a folder that holds {source.file}"
        )
    is_here = Path(source.hub).is_dir()
    if is_here:
        refuse_card(Path(source.hub))
    with nullcontext() if is_here else reach_or_offline(source.hub):
        if source.files is not None:
            return of_files([raw_files(source)], source, seed)
        from datasets import load_dataset_builder

        builder = load_dataset_builder(source.hub, source.hub_config, revision=source.revision)
        return of_builder(builder, source, seed, ("csv",))


def raw_files(source: Source) -> str:
    """Where the files of a repository are, past its loading script: on the Hub, or below a
    folder.
    """
    assert source.hub is not None
    if Path(source.hub).is_dir():
        return f"{source.hub}/{source.files}"
    revision = ""
    if source.revision:
        revision = f"@{source.revision}"
    return f"hf://datasets/{source.hub}{revision}/{source.files}"


def of_files(files: list[str], source: Source, seed: int) -> Rows:
    """Rows of files by their format. Bitext is read as lines: a lone quote is a letter in it."""
    if source.rows == "nllb":
        kind = "text"
    else:
        kind = source.format or format_of(files[0])
    split = source.split.partition("[")[0]
    separator = ","
    if kind == "csv" and ".tsv" in files[0]:
        separator = "\t"
    if kind != "parquet" and all(
        Path(file).suffix in FORMATS and Path(file).is_file() for file in files
    ):
        return of_lines(kind, separator, {split: [[file] for file in files]}, open, source, seed)
    from datasets import load_dataset_builder

    separated = {}
    if kind == "csv":
        separated = {"sep": separator}
    builder = load_dataset_builder(kind, data_files={split: files}, **separated)
    if not builder.config.data_files[split]:
        raise FileNotFoundError(files[0])
    return of_builder(builder, source, seed, ("csv", "json", "text"))


def format_of(file: str) -> str:
    suffixes = Path(plain_addresses(file)).suffixes
    formats = []
    for suffix in suffixes:
        if suffix in FORMATS:
            formats.append(FORMATS[suffix])
    if not formats:
        raise PipelineError(
            f"{file} says no format by its name: give format=json, csv, parquet or text of its"
            " source"
        )
    return formats[-1]


def of_builder(builder: Any, source: Source, seed: int, as_lines: Container[str]) -> Rows:
    """Rows of a builder of `datasets`; of one for a format in `as_lines`, of its files as
    data/lines.py reads them.
    """
    import datasets
    from datasets.utils.file_utils import xopen

    names = (base.__name__.lower() for base in type(builder).__mro__)  # they are subclassed
    kind = next((name for name in names if name in as_lines), None)
    if kind:
        config = datasets.DownloadConfig(
            cache_dir=os.path.join(datasets.config.HF_DATASETS_CACHE, "downloads"),
            use_etag=False,
            extract_on_the_fly=True,
            token=builder.token,
        )
        manager = (
            datasets.StreamingDownloadManager if source.stream else datasets.DownloadManager
        )(download_config=config)
        splits = {str(name): found for name, found in builder.config.data_files.items()}
        read = manager.download_and_extract(splits.get(source.split, []))
        shards = {name: [manager.iter_files(file) for file in read] for name in splits}
        return of_lines(kind, getattr(builder.config, "sep", ","), shards, xopen, source, seed)
    if source.stream:
        loaded = builder.as_streaming_dataset(source.split)
        columns = list(loaded.column_names or next(iter(loaded.take(1)), {}))
        return with_label_names(in_shuffled_order(loaded, source, seed), loaded.features), columns
    builder.download_and_prepare()
    loaded = builder.as_dataset(source.split)
    return with_label_names(unbatch(loaded), loaded.features), loaded.column_names


def with_label_names(rows: Iterator[Row], features: Any) -> Iterator[Row]:
    """Yield rows with the names of their labels in place of the numbers that a ClassLabel stores;
    -1 is none.
    """
    from datasets import ClassLabel

    labels = {}
    for name, kind in (features or {}).items():
        if isinstance(kind, ClassLabel):
            labels[name] = kind.names
    for row in rows:
        for name, names in labels.items():
            number = row[name]
            if isinstance(number, int) and number >= 0:
                row[name] = names[number]
            else:
                row[name] = None
        yield row


def of_lines(
    kind: str, separator: str, splits: dict[str, Any], opener: Any, source: Source, seed: int
) -> Rows:
    """Rows of files of lines.

    The columns are those of the first row; one that another row lacks is null there.
    """
    if source.split not in splits:  # a slice, such as train[:10%], is none
        raise ValueError(f'Unknown split "{source.split}". Should be one of {list(splits)}.')
    read = partial(read_files, kind=kind, separator=separator, opener=opener)
    rows: Iterator[Row] = read(splits[source.split])
    if source.stream:
        from datasets import IterableDataset

        stream = IterableDataset.from_generator(read, gen_kwargs={"shards": splits[source.split]})
        rows = in_shuffled_order(stream, source, seed)
    first = next(rows, {})
    names = dict.fromkeys(first)
    rows = chain([first] if first else [], rows)
    if kind == "json":
        rows = ({**names, **row} for row in rows)
    return rows, list(names)


def in_shuffled_order(stream: Any, source: Source, seed: int) -> Iterator[Row]:
    return islice(unbatch(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)), source.candidates)


def unbatch(loaded: Any) -> Iterator[Row]:
    for batch in loaded.iter(batch_size=1000):
        names = list(batch)
        yield from (
            dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)
        )


def local_file(source: Source, data_root: Path) -> Path:
    """Return the file of a source, checked to be below data_root, there and readable."""
    below = os.path.relpath(data_root / source.file, data_root)
    if Path(below).parts[:1] == (os.pardir,):
        name, folder = (
            Path(source.file).name,
            os.path.dirname(os.path.normpath(data_root / source.file)),
        )
        raise PipelineError(
            f"a source's file={source.file} is not below data_root={data_root}: give file={name}"
            f" and data_root={folder}"
        )
    path = data_root / below
    if not path.is_file():
        raise PipelineError(
            f"data_root={data_root} has no {source.file}: put the file there, or leave data_root"
            " out to use the Hub"
        )
    if path.stat().st_size == 0:
        raise PipelineError(f"{path} is empty: write its rows")
    return path


# --- what goes wrong ---


@contextmanager
def readable_errors(name: str, source: Source) -> Iterator[None]:
    """Turn what `datasets` and the Hub raise into a sentence that says what to do."""
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
    """Return an error and those that it was raised from, eight at most."""
    errors = [error]
    while (inner := errors[-1].__cause__ or errors[-1].__context__) is not None and len(errors) < 8:
        errors.append(inner)
    return errors


# What the words or the kinds of errors hold -> what is wrong, and the remedy; the first that fits
CAUSES = {
    "Dataset scripts are no longer supported": (
        "holds a loading script, which datasets refuses: give {knob}.files, a "
        "pattern of its raw files, or {knob}.revision=refs/convert/parquet"
    ),
    "gated dataset|GatedRepoError": (
        "is gated: accept its terms on its page and log in (hf auth login, or HF_TOKEN), then again"
    ),
    r"BuilderConfig '([^']*)' not found. Available: (\[[^\]]*\])": (
        "has no configuration {0}: there are {1}; if {0} is a split, give {knob}.split={0}"
    ),
    "Config name is missing": "has several configurations: give {knob}.hub_config ({words})",
    r'Unknown split "([^"]*)"\. Should be one of (\[[^\]]*\])': (
        "has no split {0}: there are {1}; give {knob}.split"
    ),
    "Bad split": "has no split {split}: {words}; give {knob}.split",
    "Revision '([^']*)' doesn't exist": (
        "has no revision {0} any more: run stage=prefetch again with prefetch.update=true"
    ),
    "OfflineMode|ConnectionError|ConnectError": (
        "cannot be reached: run the same words with stage=prefetch where it "
        "can; data_root=FOLDER reads local files ({last})"
    ),
    "codec can't decode|[iI]nvalid UTF": (
        "is not UTF-8 text: convert the file, or leave the source out"
    ),
    "DatasetNotFoundError": "is not on the Hub, or hidden from you: {words}",
    "FileNotFoundError|DataFilesNotFoundError|EmptyDatasetError|StopIteration": (
        "has no such files: check {knob}.hub, {knob}.files and {knob}.file ({words})"
    ),
    "ArrowInvalid|DatasetGenerationError|BadGzipFile|EOFError|CastError": (
        "could not be read, as a half-written file cannot: fetch it again ({words})"
    ),
    "": "could not be loaded: {words}; data_root=FOLDER reads local files",
}


def why_unreadable(name: str, source: Source, error: BaseException) -> str:
    """Why a source could not be read, and the remedy."""
    errors = causes_of(error)
    last, words = (
        one_line(without_credentials(" ".join(map(str, some)))) for some in ([error], errors)
    )
    kinds = " ".join(type(cause).__name__ for cause in errors)
    told = {
        "knob": f"expert.sources.{name}",
        "split": source.split,
        "words": words[:200],
        "last": last[:200],
    }
    matches = (
        (re.search(pattern, f"{words} {kinds}"), sentence) for pattern, sentence in CAUSES.items()
    )
    match, sentence = next((match, sentence) for match, sentence in matches if match)
    address = without_credentials(source.hub or source.url or source.file)
    return f"source {name} ({address}) {sentence.format(*match.groups(), **told)}"
