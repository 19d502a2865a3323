"""Candidates for a training set: the sources' rows, read, compared with benchmarks and filtered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import BENCHMARKS
from pipeline.config.data import Expert, Source
from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import Known, is_dropped
from pipeline.data.card import drop_reasons
from pipeline.data.load import open_source, place_of, read_examples
from pipeline.data.rows import UNUSABLE
from pipeline.data.sources import (
    Example,
    Row,
    source_columns,
    words_of,
)
from pipeline.data.word_problems import is_word_problem
from pipeline.errors import PipelineError, suggest
from pipeline.progress import Bar

if TYPE_CHECKING:
    from pipeline.hub.lock import Lock


def gather_rows(
    config: DataStage, known: Known, opened: dict[str, Iterator[Row]]
) -> tuple[dict[str, list[bytes]], dict[str, Any]]:
    """Return the lines of each source that may be drawn, and counts of each source's rows.

    A line that equals an earlier line, of any source, is a duplicate.
    """
    counts: dict[str, Any] = {}
    left: dict[str, list[bytes]] = {}
    seen: set[bytes] = set()
    with Bar(f"rows of {config.expert.name}", None, "row") as bar:
        for name, source in config.expert.sources.items():
            counts[name] = {"rows": 0, "empty": 0}
            bar.set_postfix_str(f"source {name}", refresh=False)
            examples = examples_of(name, source, bar.over(opened[name]), counts[name])
            distinct = distinct_examples(name, examples, seen, counts[name])
            left[name] = filter_rows(config, source, distinct, known, counts[name])
    if not any(left.values()):
        reasons = ", ".join(drop_reasons(config, counts).values())
        rows = sum(counts[name]["rows"] for name in left)
        raise PipelineError(
            f"expert={config.expert.name}: all {rows} rows were dropped ({reasons}). Choose other"
            " sources, or set data.decontaminate=count or data.word_problems=count."
        )
    return left, counts


def distinct_examples(
    name: str, examples: Iterator[Example], seen: set[bytes], counts: dict[str, Any]
) -> Iterator[tuple[Example, bytes]]:
    """Yield the examples that differ from all lines in `seen`, with their lines.

    Raises:
        PipelineError: A row contains half a character, which UTF-8 cannot write. Broken files have
            such rows.
    """
    counts["duplicates"] = 0
    for example in examples:
        try:
            line = json.dumps(example, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            raise PipelineError(
                f"source {name}: a row holds half a character ({error.object[:60]!r}), which UTF-8"
                " cannot write. Write its file again, or leave the source out."
            ) from error
        if line in seen:
            counts["duplicates"] += 1
            continue
        seen.add(line)
        yield example, line


def filter_rows(
    config: DataStage,
    source: Source,
    examples: Iterator[tuple[Example, bytes]],
    known: Known,
    counts: dict[str, Any],
) -> list[bytes]:
    """Return the lines that may be drawn, and add the findings to the counts of a source."""
    counts |= dict.fromkeys(("contaminated", "number_variants", "word_problems"), 0)
    shared_with = Counter[str]()
    left = []
    for example, line in examples:
        shared, variants = known.shared(words_of(example))
        shared_with.update(shared)
        counts["contaminated"] += bool(shared)
        counts["number_variants"] += bool(variants)
        dropped = is_dropped(config, source, shared, variants)
        if source.is_language_set and is_word_problem(example):
            counts["word_problems"] += 1
            dropped = dropped or config.data.word_problems == "drop"
        if not dropped:
            left.append(line)
    counts["shared"] = dict(sorted(shared_with.items()))
    counts["left"] = len(left)
    return left


def open_sources(
    config: DataStage, data_root: Path | None, lock: Lock | None
) -> dict[str, Iterator[Row]]:
    """Open the rows of each source: below data_root, in the Hub's cache if locked, or on the Hub.

    Raises:
        PipelineError: A source cannot be read, or the sources cannot be mixed. The first row of
            each source is read before the others.
    """
    check_sources(config.expert)
    opened = {}
    for name, source in config.expert.sources.items():
        pinned, files = source, None
        if lock and data_root is None:
            pinned, files = lock.source(source)
        opened[name] = open_source(name, pinned, data_root, config.seed, files)
    return opened


def check_sources(expert: Expert) -> None:
    """Raise PipelineError if sources lack a required key or cannot be mixed."""
    kinds = set()
    for name, source in expert.sources.items():
        if name in ("train", "validation"):
            raise PipelineError(
                f"expert.sources.{name} has the name of an output file. Give the source another"
                " name."
            )
        source_columns(name, source)
        for benchmark in source.without or ():
            if benchmark not in BENCHMARKS:
                raise PipelineError(
                    f"expert.sources.{name}.without={benchmark}: there is no such benchmark"
                    f" ({suggest(benchmark, BENCHMARKS)}). Correct the name."
                )
        kinds.add(source.rows in ("text", "gsm8k_text"))
    if len(kinds) > 1:
        raise PipelineError(
            f"expert={expert.name} mixes plain text with prompts and completions. Use a separate"
            " expert for each kind."
        )
    if not kinds:
        raise PipelineError(
            f"expert={expert.name} has no sources. Add +expert.sources.NAME={{...}}."
        )


def examples_of(
    name: str, source: Source, rows: Iterator[Row], counts: dict[str, int]
) -> Iterator[Example]:
    """Yield the usable examples of a source, and count the other rows by their reasons.

    Raises:
        PipelineError: No row is usable.
    """
    usable = 0
    for example in read_examples(name, source, rows):
        counts["rows"] += 1
        if isinstance(example, str):
            counts[example] = counts.get(example, 0) + 1
            continue
        usable += 1
        yield example
    if not usable:
        reasons = []
        for reason, meaning in UNUSABLE.items():
            if counts.get(reason):
                reasons.append(f"{counts[reason]} {meaning}")
        raise PipelineError(
            f"source {name}{place_of(source, None)}: all {counts['rows']} rows are unusable"
            f" ({'; '.join(reasons)}). Change the file, or expert.sources.{name}."
        )


def refuse_unusable(name: str, source: Source, data_root: Path | None, whole: bool = False) -> None:
    """Raise PipelineError if a source cannot be read or has no usable row.

    Reads up to the first usable row, or all rows if `whole`.
    """
    rows = open_source(name, source, data_root)
    for _ in examples_of(name, source, rows, {"rows": 0, "empty": 0}):
        if not whole:
            return
