"""The datasets: a short function a dataset turns its rows into (prompt, completion), or into text.

Schemas are those of the published repositories; a folder given as data_root holds the same columns as JSONL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import Source
from pipeline.knobs import PipelineError
from pipeline.languages import language

Row = dict[str, Any]
Example = dict[str, str]  # prompt and completion, or text


def orca_math(row: Row) -> Example:
    """microsoft/orca-math-word-problems-200k: question, answer (a worked solution in prose)."""
    return {"prompt": row["question"], "completion": row["answer"]}


def gsm8k(row: Row) -> Example:
    """openai/gsm8k: question, answer with <<a*b=c>> marks and a last line '#### n'. The papers do not use it."""
    return {"prompt": row["question"], "completion": row["answer"]}


def gsm8k_text(row: Row) -> Example:
    """The same as plain text, for a base made from nothing."""
    return {"text": f"{row['question']}\n{row['answer']}"}


def aya(row: Row) -> Example:
    """CohereLabs/aya_dataset: inputs, targets, language (the English name), language_code."""
    return {"prompt": row["inputs"], "completion": row["targets"]}


def pairs(row: Row) -> Example:
    """Prompts and completions as they are. An empty prompt is plain text: the loss is on all of it."""
    return {"prompt": row["prompt"], "completion": row["completion"]}


def text(row: Row) -> Example:
    """Plain text."""
    return {"text": row["text"]}


READERS: dict[str, Callable[[Row], Example]] = {
    "orca_math": orca_math, "gsm8k": gsm8k, "gsm8k_text": gsm8k_text, "aya": aya, "pairs": pairs, "text": text,
}  # fmt: skip
COLUMNS = {
    "orca_math": ("question", "answer"), "gsm8k": ("question", "answer"), "gsm8k_text": ("question", "answer"),
    "aya": ("inputs", "targets", "language"), "pairs": ("prompt", "completion"), "text": ("text",),
}  # fmt: skip


def read(name: str, source: Source, data_root: Path | None) -> Iterator[Example]:
    """The examples of a source, in its order; from data_root/<file> where one is given, else from the hub.

    Raises:
        PipelineError: the file is missing, unreadable or empty, or lacks a column.
    """
    if source.rows not in READERS:
        raise PipelineError(f"expert.sources.{name}.rows must be one of {', '.join(READERS)}, got {source.rows!r}")
    rows = _load(name, source, data_root)
    missing = [column for column in COLUMNS[source.rows] if column not in rows.column_names]
    if missing:
        raise PipelineError(
            f"source {name} has no column {', '.join(missing)}: it has {', '.join(rows.column_names)}; "
            f"it must look like {source.hub or source.rows}"
        )
    if source.language is not None:
        wanted = language(source.language).aya
        rows = rows.select([index for index, value in enumerate(rows["language"]) if value == wanted])
    if len(rows) == 0:
        where = f" in language {source.language}" if source.language else ""
        raise PipelineError(f"source {name} has no rows{where}: give another file under data_root, or another expert")
    read_row = READERS[source.rows]
    for row in rows:
        yield read_row(row)


def local_file(source: Source, data_root: Path) -> Path:
    """The file of a source below data_root, checked to be there and readable."""
    path = data_root / source.file
    if not path.is_file():
        raise PipelineError(
            f"data_root={data_root} has no {source.file}: put the file there, or leave data_root out to use the hub"
        )
    try:
        with open(path, encoding="utf-8") as file:
            empty = not file.read(1)
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path} is not readable as UTF-8 text: {error}") from error
    if empty:
        raise PipelineError(f"{path} is empty: it must hold one JSON object a line")
    return path


def _load(name: str, source: Source, data_root: Path | None) -> Any:
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetNotFoundError

    if data_root is not None:
        import json

        path = local_file(source, data_root)
        try:
            with open(path, encoding="utf-8") as file:
                return Dataset.from_list([json.loads(line) for line in file if line.strip()])
        except (ValueError, TypeError, AttributeError) as error:
            raise PipelineError(f"{path} is not JSON, one object a line: {error}") from error
    if source.hub is None:
        raise PipelineError(f"source {name} is on no hub: give data_root, a folder that holds {source.file}")
    try:
        return load_dataset(source.hub, source.hub_config, split=source.split, revision=source.revision)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError, RuntimeError) as error:
        raise PipelineError(
            f"source {name} ({source.hub}) could not be loaded: {error}; data_root=FOLDER reads local files"
        ) from error
