"""The rows that a training set is drawn from: written to one file as they come, and known by arrays alone.

A row costs 22 bytes of memory, so that 10 million are looked at in less than 2 GB, n-grams of the benchmarks included.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.data.benchmarks import Known
from pipeline.data.sources import Example, words_of
from pipeline.data.word_problems import is_word_problem
from pipeline.errors import PipelineError

BATCH = 2**19  # characters that are compared with the benchmarks at a time


class Candidates:
    """Rows in the order read. Their arrays are as long as there are rows."""

    def __init__(self, file: BinaryIO, benchmark_ngrams: Known | None) -> None:
        self.file, self.known = file, benchmark_ngrams
        self.places, self.digests = array("Q"), array("Q")  # where a row begins in the file; what it says
        self.sources = array("B")
        self.marks = array("H")  # a bit for each benchmark that it shares an n-gram with: 16 at most
        self.variants = array("H")  # which it shares one with only where numbers are left out
        self.maths = bytearray()  # 1: a word problem in a language set
        self.bytes = 0
        self.batch: list[str] = []
        self.characters = 0

    def __len__(self) -> int:
        return len(self.places)

    def add(self, index: int, example: Example, language_set: bool) -> None:
        line = json.dumps(example, ensure_ascii=False).encode() + b"\n"
        self.places.append(self.bytes)
        self.bytes += self.file.write(line)
        self.digests.append(int.from_bytes(blake2b(line, digest_size=8).digest(), "little"))
        self.sources.append(index)
        self.maths.append(language_set and is_word_problem(example))
        if self.known is not None:
            text = words_of(example)
            self.batch.append(text)
            self.characters += len(text)
            if self.characters >= BATCH:
                self.compare()

    def compare(self) -> None:
        if self.known is not None and self.batch:
            exact, variants = self.known.shared(self.batch)
            self.marks.frombytes(exact.tobytes())
            self.variants.frombytes(variants.tobytes())
        self.batch, self.characters = [], 0

    def add_all(self, name: str, index: int, examples: Iterable[Example], language_set: bool) -> None:
        """The rows of a source. PipelineError for text that is no Unicode: half a character, as broken files have."""
        try:
            for example in examples:
                self.add(index, example, language_set)
            self.compare()
        except UnicodeEncodeError as error:
            raise PipelineError(
                f"source {name}: row {len(self.places)} of the set holds half a character ({error.reason}), which is "
                "no UTF-8: write its file again, or leave the source out"
            ) from error

    def first_of_each(self) -> Any:
        """Whether a row is the first that says what it says: bool, one a row."""
        first = np.zeros(len(self), dtype=bool)
        first[np.unique(np.frombuffer(self.digests, dtype=np.uint64), return_index=True)[1]] = True
        return first

    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """Source, benchmarks' bits, those of number variants, and whether it is a word problem, of each row."""
        zeros = np.zeros(len(self), dtype=np.uint16)
        marks, variants = (
            np.frombuffer(bits, dtype=np.uint16) if bits else zeros for bits in (self.marks, self.variants)
        )
        return (
            np.frombuffer(self.sources, dtype=np.uint8),
            marks,
            variants,
            np.frombuffer(self.maths, dtype=np.uint8) > 0,
        )

    def lines(self, rows: Iterable[int]) -> Iterator[bytes]:
        """The rows as they stand in the file, in the order asked for."""
        self.file.flush()
        for row in rows:
            self.file.seek(self.places[row])
            yield self.file.readline()


@contextmanager
def open_candidates(folder: Path, benchmark_ngrams: Known | None) -> Iterator[Candidates]:
    """Candidates with their file in `folder`, which is gone afterwards."""
    path = folder / "candidates.jsonl"
    try:
        with open(path, "w+b") as file:
            yield Candidates(file, benchmark_ngrams)
    finally:
        path.unlink(missing_ok=True)
