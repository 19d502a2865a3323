"""The rows that a training set is drawn from: written to one file as they come, and known by an array alone.

A row costs 23 bytes of memory, so that 10 million are looked at in less than 2 GB, n-grams of the benchmarks included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from pipeline.data.benchmarks import Known
from pipeline.data.sources import Example, words_of
from pipeline.data.word_problems import is_word_problem
from pipeline.errors import PipelineError

BATCH = 1000  # rows that are compared with the benchmarks at a time
CANDIDATE = np.dtype([
    ("place", np.uint64), ("digest", np.int64),  # where a row begins in the file; what it says
    ("source", np.uint8),
    ("marks", np.uint16),  # a bit for each benchmark that it shares an n-gram with: 16 at most
    ("variants", np.uint16),  # which it shares one with only without numbers
    ("short", np.bool_),  # a line of it is a text of a benchmark without an n-gram
    ("math", np.bool_),  # a word problem in a language set
])  # fmt: skip


class Candidates:
    """Rows in the order read, kept in `file`."""

    def __init__(self, file: BinaryIO, benchmark_ngrams: Known) -> None:
        self.file, self.known = file, benchmark_ngrams
        self.batches = [np.empty(0, CANDIDATE)]

    def rows(self) -> Any:
        """A CANDIDATE of each row."""
        return np.concatenate(self.batches)

    def add_all(self, name: str, index: int, examples: Iterator[Example], language_set: bool) -> None:
        """The rows of a source. PipelineError for text that is no Unicode: half a character, as broken files have."""
        while batch := list(islice(examples, BATCH)):
            begin, rows = self.file.tell(), np.empty(len(batch), CANDIDATE)
            try:
                lines = [json.dumps(example, ensure_ascii=False).encode() + b"\n" for example in batch]
            except UnicodeEncodeError as error:
                raise PipelineError(
                    f"source {name}: a row holds half a character ({error.object[:60]!r}), no UTF-8: write its "
                    "file again, or leave the source out"
                ) from error
            self.file.writelines(lines)
            rows["place"], rows["source"] = begin + np.cumsum([0, *map(len, lines)])[:-1], index
            rows["digest"] = list(map(hash, lines))
            rows["math"] = [language_set and is_word_problem(example) for example in batch]
            texts = list(map(words_of, batch))
            rows["marks"], rows["variants"] = self.known.shared(texts)
            rows["short"] = list(map(self.known.has_short, texts))
            self.batches.append(rows)

    def lines(self, places: Any) -> Iterator[bytes]:
        """The lines of the file that begin at these places, in the given order."""
        self.file.flush()
        for place in places:
            self.file.seek(place)
            yield self.file.readline()
