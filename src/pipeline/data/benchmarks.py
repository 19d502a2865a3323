"""The benchmarks that training rows are compared with.

Their texts come from a folder laid out as a data_root (each language and split that is there,
exemplars aside), else from the Hub, in MGSM's languages and those of the expert's sources. The
manifest of a data run records which they were; its hash does not cover them. Imports nothing heavy.
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
from pipeline.files import sha256_of
from pipeline.hub.lock import Lock, part_of, read_lock
from pipeline.hub.reach import force_offline
from pipeline.languages import MGSM, language, shipped_languages
from pipeline.runs.manifest import read_manifest
from pipeline.text import first_few

if TYPE_CHECKING:
    from pipeline.runs.run import Run

FEWEST = 3  # words of a text without an n-gram that lines of rows are compared with
LONGEST = 400  # characters of such a line
OWN_TASKS = "own tasks"  # the tasks of task files, which share a bit
SETS = (*BENCHMARKS, OWN_TASKS)
LABEL = re.compile(r"^[^:：]*[:：]")  # as Question: or Swali:


def hub_sources(
    languages: Iterable[str] = (), scored: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Source]]:
    """(benchmark, where it is) of each split on the Hub in MGSM's languages and in `languages`,
    each set once. scored: as `scored_sets` gives them.
    """
    sets: dict[tuple[str, str], tuple[str, Source]] = {}
    for spoken in map(
        language,
        dict.fromkeys((*MGSM, *(code for code in languages if code in shipped_languages()))),
    ):
        for name, benchmark in BENCHMARKS.items():
            for source in (
                benchmark.sources(spoken) if scored is None or scored.get(name) == "" else ()
            ):
                sets.setdefault((name, repr(source)), (name, source))
    yield from sets.values()


@dataclass
class Known:
    """The n-grams of all benchmarks, with and without their numbers, and the card's counts.

    texts: number of texts of each benchmark; short: the words of those without an n-gram, but for
        one or two words;
    unread: the sets on the Hub that could not be read.
    """

    ngrams: Any  # NgramSet
    without_numbers: Any  # NgramSet
    texts: dict[str, int]
    short: set[str]
    unread: list[str] = field(default_factory=list)

    def shared(self, texts: list[str]) -> tuple[Any, Any]:
        """Return which benchmarks each text shares an n-gram with, and which only without numbers.

        Both are bits in the order of SETS: uint16, one a text.
        """
        import numpy as np

        from pipeline.data.ngrams import NUMBER

        exact = self.ngrams.marks_of(texts)
        variants = np.zeros_like(exact)
        unmatched = []
        for index in np.flatnonzero(exact == 0):
            if NUMBER.search(texts[index]):
                unmatched.append(index)
        if unmatched:
            variants[unmatched] = self.without_numbers.marks_of(
                [texts[index] for index in unmatched]
            )
        return exact, variants

    def has_short(self, text: str) -> bool:
        """Whether a line of a row, with or without a label before a colon, is one of the texts
        without an n-gram.
        """
        from pipeline.data.ngrams import words_in

        lines = [line for line in text.splitlines() if len(line) < LONGEST] if self.short else []
        return any(
            " ".join(words_in(text)) in self.short
            for line in lines
            for text in (line, LABEL.sub("", line))
        )


def folder_of(config: DataStage, data_root: Path | None) -> Path | None:
    """Return the folder with the benchmarks, or None for those on the Hub."""
    if config.data.benchmarks == "none":
        return None
    if config.data.benchmarks:
        return Path(config.data.benchmarks)
    return data_root


def scored_sets(config: DataStage) -> dict[str, str] | None:
    """Return the benchmarks that own rows are compared with besides those of a folder, as
    `Data.scored` has them.

    None stands for the rows of shipped sets: these are compared with all benchmarks, and each must
    be readable.
    """
    if config.data.benchmarks == "none":
        return {}
    if not config.expert.is_own:
        return None
    if config.data.scored is None:
        return dict.fromkeys(BENCHMARKS, "")
    return config.data.scored


def comparison_text(config: DataStage, data_root: Path | None) -> str:
    """Return what a plan says of the benchmarks that a data run compares its rows with."""
    folder, scored = folder_of(config, data_root), scored_sets(config) or {}
    names = dict.fromkeys(name for name, _ in files_compared(folder, scored).values())
    on_hub = []
    for name, place in scored.items():
        if not place and folder is None:
            on_hub.append(name)
    text = f"rows are compared with {', '.join([*names, *on_hub]) or 'no benchmark'}"
    return text + (", as far as the Hub can be read" if on_hub else "")


def keeps_items_apart(config: DataStage, data_root: Path | None) -> bool:
    """Whether data_root is a data run or a small world, which wrote its benchmarks with its
    training sets and keeps them apart itself: the sentences of a constructed world share their
    frames, so that n-grams say nothing about its items.
    """
    wrote_both = data_root is not None and (
        read_manifest(data_root) or (data_root / "world.json").is_file()
    )
    return bool(wrote_both) and config.data.benchmarks is None


def fate_of_number_variants(config: DataStage, source: Source) -> str:
    """Drop or count. By default dropped where exact ones are, but in language sets counted."""
    return config.data.number_variants or (
        "count" if source.is_language_set else config.data.decontaminate
    )


def dropping_marks(config: DataStage, source: Source, exact: Any, variants: Any) -> Any:
    """Return the benchmarks, as bits, for which a source drops rows that share an n-gram
    (`Known.shared`).
    """
    dropped = 0
    for bit, name in enumerate(SETS):
        if config.data.decontaminate == "drop" or name in (source.without or ()):
            dropped |= 1 << bit
    marks = exact & dropped
    if fate_of_number_variants(config, source) == "drop":
        marks = marks | variants
    return marks


def compared_with(
    root: Path | None,
    lock: Lock | None,
    languages: Iterable[str] = (),
    scored: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the benchmarks that rows are compared with.

    They are files below `root` with their sha256, or the sets on the Hub (`hub_sources`) with their
    locked revisions, which are empty where not locked.

    Args: scored: as `scored_sets` gives them.
    """
    pins: dict[str, str] = {}
    for _, source in hub_sources(languages, scored) if root is None else ():
        entry = lock.entry(source) if lock else None
        if entry:
            pins[label_of(source)] = entry["revision"]
        else:
            pins[label_of(source)] = ""
    files = files_compared(root, scored or {})
    digests = sha256_of(file for _, file in files.values())
    return pins | {label: digests[file] for label, (_, file) in sorted(files.items())}


def files_compared(root: Path | None, scored: Mapping[str, str]) -> dict[str, tuple[str, Path]]:
    """Return label -> (benchmark, file) of the files below `root` and of those that `scored`
    names.
    """
    folders = []
    if root is not None:
        folders = [(root, [*BENCHMARKS])]
    files: dict[str, tuple[str, Path]] = {}
    for name, place in scored.items():
        if Path(place).is_file():
            files[f"{name} {Path(place).name}"] = name, Path(place)
        elif place:
            folders.append((Path(place), [name]))
    for folder, names in folders:
        found = scored_files(folder)
        for name in names:
            for path in found[name]:
                files[path.relative_to(folder).as_posix()] = (name, path)
    return files


def label_of(source: Source) -> str:
    return f"{source.hub} {part_of(source)}"


def uncompared_benchmarks(run: Run[DataStage]) -> str:
    """Return a sentence if benchmarks were added or changed since a finished training set was
    built; otherwise "".
    """
    config, manifest = run.config, read_manifest(run.folder)
    data_root = None
    if "data_root" in run.parents:
        data_root = run.parents["data_root"].folder
    if (
        manifest is None
        or "benchmarks" not in manifest.facts
        or keeps_items_apart(config, data_root)
    ):
        return ""
    recorded, lock = manifest.facts["benchmarks"], read_lock(run.runs_dir)
    pins = compared_with(
        folder_of(config, data_root), lock, config.expert.languages, scored_sets(config)
    )
    later = []
    for name, pin in pins.items():
        if pin and recorded.get(name) != pin:
            later.append(name)
    if not later:
        return ""
    return (
        f"The rows of {run.name} were not compared with {', '.join(first_few(later, 3))}, which"
        " came after they were drawn. To compare them, build the set again: stage=data with its"
        f" keys (stage=show run={run.name} lists them) and redo=true."
    )


def benchmark_ngrams(
    n: int,
    root: Path | None,
    lock: Lock | None,
    languages: Iterable[str] = (),
    scored: Mapping[str, str] | None = None,
) -> Known:
    """Return the n-grams of the benchmarks below `root`, or of those on the Hub (`hub_sources`).

    Args: scored: as `scored_sets` gives them.

    Raises: PipelineError: a file is broken, or the Hub does not give a benchmark that shipped rows
    need.
    """
    from pipeline.data.ngrams import NgramSet, words_in

    unread: list[str] = []
    texts_by_name: dict[str, list[str]] = {name: [] for name in BENCHMARKS}
    of_files = of_file_texts(root, scored or {})
    if root is None:
        on_hub = of_hub(lock, languages, scored, unread)
    else:
        on_hub = iter(())
    for name, text in chain(of_files, on_hub):
        texts_by_name.setdefault(name, []).append(text)
    own = []
    for name, texts in texts_by_name.items():
        if name not in BENCHMARKS:
            for text in texts:
                own.append(text)
    sets = [*(texts_by_name[name] for name in BENCHMARKS), own]
    exact, without_numbers = (NgramSet(sets, n, bare) for bare in (False, True))
    short = set()
    for words in map(words_in, exact.short):
        if len(words) >= FEWEST:
            short.add(" ".join(words))
    counts = {}
    for name, texts in texts_by_name.items():
        if texts:
            counts[name] = len(texts)
    return Known(exact, without_numbers, counts, short, unread)


def texts_of(name: str, row: Row) -> Iterator[tuple[str, str]]:
    """Yield (benchmark, text) of a row; of an own task's row the text of each column."""
    of_task = name not in BENCHMARKS
    if of_task:
        texts = []
        for text in row.values():
            if isinstance(text, str):
                texts.append(text)
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
                yield from texts_of(
                    name, json.loads(line) if path.suffix == ".jsonl" else {"text": line}
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{type(error).__name__} {getattr(error, 'msg', error)}"
                raise PipelineError(
                    f"{path}, line {number} cannot be compared with ({problem}): give the Hub's"
                    f" {name}"
                ) from error


def of_hub(
    lock: Lock | None, languages: Iterable[str], scored: Mapping[str, str] | None, unread: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield (benchmark, text) of the sets on the Hub.

    Sets that `scored` names may be unreadable: see `unread`.
    """
    with ExitStack() as offline:
        for name, source in hub_sources(languages, scored):
            label = f"{name} ({source.hub_config}), which training rows are compared with"
            try:
                if lock:
                    source, files = lock.source(source)
                else:
                    source, files = (source, None)
                with readable_errors(label, source):
                    for row in open_rows(label, source, None, 0, files)[0]:
                        yield from texts_of(name, row)
            except PipelineError as error:
                if scored is None:
                    raise PipelineError(
                        f"{error}; or give data.benchmarks, a folder with the benchmark files"
                    ) from error
                if not unread and "cannot be reached" in str(
                    error
                ):  # else each set waits for the Hub
                    offline.enter_context(force_offline())
                unread.append(label_of(source))
