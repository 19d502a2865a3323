"""The benchmarks that training rows are compared with.

Their texts come from a folder laid out as a data_root (each language and split that is there, exemplars aside), else
from the Hub, in each language of this program that they have. Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import BENCHMARKS, scored_files
from pipeline.config.data import Source
from pipeline.data.load import open_rows, readable_errors
from pipeline.data.sources import Row
from pipeline.errors import PipelineError
from pipeline.languages import MGSM, language

if TYPE_CHECKING:
    from pipeline.hub.lock import Lock


def hub_sources() -> Iterator[tuple[str, Source]]:
    """(benchmark, where it is) of each language and split on the Hub, each set once."""
    sets: dict[tuple[str, str], tuple[str, Source]] = {}
    for spoken in map(language, MGSM):
        for name, benchmark in BENCHMARKS.items():
            for source in benchmark.sources(spoken):
                sets.setdefault((name, repr(source)), (name, source))
    yield from sets.values()


@dataclass
class Known:
    """The n-grams of all benchmarks, with and without their numbers, and the card's counts."""

    n: int
    ngrams: Any  # NgramSet
    without_numbers: Any  # NgramSet
    texts: dict[str, int] = field(default_factory=dict)  # texts of each benchmark
    short: int = 0  # texts with no whole n-gram, which no row can be compared with

    def shared(self, texts: list[str]) -> tuple[Any, Any]:
        """The benchmarks that each text shares an n-gram with, as bits in the order of BENCHMARKS; and those that it
        shares one with only with numbers removed from both: uint16, one a text."""
        import numpy as np

        from pipeline.data.ngrams import NUMBER, hash_ngrams

        exact = self.ngrams.marks_of(*hash_ngrams(texts, self.n), len(texts))
        variants = np.zeros_like(exact)
        unmatched = [index for index in np.flatnonzero(exact == 0) if NUMBER.search(texts[index])]
        if unmatched:
            bare = [NUMBER.sub(" ", texts[index]) for index in unmatched]
            variants[unmatched] = self.without_numbers.marks_of(*hash_ngrams(bare, self.n), len(bare))
        return exact, variants


def benchmark_ngrams(n: int, root: Path | None, lock: Lock | None) -> Known:
    """The n-grams of the benchmarks below `root`, or of those on the Hub.

    Raises:
        PipelineError: a file that is broken, or a benchmark that the Hub does not give.
    """
    import numpy as np

    from pipeline.data.ngrams import NUMBER, NgramSet, hash_ngrams

    texts_by_name: dict[str, list[str]] = {name: [] for name in BENCHMARKS}
    for name, text in of_folder(root) if root is not None else of_hub(lock):
        texts_by_name[name].append(text)
    short = 0
    levels: list[list[Any]] = []
    for bare in (False, True):
        levels.append([])
        for texts in texts_by_name.values():
            parts = [np.empty(0, dtype=np.uint64)]
            for at in range(0, len(texts), 1000):
                chunk = texts[at : at + 1000]
                batch, owner = hash_ngrams([NUMBER.sub(" ", text) for text in chunk] if bare else chunk, n)
                short += 0 if bare else len(chunk) - len(np.unique(owner))
                parts.append(np.unique(batch))
            levels[-1].append(np.concatenate(parts))
    bits = [1 << bit for bit in range(len(BENCHMARKS))]
    exact, without_numbers = (NgramSet(numbers, bits) for numbers in levels)
    return Known(n, exact, without_numbers, {name: len(texts) for name, texts in texts_by_name.items() if texts}, short)


def texts_of(name: str, row: Row) -> Iterator[tuple[str, str]]:
    for text in BENCHMARKS[name].texts(row):
        if not isinstance(text, str):
            raise TypeError(f"a text is {text!r}")
        yield name, text


def of_folder(root: Path) -> Iterator[tuple[str, str]]:
    for name, paths in scored_files(root).items():
        for path in paths:
            number, last = 0, BENCHMARKS[name].compared.get(path.relative_to(root).as_posix())
            try:
                with open(path, encoding="utf-8") as lines:
                    for number, line in enumerate(islice(lines, last), start=1):  # noqa: B007
                        if line.strip():
                            yield from texts_of(name, json.loads(line)) if path.suffix == ".jsonl" else [(name, line)]
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__} {getattr(error, 'msg', error)}"
                raise PipelineError(
                    f"{path}, line {number} cannot be compared with ({problem}): give the Hub's {name}"
                ) from error


def of_hub(lock: Lock | None) -> Iterator[tuple[str, str]]:
    for name, source in hub_sources():
        label = f"{name} ({source.hub_config}), which training rows are compared with"
        try:
            source, files = lock.source(source) if lock else (source, None)
            with readable_errors(label, source):
                for row in open_rows(label, source, None, 0, files).rows:
                    yield from texts_of(name, row)
        except PipelineError as error:
            raise PipelineError(f"{error}; or give data.benchmarks, a folder with the benchmark files") from error
