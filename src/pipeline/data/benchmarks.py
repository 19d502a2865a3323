"""The benchmarks that training rows are compared with.

Their texts come from a folder laid out as a data_root (each language and split in it, without
exemplars), otherwise from the Hub, in the languages of MGSM and of the expert's sources. They do
not affect the hash of a data run. Heavy libraries are imported only when texts are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import BENCHMARKS, scored_files
from pipeline.benchmarks.local_files import lines_of
from pipeline.config.data import Source
from pipeline.config.stages import DataStage
from pipeline.data.load import open_rows, readable_errors
from pipeline.data.sources import Row
from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock, part_of
from pipeline.hub.reach import force_offline
from pipeline.languages import MGSM, language, shipped_languages
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    pass

FEWEST = 3  # words of a text that is too short for an n-gram but compared with lines of rows
LONGEST = 400  # characters of such a line
OWN_TASKS = "own tasks"  # the tasks of users' task files, which share a bit
SETS = (*BENCHMARKS, OWN_TASKS)
LABEL = re.compile(r"^[^:：]*[:：]")  # such as Question: or Swali:


def hub_sources(
    languages: Iterable[str] = (), scored: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Source]]:
    """Yield (benchmark, source) of each split on the Hub, each set once.

    Args:
        languages: Languages besides MGSM's.
        scored: The result of `scored_sets`.
    """
    shipped = shipped_languages()
    codes = dict.fromkeys((*MGSM, *(code for code in languages if code in shipped)))
    seen = set()
    for spoken in map(language, codes):
        for name, benchmark in BENCHMARKS.items():
            if scored is not None and scored.get(name) != "":
                continue
            for source in benchmark.sources(spoken):
                if (name, repr(source)) not in seen:
                    seen.add((name, repr(source)))
                    yield name, source


@dataclass
class Known:
    """The n-grams of all benchmarks, with and without their numbers, and the card's counts.

    Attributes:
        ngrams: An NgramSet of the texts.
        without_numbers: An NgramSet of the texts without their numbers.
        texts: The number of texts of each benchmark.
        short: Texts of at least FEWEST words that are too short for an n-gram.
        unread: The sets on the Hub that could not be read.
    """

    ngrams: Any
    without_numbers: Any
    texts: dict[str, int]
    short: set[str]
    unread: list[str] = field(default_factory=list)

    def shared(self, texts: list[str]) -> tuple[Any, Any]:
        """Return which benchmarks each text shares an n-gram with, and which only without numbers.

        Both are uint16, one a text, with a bit for each of SETS.
        """
        import numpy as np

        from pipeline.data.ngrams import NUMBER

        exact = self.ngrams.marks_of(texts)
        variants = np.zeros_like(exact)
        unmatched = [index for index in np.flatnonzero(exact == 0) if NUMBER.search(texts[index])]
        if unmatched:
            unmatched_texts = [texts[index] for index in unmatched]
            variants[unmatched] = self.without_numbers.marks_of(unmatched_texts)
        return exact, variants

    def has_short(self, text: str) -> bool:
        """Return True if a line of a row is a text that is too short for an n-gram.

        The line may begin with a label and a colon.
        """
        from pipeline.data.ngrams import words_in

        if not self.short:
            return False
        for line in text.splitlines():
            if len(line) >= LONGEST:
                continue
            for part in (line, LABEL.sub("", line)):
                if " ".join(words_in(part)) in self.short:
                    return True
        return False


def folder_of(config: DataStage, data_root: Path | None) -> Path | None:
    """Return the folder of the benchmarks, or None for the benchmarks on the Hub."""
    if config.data.benchmarks == "none":
        return None
    if config.data.benchmarks:
        return Path(config.data.benchmarks)
    return data_root


def scored_sets(config: DataStage) -> dict[str, str] | None:
    """Return the benchmarks that a user's rows are compared with, in the form of `Data.scored`.

    Benchmarks of a folder come in addition. None stands for the rows of shipped sets: they are
    compared with all benchmarks, and each benchmark must be readable.
    """
    if config.data.benchmarks == "none":
        return {}
    if not config.expert.is_own:
        return None
    if config.data.scored is None:
        return dict.fromkeys(BENCHMARKS, "")
    return config.data.scored


def keeps_items_apart(config: DataStage, data_root: Path | None) -> bool:
    """Return True if data_root is a data run or a small world.

    These wrote their benchmarks and training sets together and keep them apart. The sentences of a
    constructed world share their frames, so n-grams cannot show that its items are copied.
    """
    wrote_both = data_root is not None and (
        read_manifest(data_root) or (data_root / "world.json").is_file()
    )
    return bool(wrote_both) and config.data.benchmarks is None


def fate_of_number_variants(config: DataStage, source: Source) -> str:
    """Return "drop" or "count": in language sets "count", otherwise the same as for exact matches.

    data.number_variants overrides it.
    """
    data = config.data
    return data.number_variants or ("count" if source.is_language_set else data.decontaminate)


def dropping_marks(config: DataStage, source: Source, exact: Any, variants: Any) -> Any:
    """Return the benchmarks, as bits, that cause a source to drop rows.

    Args:
        config: The configuration of the data run.
        source: The source.
        exact: The first result of `Known.shared`.
        variants: The second result of `Known.shared`.
    """
    dropped = 0
    for bit, name in enumerate(SETS):
        if config.data.decontaminate == "drop" or name in (source.without or ()):
            dropped |= 1 << bit
    marks = exact & dropped
    if fate_of_number_variants(config, source) == "drop":
        marks = marks | variants
    return marks


def files_compared(root: Path | None, scored: Mapping[str, str]) -> dict[str, tuple[str, Path]]:
    """Return (benchmark, file) by label, of the files below `root` and the files in `scored`."""
    folders = []
    if root is not None:
        folders = [(root, [*BENCHMARKS])]
    files: dict[str, tuple[str, Path]] = {}
    for name, place in scored.items():
        path = Path(place)
        if path.is_file():
            files[f"{name} {path.name}"] = name, path
        elif place:
            folders.append((path, [name]))
    for folder, names in folders:
        found = scored_files(folder)
        for name in names:
            for path in found[name]:
                files[path.relative_to(folder).as_posix()] = (name, path)
    return files


def label_of(source: Source) -> str:
    return f"{source.hub} {part_of(source)}"


def benchmark_ngrams(
    n: int,
    root: Path | None,
    lock: Lock | None,
    languages: Iterable[str] = (),
    scored: Mapping[str, str] | None = None,
) -> Known:
    """Return the n-grams of the benchmarks.

    Args:
        n: Words in an n-gram.
        root: The folder of the benchmarks. None: the Hub (`hub_sources`).
        lock: The locked revisions.
        languages: Languages besides MGSM's.
        scored: The result of `scored_sets`.

    Raises:
        PipelineError: A file is broken, or a benchmark on the Hub that shipped rows need cannot be
            read.
    """
    from pipeline.data.ngrams import NgramSet, words_in

    unread: list[str] = []
    texts_by_name: dict[str, list[str]] = {name: [] for name in BENCHMARKS}
    pairs = of_file_texts(root, scored or {})
    if root is None:
        pairs = chain(pairs, of_hub(lock, languages, scored, unread))
    for name, text in pairs:
        texts_by_name.setdefault(name, []).append(text)
    counts = {name: len(texts) for name, texts in texts_by_name.items() if texts}
    sets = [texts_by_name.pop(name) for name in BENCHMARKS]
    sets.append(list(chain.from_iterable(texts_by_name.values())))
    exact, without_numbers = (NgramSet(sets, n, bare) for bare in (False, True))
    short = set()
    for words in map(words_in, exact.short):
        if len(words) >= FEWEST:
            short.add(" ".join(words))
    return Known(exact, without_numbers, counts, short, unread)


def texts_of(name: str, row: Row) -> Iterator[tuple[str, str]]:
    """Yield (benchmark, text) of a row. A row of a user's task gives the text of each column."""
    if name not in BENCHMARKS:
        texts = [text for text in row.values() if isinstance(text, str)]
    else:
        texts = BENCHMARKS[name].texts(row)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a text is {text!r}")
        yield name, text


def of_file_texts(root: Path | None, scored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for label, (name, path) in files_compared(root, scored).items():
        most = None
        if name in BENCHMARKS:
            most = BENCHMARKS[name].compared.get(label)
        for number, line in lines_of(path)[:most]:
            try:
                row = {"text": line}
                if path.suffix == ".jsonl":
                    row = json.loads(line)
                yield from texts_of(name, row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                kind, message = type(error).__name__, getattr(error, "msg", error)
                problem = f"{kind} {message}"
                raise PipelineError(
                    f"{path}, line {number} cannot be compared with training rows ({problem})."
                    f" Replace the file by the Hub's {name}."
                ) from error


def of_hub(
    lock: Lock | None, languages: Iterable[str], scored: Mapping[str, str] | None, unread: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield (benchmark, text) of the sets on the Hub.

    Unreadable sets go into `unread` if they are in `scored`, and otherwise raise PipelineError.
    """
    with ExitStack() as offline:
        for name, source in hub_sources(languages, scored):
            label = f"{name} ({source.hub_config}), which training rows are compared with"
            try:
                files = None
                if lock:
                    source, files = lock.source(source)
                with readable_errors(label, source):
                    rows, _ = open_rows(label, source, None, 0, files)
                    for row in rows:
                        yield from texts_of(name, row)
            except PipelineError as error:
                if scored is None:
                    raise PipelineError(
                        f"{error} Or set data.benchmarks to a folder of benchmark files."
                    ) from error
                if not unread and "cannot be reached" in str(error):
                    offline.enter_context(force_offline())  # or each set would wait for the Hub
                unread.append(label_of(source))
