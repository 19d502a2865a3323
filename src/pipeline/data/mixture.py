"""What a training set is mixed from: its sources, checked, read and judged row by row."""

from __future__ import annotations

import json
import re
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
from pipeline.errors import PipelineError
from pipeline.progress import Bar

if TYPE_CHECKING:
    from pipeline.hub.lock import Lock

BATCH = 1000  # rows that are compared with the benchmarks at a time


@dataclass(slots=True)
class Candidate:
    """A row that may be drawn, and what was found in it.

    line: the row as it is written. marks: a bit for each benchmark that it shares an n-gram with,
        in the order of SETS.
    variants: the same with numbers removed from both. short: a line of it is a benchmark's text
        without an n-gram.
    word_problem: the row looks like one, and its source is a language set.
    """

    line: bytes
    marks: int
    variants: int
    short: bool
    word_problem: bool


def gather_candidates(
    config: DataStage, known: Known, opened: dict[str, Iterator[Row]]
) -> tuple[dict[str, list[Candidate]], dict[str, Any]]:
    """Return the usable rows of each source, in the order read, and counts of all rows of each
    source.
    """
    counts: dict[str, Any] = {}
    candidates: dict[str, list[Candidate]] = {}
    with Bar(f"rows of {config.expert.name}", None, "row") as bar:
        for name, source in config.expert.sources.items():
            counts[name] = {"rows": 0, "empty": 0}
            candidates[name] = []
            bar.set_postfix_str(f"source {name}", refresh=False)
            examples = examples_of(name, source, bar.over(opened[name]), counts[name])
            while batch := list(islice(examples, BATCH)):
                candidates[name] += judge(name, batch, known, source.is_language_set)
    return candidates, counts


def judge(name: str, examples: list[Example], known: Known, language_set: bool) -> list[Candidate]:
    """Return what is found in each example of a source.

    Raises:
        PipelineError: a row holds half a character, as broken files do, which UTF-8 cannot write.
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
        word_problem = language_set and is_word_problem(example)
        judged.append(
            Candidate(
                line, int(marks[at]), int(variants[at]), known.has_short(texts[at]), word_problem
            )
        )
    return judged


def open_sources(
    config: DataStage, data_root: Path | None, lock: Lock | None
) -> dict[str, Iterator[Row]]:
    """Open the rows of each source: below data_root, locked in the Hub's cache, or on the Hub.

    Raises: PipelineError: a source cannot be read or mixed. Each source gives its first row before
    any is read.
    """
    check_sources(config.expert)
    opened = {}
    for name, source in config.expert.sources.items():
        if lock and data_root is None:
            pinned, files = lock.source(source)
        else:
            pinned, files = (source, None)
        opened[name] = open_source(name, pinned, data_root, config.seed, files)
    return opened


def check_sources(expert: Expert) -> None:
    """Raise a PipelineError for sources that are not described as they must be, or cannot be
    mixed.
    """
    for name, source in expert.sources.items():
        if name in ("train", "validation"):
            raise PipelineError(
                f"expert.sources.{name} has the name of what is written: give the source another"
            )
        source_columns(name, source)
        odd = []
        for benchmark in source.without or ():
            if benchmark not in BENCHMARKS:
                odd.append(benchmark)
        if odd:
            names = ", ".join(BENCHMARKS)
            raise PipelineError(
                f"expert.sources.{name}.without={odd[0]} is no benchmark: name of {names}"
            )
    kinds = {
        "text" if source.rows in ("text", "gsm8k_text") else "pairs"
        for source in expert.sources.values()
    }
    if len(kinds) > 1:
        raise PipelineError(
            f"expert={expert.name} mixes plain text with prompts and completions: keep one kind an"
            " expert"
        )
    if not kinds:
        raise PipelineError(
            f"expert={expert.name} has no sources: give +expert.sources.NAME={{...}}"
        )


def examples_of(
    name: str, source: Source, rows: Iterator[Row], counts: dict[str, int]
) -> Iterator[Example]:
    """Return the usable examples of a source, and count the other rows by their reasons.

    Raises: PipelineError: no row is usable, or most of a language's text is not in its script.
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
        why = "; ".join(
            f"{counts[reason]} {meaning}"
            for reason, meaning in UNUSABLE.items()
            if counts.get(reason)
        )
        file = f" ({source.url})" if source.url else ""
        raise PipelineError(
            f"source {name}{file}: none of its {counts['rows']} rows can be used ({why}): change"
            f" the file, or expert.sources.{name}"
        )
    if script is not None and 2 * written < usable:
        raise PipelineError(
            f"source {name}: {written} of {usable} rows hold a letter of the script of"
            f" language={source.language}: its columns are of another language; check"
            f" expert.sources.{name}.rows"
        )


def count_parts(source: Source, rows: Iterator[Row], counts: dict[str, int]) -> Iterator[Row]:
    """Yield the rows of a source of conversations, and count those that are kept in part."""
    for row in rows:
        if is_wanted(row, source) and is_kept_in_part(row, source):
            counts["in_part"] = counts.get("in_part", 0) + 1
        yield row


def refuse_unusable(name: str, source: Source, data_root: Path | None, whole: bool = False) -> None:
    """Raise the PipelineError of a source that cannot be read, or of whose rows none can be used.

    Reads up to the first that can, or all rows if `whole`.
    """
    for _ in examples_of(
        name, source, open_source(name, source, data_root), {"rows": 0, "empty": 0}
    ):
        if not whole:
            return


def filter_candidates(
    config: DataStage, candidates: dict[str, list[Candidate]], counts: dict[str, Any]
) -> dict[str, list[bytes]]:
    """Return the lines of each source that may be drawn, in their order.

    Add what was found and dropped to the counts.

    A line that an earlier row wrote, of any source, is a duplicate.
    """
    seen: set[bytes] = set()
    left: dict[str, list[bytes]] = {}
    for name, source in config.expert.sources.items():
        first = []
        for candidate in candidates[name]:
            if candidate.line not in seen:
                seen.add(candidate.line)
                first.append(candidate)
        shared = {}
        for bit, benchmark in enumerate(SETS):
            number = sum(candidate.marks >> bit & 1 for candidate in first)
            if number:
                shared[benchmark] = number
        counts[name] |= {
            "duplicates": len(candidates[name]) - len(first),
            "contaminated": sum(candidate.marks > 0 for candidate in first),
            "number_variants": sum(candidate.variants > 0 for candidate in first),
            "word_problems": sum(candidate.word_problem for candidate in first),
            "short_copies": sum(candidate.short for candidate in first),
            "shared": shared,
        }
        left[name] = []
        for candidate in first:
            is_dropped = dropping_marks(config, source, candidate.marks, candidate.variants) != 0
            is_dropped |= candidate.word_problem and config.data.word_problems == "drop"
            if not is_dropped:
                left[name].append(candidate.line)
        counts[name]["left"] = len(left[name])
    if not any(left.values()):
        why = drop_reasons(config, counts).values()
        rows = sum(counts[name]["rows"] for name in left)
        raise PipelineError(
            f"expert={config.expert.name}: nothing is left of {rows} rows ({', '.join(why)}): ask"
            " for other sources, or data.decontaminate=count, data.word_problems=count"
        )
    return left


def files_read(sources: dict[str, Source], data_root: Path) -> list[Path]:
    """Return the files below data_root that decide the set, checked to be there."""
    return [local_file(source, data_root) for source in sources.values()]
