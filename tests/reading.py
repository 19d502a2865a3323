"""The examples of a source, as the data stage reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.load import open_source, read_examples


def read_source(name: str, source: Source, data_root: Path | None) -> Iterator[Any]:
    return read_examples(name, source, open_source(name, source, data_root))
