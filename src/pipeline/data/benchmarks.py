"""The benchmarks that training rows are compared with.

Their texts come from a folder laid out as a data_root (each language and split in it, without
exemplars), otherwise from the Hub, in the languages of MGSM and of the expert's sources. They do
not affect the hash of a data run. Heavy libraries are imported only when texts are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from pipeline.benchmarks import BENCHMARKS, scored_files
from pipeline.benchmarks.local_files import lines_of
from pipeline.config.data import Source
from pipeline.config.stages import DataStage
from pipeline.data.load import open_rows, readable_errors
from pipeline.data.ngrams import NUMBER, ngrams_of, without_numbers
from pipeline.data.sources import Row
from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock, part_of
from pipeline.hub.reach import force_offline
from pipeline.languages import MGSM, language, shipped_languages
from pipeline.runs.manifest import read_manifest


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
        n: Words in an n-gram.
        ngrams: The n-grams of each benchmark.
        bare: The n-grams of each benchmark without numbers.
        texts: The number of texts of each benchmark.
        short: The number of texts that are shorter than an n-gram.
        unread: The sets on the Hub that could not be read.
    """

    n: int
    ngrams: dict[str, set[int]] = field(default_factory=dict)
    bare: dict[str, set[int]] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    short: int = 0
    unread: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        ngrams = ngrams_of(text, self.n)
        self.texts[name] = self.texts.get(name, 0) + 1
        self.short += not ngrams
        self.ngrams.setdefault(name, set()).update(ngrams)
        self.bare.setdefault(name, set()).update(ngrams_of(without_numbers(text), self.n))

    def shared(self, text: str) -> tuple[list[str], list[str]]:
        """Return which benchmarks a text shares an n-gram with, and which only without numbers."""
        exact = sharing(self.ngrams, ngrams_of(text, self.n))
        if exact or not NUMBER.search(text):
            return exact, []
        return exact, sharing(self.bare, ngrams_of(without_numbers(text), self.n))


def sharing(known: dict[str, set[int]], ngrams: set[int]) -> list[str]:
    return [name for name, of_benchmark in known.items() if not ngrams.isdisjoint(of_benchmark)]


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


def is_dropped(config: DataStage, source: Source, shared: list[str], variants: list[str]) -> bool:
    """Return True if a source drops a row with these results of `Known.shared`.

    Number variants are only counted in language sets, and otherwise treated as exact matches are,
    unless data.number_variants is set.
    """
    data = config.data
    fate = "count" if source.is_language_set else data.decontaminate
    if variants and (data.number_variants or fate) == "drop":
        return True
    if data.decontaminate == "drop":
        return bool(shared)
    return not set(shared).isdisjoint(source.without or ())


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
    known = Known(n)
    pairs = of_file_texts(root, scored or {})
    if root is None:
        pairs = chain(pairs, of_hub(lock, languages, scored, known.unread))
    for name, text in pairs:
        known.add(name, text)
    return known


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
                problem = f"{type(error).__name__} {error}"
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
                    for row in open_rows(source, None, 0, files):
                        yield from texts_of(name, row)
            except PipelineError as error:
                if scored is None:
                    raise PipelineError(
                        f"{error} Or set data.benchmarks to a folder of benchmark files."
                    ) from error
                if not unread and "cannot be reached" in str(error):
                    offline.enter_context(force_offline())  # or each set would wait for the Hub
                unread.append(f"{source.hub} {part_of(source)}")
