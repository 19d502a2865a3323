"""Text files by their lines, as `datasets` reads them, but that a line feed alone ends a line.

In Python's text mode a bare carriage return does too: inside a line of bitext it would make a pair of half a sentence.
Imports `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.text.text import Text

AT_A_TIME = 10 << 20  # characters


class Lines(Text):  # type: ignore[misc]
    def _generate_tables(self, base_files: Any, files_iterables: Any) -> Iterator[tuple[Key, pa.Table]]:
        """Tables of one column, text. `open` is made to read URLs and archives by datasets."""
        for shard, files in enumerate(files_iterables):
            for path in files:
                with open(path, "rb") as file:  # datasets gives text no say in its line ends
                    text, batch = TextIOWrapper(file, encoding="utf-8", newline="\n"), 0
                    while lines := text.readlines(AT_A_TIME):
                        texts = [line.removesuffix("\n").removesuffix("\r") for line in lines]
                        yield Key(shard, batch), pa.table({"text": pa.array(texts, pa.string())})
                        batch += 1
