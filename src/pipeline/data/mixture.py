"""What a training set is mixed from: its sources, checked, read and judged row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import BENCHMARKS
from pipeline.config.data import Expert, Source
from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import SETS, dropping_marks
from pipeline.data.card import drop_reasons
from pipeline.data.load import local_file, open_source, read_examples
from pipeline.data.rows import UNUSABLE
from pipeline.data.sources import (
    SCRIPTS,
    Example,
    Row,
    is_kept_in_part,
    is_wanted,
    source_columns,
    words_of,
)
from pipeline.errors import PipelineError
from pipeline.progress import Bar

if TYPE_CHECKING:
    from pipeline.data.candidates import Candidates
    from pipeline.hub.lock import Lock


def gather_candidates(config: DataStage, candidates: Candidates, opened: dict[str, Iterator[Row]]) -> dict[str, Any]:
    """All rows of all sources as candidates. Gives source -> what was counted of it: rows, and those of no use."""
    counts: dict[str, Any] = {}
    with Bar(f"rows of {config.expert.name}", None, "row") as bar:
        for index, (name, source) in enumerate(config.expert.sources.items()):
            counts[name] = {"rows": 0, "empty": 0}
            bar.set_postfix_str(f"source {name}", refresh=False)
            examples = examples_of(name, source, bar.over(opened[name]), counts[name])
            candidates.add_all(name, index, examples, language_set=source.is_language_set)
    return counts


def open_sources(config: DataStage, data_root: Path | None, lock: Lock | None) -> dict[str, Iterator[Row]]:
    """The rows of each source: below data_root, else locked in the Hub's cache, else from the Hub.

    Raises a PipelineError for sources that cannot be read or mixed, before any is: each gives its first row.
    """
    check_sources(config.expert)
    opened = {}
    for name, source in config.expert.sources.items():
        pinned, files = lock.source(source) if lock and data_root is None else (source, None)
        opened[name] = open_source(name, pinned, data_root, config.seed, files)
    return opened


def check_sources(expert: Expert) -> None:
    """Raise a PipelineError for sources that are not described as they must be, or cannot be mixed."""
    for name, source in expert.sources.items():
        if name in ("train", "validation"):
            raise PipelineError(f"expert.sources.{name} has the name of what is written: give the source another")
        source_columns(name, source)
        if odd := [benchmark for benchmark in source.without or () if benchmark not in BENCHMARKS]:
            names = ", ".join(BENCHMARKS)
            raise PipelineError(f"expert.sources.{name}.without={odd[0]} is no benchmark: name of {names}")
    kinds = {"text" if source.rows in ("text", "gsm8k_text") else "pairs" for source in expert.sources.values()}
    if len(kinds) > 1:
        raise PipelineError(
            f"expert={expert.name} mixes plain text with prompts and completions: keep one kind an expert"
        )
    if not kinds:
        raise PipelineError(f"expert={expert.name} has no sources: give +expert.sources.NAME={{...}}")


def examples_of(name: str, source: Source, rows: Iterator[Row], counts: dict[str, int]) -> Iterator[Example]:
    """The usable examples of a source. The other rows are counted by their reasons.

    Raises:
        PipelineError: no row is usable; or most of a language's text is in no letter of its script, as where English
            columns were taken.
    """
    script, written, usable = SCRIPTS.get(source.language or ""), 0, 0
    if source.rows == "conversation":
        rows = count_parts(source, rows, counts)
    for example in read_examples(name, source, rows):
        counts["rows"] += 1
        if isinstance(example, str):
            counts[example] = counts.get(example, 0) + 1
            continue
        usable += 1
        written += script is not None and re.search(script, words_of(example)) is not None
        yield example
    if not usable:
        why = "; ".join(f"{counts[reason]} {meaning}" for reason, meaning in UNUSABLE.items() if counts.get(reason))
        file = f" ({source.url})" if source.url else ""
        raise PipelineError(
            f"source {name}{file}: none of its {counts['rows']} rows can be used ({why}): change the file, or "
            f"expert.sources.{name}"
        )
    if script is not None and 2 * written < usable:
        raise PipelineError(
            f"source {name}: {written} of {usable} rows hold a letter of the script of "
            f"language={source.language}: its columns are of another language; check expert.sources.{name}.rows"
        )


def count_parts(source: Source, rows: Iterator[Row], counts: dict[str, int]) -> Iterator[Row]:
    """Yield the rows of a source of conversations, and count those that are kept in part."""
    for row in rows:
        if is_wanted(row, source) and is_kept_in_part(row, source):
            counts["in_part"] = counts.get("in_part", 0) + 1
        yield row


def refuse_unusable(name: str, source: Source, data_root: Path | None, whole: bool = False) -> None:
    """Raise the PipelineError of a source that cannot be read, or of whose rows none can be used. Reads up to the first
    that can, or all rows if `whole`."""
    for _ in examples_of(name, source, open_source(name, source, data_root), {"rows": 0, "empty": 0}):
        if not whole:
            return


def filter_candidates(config: DataStage, rows: Any, counts: dict[str, Any]) -> dict[str, list[int]]:
    """Source -> those of `rows` (candidates.CANDIDATE) that are left of it, in their order. What is dropped or seen is
    counted."""
    import numpy as np

    def count(values: Any) -> int:
        return int(np.count_nonzero(values))

    first = np.zeros(len(rows), dtype=bool)  # that says what it says
    first[np.unique(rows["digest"], return_index=True)[1]] = True
    bits = {name: 1 << bit for bit, name in enumerate(SETS)}
    rows_by_source = {}
    for index, (name, source) in enumerate(config.expert.sources.items()):
        of_source = rows["source"] == index
        usable = of_source & first
        own = rows[usable]
        shared = {benchmark: count(own["marks"] & bit) for benchmark, bit in bits.items()}
        counts[name] |= {
            "duplicates": count(of_source) - len(own),
            "contaminated": count(own["marks"]),
            "number_variants": count(own["variants"]),
            "word_problems": count(own["math"]),
            "short_copies": count(own["short"]),
            "shared": {benchmark: number for benchmark, number in shared.items() if number},
        }
        usable &= dropping_marks(config, source, rows["marks"], rows["variants"]) == 0
        if config.data.word_problems == "drop":
            usable &= ~rows["math"]
        rows_by_source[name] = np.flatnonzero(usable).tolist()
        counts[name]["left"] = len(rows_by_source[name])
    if not any(rows_by_source.values()):
        why = drop_reasons(config, counts).values()
        seen = sum(counts[name]["rows"] for name in rows_by_source)
        raise PipelineError(
            f"expert={config.expert.name}: nothing is left of {seen} rows ({', '.join(why)}): ask for other sources, "
            "or data.decontaminate=count, data.word_problems=count"
        )
    return rows_by_source


def files_read(sources: dict[str, Source], data_root: Path) -> list[Path]:
    """The files below data_root that decide the set, checked to be there."""
    return [local_file(source, data_root) for source in sources.values()]
