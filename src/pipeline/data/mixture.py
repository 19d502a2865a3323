"""Candidates for a training set: the sources' rows, read, compared with benchmarks and filtered."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import BENCHMARKS
from pipeline.config.data import Expert, Source
from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import SETS, Known, dropping_marks
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
from pipeline.data.word_problems import is_word_problem
from pipeline.errors import PipelineError, suggest
from pipeline.progress import Bar

if TYPE_CHECKING:
    from pipeline.hub.lock import Lock

BATCH = 1000  # rows that are compared with the benchmarks together


@dataclass(slots=True)
class Candidate:
    """A row that may be drawn, and the findings about it.

    Attributes:
        line: The row's line in the output file.
        marks: A bit for each of SETS that the row shares an n-gram with.
        variants: The same, with numbers removed from both texts.
        short: A line of the row is a benchmark's text that is too short for an n-gram.
        word_problem: The row looks like a word problem, and its source is a language set.
    """

    line: bytes
    marks: int
    variants: int
    short: bool
    word_problem: bool


def gather_candidates(
    config: DataStage, known: Known, opened: dict[str, Iterator[Row]]
) -> tuple[dict[str, list[Candidate]], dict[str, Any]]:
    """Return the usable rows of each source in their order, and counts of each source's rows."""
    counts: dict[str, Any] = {}
    candidates: dict[str, list[Candidate]] = {}
    with Bar(f"rows of {config.expert.name}", None, "row") as bar:
        for name, source in config.expert.sources.items():
            counts[name] = {"rows": 0, "empty": 0}
            candidates[name] = []
            bar.set_postfix_str(f"source {name}", refresh=False)
            examples = examples_of(name, source, bar.over(opened[name]), counts[name])
            batch = list(islice(examples, BATCH))
            while batch:
                candidates[name] += judge(name, batch, known, source.is_language_set)
                batch = list(islice(examples, BATCH))
    return candidates, counts


def judge(name: str, examples: list[Example], known: Known, language_set: bool) -> list[Candidate]:
    """Compare the examples of a source with the benchmarks.

    Raises:
        PipelineError: A row contains half a character, which UTF-8 cannot write. Broken files have
            such rows.
    """
    texts = [words_of(example) for example in examples]
    marks, variants = known.shared(texts)
    judged = []
    for at, example in enumerate(examples):
        try:
            line = json.dumps(example, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            raise PipelineError(
                f"source {name}: a row holds half a character ({error.object[:60]!r}), which UTF-8"
                " cannot write. Write its file again, or leave the source out."
            ) from error
        candidate = Candidate(
            line,
            marks=int(marks[at]),
            variants=int(variants[at]),
            short=known.has_short(texts[at]),
            word_problem=language_set and is_word_problem(example),
        )
        judged.append(candidate)
    return judged


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
        PipelineError: No row is usable, or most of a language's text is not in its script.
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
        reasons = []
        for reason, meaning in UNUSABLE.items():
            if counts.get(reason):
                reasons.append(f"{counts[reason]} {meaning}")
        file = f" ({source.url})" if source.url else ""
        raise PipelineError(
            f"source {name}{file}: all {counts['rows']} rows are unusable"
            f" ({'; '.join(reasons)}). Change the file, or expert.sources.{name}."
        )
    if script is not None and 2 * written < usable:
        raise PipelineError(
            f"source {name}: only {written} of {usable} rows contain letters of the script of"
            f" language={source.language}, so its columns are in another language. Check"
            f" expert.sources.{name}.rows."
        )


def count_parts(source: Source, rows: Iterator[Row], counts: dict[str, int]) -> Iterator[Row]:
    """Yield the rows of a source of conversations, and count the rows that are kept in part."""
    for row in rows:
        if is_wanted(row, source) and is_kept_in_part(row, source):
            counts["in_part"] = counts.get("in_part", 0) + 1
        yield row


def refuse_unusable(name: str, source: Source, data_root: Path | None, whole: bool = False) -> None:
    """Raise PipelineError if a source cannot be read or has no usable row.

    Reads up to the first usable row, or all rows if `whole`.
    """
    rows = open_source(name, source, data_root)
    for _ in examples_of(name, source, rows, {"rows": 0, "empty": 0}):
        if not whole:
            return


def filter_candidates(
    config: DataStage, candidates: dict[str, list[Candidate]], counts: dict[str, Any]
) -> dict[str, list[bytes]]:
    """Return the lines of each source that may be drawn, and add the findings to the counts.

    A line that equals an earlier line, of any source, is a duplicate.
    """
    seen: set[bytes] = set()
    left: dict[str, list[bytes]] = {}
    for name, source in config.expert.sources.items():
        distinct = []
        for candidate in candidates[name]:
            if candidate.line not in seen:
                seen.add(candidate.line)
                distinct.append(candidate)
        left[name] = []
        for candidate in distinct:
            marks = dropping_marks(config, source, candidate.marks, candidate.variants)
            is_word_problem = candidate.word_problem and config.data.word_problems == "drop"
            if marks == 0 and not is_word_problem:
                left[name].append(candidate.line)
        counts[name]["duplicates"] = len(candidates[name]) - len(distinct)
        counts[name] |= _findings(distinct)
        counts[name]["left"] = len(left[name])
    if not any(left.values()):
        reasons = ", ".join(drop_reasons(config, counts).values())
        rows = sum(counts[name]["rows"] for name in left)
        raise PipelineError(
            f"expert={config.expert.name}: all {rows} rows were dropped ({reasons}). Choose other"
            " sources, or set data.decontaminate=count or data.word_problems=count."
        )
    return left


def _findings(candidates: list[Candidate]) -> dict[str, Any]:
    """Return how many candidates have each finding, and by benchmark how many share an n-gram."""
    counts = dict.fromkeys(("contaminated", "number_variants", "word_problems", "short_copies"), 0)
    shared = Counter[str]()
    for candidate in candidates:
        counts["contaminated"] += candidate.marks > 0
        counts["number_variants"] += candidate.variants > 0
        counts["word_problems"] += candidate.word_problem
        counts["short_copies"] += candidate.short
        for bit, name in enumerate(SETS):
            shared[name] += candidate.marks >> bit & 1
    return {**counts, "shared": {name: shared[name] for name in SETS if shared[name]}}


def files_read(sources: dict[str, Source], data_root: Path) -> list[Path]:
    """Return the files below data_root that decide the set, after checking that they exist."""
    return [local_file(source, data_root) for source in sources.values()]
