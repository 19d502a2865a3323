"""The examples of a source, as the data stage reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.data.load import open_source, read_examples


def read_source(
    name: str, source: Source, data_root: Path | None, seed: int = 0, locked: list[Path] | None = None,
    counts: dict[str, Any] | None = None,
) -> Iterator[Any]:  # fmt: skip
    opened = open_source(name, source, data_root, seed, locked)
    return read_examples(name, source, opened, {} if counts is None else counts)
