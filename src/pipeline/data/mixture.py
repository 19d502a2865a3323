"""Stage data: an expert's training set, drawn from its sources, or the small world.

A training set is train.jsonl and validation.jsonl with prompt and completion (or text) a row, and a data card that says
what was taken, what was dropped and why. Rows that cannot be used and exact duplicates go; rows that share an n-gram
with a benchmark and, of language sets, word problems go too unless they are only to be counted; then each source gives
the rows that its count or share asks for, and validation rows are kept apart, of a joint set half of each side.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import DataStage, Source
from pipeline.data import benchmarks
from pipeline.data.benchmarks import TEXTS
from pipeline.data.card import card, reasons, summary
from pipeline.data.load import read
from pipeline.data.sources import SCRIPTS, UNUSABLE, Example, Unusable, columns
from pipeline.knobs import PipelineError

if TYPE_CHECKING:
    from pipeline.lock import Lock
    from pipeline.runs import Run
    from pipeline.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The data stage. Gives the counts that the card states."""
    config = run.config
    assert isinstance(config, DataStage)
    if config.expert.world is not None:
        from pipeline.data import sandbox

        counts = sandbox.write(work, config.expert.world)
    else:
        from pipeline.lock import read_lock
        from pipeline.runs import read_manifest

        root = run.parents["data_root"].folder if "data_root" in run.parents else None
        # A data run that is a data_root wrote its benchmarks beside its training sets, and keeps them apart itself: the
        # sentences of a constructed world share their frames, so that n-grams say nothing about its items.
        vouched = root is not None and read_manifest(root) is not None and config.data.benchmarks is None
        counts = build(config, root, work, read_lock(run.runs_dir), vouched)
    tracker.summary(counts)
    return {"counts": counts}


def build(
    config: DataStage, data_root: Path | None, work: Path, lock: Lock | None = None, vouched: bool = False
) -> dict[str, Any]:
    """Read, look, draw, split, write. The order is a function of the seed.

    vouched: data_root keeps its benchmarks apart itself, so that what is shared with them is counted and kept.
    """
    from pipeline.data.candidates import gathering

    check_sources(config, data_root, lock)
    beside = Path(config.data.benchmarks) if config.data.benchmarks else data_root
    known = benchmarks.known(config.data.ngram, beside, lock)
    with gathering(work, known) as candidates:
        counts: dict[str, Any] = {}
        for index, (name, source) in enumerate(config.expert.sources.items()):
            counts[name] = {"rows": 0, "empty": 0}
            examples = examples_of(name, source, data_root, config.seed, lock, counts[name])
            candidates.add_all(name, index, examples, language_set=source.language not in (None, "en"))
        kept = judge(config, candidates, counts, drop=config.data.decontaminate == "drop" and not vouched)
        taken = draw(config, kept)
        if not taken["train"]:
            raise PipelineError(f"data.validation={config.data.validation} leaves no row for training: ask for fewer")
        owners = candidates.arrays()[0]
        for index, name in enumerate(config.expert.sources):
            counts[name]["taken"] = sum(int((owners[rows] == index).sum()) for rows in taken.values())
        for name, rows in taken.items():
            with open(work / f"{name}.jsonl", "wb") as file:
                file.writelines(candidates.lines(rows))
    counts |= {name: len(rows) for name, rows in taken.items()}
    (work / "data_card.md").write_text(card(config, counts, known, vouched), encoding="utf-8")
    print(summary(config, counts), file=sys.stderr)
    if not known.texts:
        print("no benchmark files were found to compare with: give data.benchmarks=FOLDER", file=sys.stderr)
    return counts


def check_sources(config: DataStage, data_root: Path | None, lock: Lock | None) -> None:
    """Raise a PipelineError for sources that cannot be read or mixed, before any is: each gives its first row."""
    check_halves(config)
    expert = config.expert
    for name, source in expert.sources.items():
        if name in ("train", "validation"):
            raise PipelineError(f"expert.sources.{name} has the name of what is written: give the source another")
        columns(name, source)
        if odd := [told for told in source.without or () if told not in TEXTS]:
            raise PipelineError(f"expert.sources.{name}.without={odd[0]} is no benchmark: name of {', '.join(TEXTS)}")
    kinds = {"text" if source.rows in ("text", "gsm8k_text") else "pairs" for source in expert.sources.values()}
    if len(kinds) > 1:
        raise PipelineError(
            f"expert={expert.name} mixes plain text with prompts and completions: keep one kind an expert"
        )
    if not kinds:
        raise PipelineError(f"expert={expert.name} has no sources: give +expert.sources.NAME={{...}}")
    for name, source in expert.sources.items():
        next(opened(name, source, data_root, config.seed, lock), None)


def check_halves(config: DataStage) -> None:
    """Raise a PipelineError for validation rows of a joint set that cannot be halved."""
    validation = config.data.validation
    if joint(config) and validation % 2:
        raise PipelineError(
            f"data.validation={validation} must be even: half of each side of expert={config.expert.name}; "
            f"give {validation + 1}"
        )


def joint(config: DataStage) -> bool:
    """Whether the sources are of both sides."""
    return {source.side for source in config.expert.sources.values()} == {"math", "language"}


def opened(
    name: str, source: Source, data_root: Path | None, seed: int, lock: Lock | None, counts: Any = None
) -> Iterator[Example | Unusable]:
    """The rows of a source: below data_root, else locked in the hub's cache, else of the hub."""
    source, files = lock.source(source) if lock and data_root is None else (source, None)
    return read(name, source, data_root, seed, files, counts)


def examples_of(
    name: str, source: Source, data_root: Path | None, seed: int, lock: Lock | None, counts: dict[str, int]
) -> Iterator[Example]:
    """The usable examples of a source, each with its side in a joint set. The other rows are counted by their reasons.

    Raises:
        PipelineError: no row is usable, and not for being empty alone; or most of a language's text is in no letter of
            its script, as where English columns were taken.
    """
    script, written, usable = SCRIPTS.get(source.language or ""), 0, 0
    for example in opened(name, source, data_root, seed, lock, counts):
        counts["rows"] += 1
        if isinstance(example, dict) and not example.get("completion", example.get("text", "")).strip():
            example = "empty"
        if isinstance(example, str):
            counts[example] = counts.get(example, 0) + 1
            continue
        usable += 1
        written += script is not None and script.search("\n".join(example.values())) is not None
        yield example | {"side": source.side} if source.side else example
    if not usable and counts["empty"] < counts["rows"]:
        why = "; ".join(f"{counts[reason]} {what}" for reason, what in UNUSABLE.items() if counts.get(reason))
        raise PipelineError(
            f"source {name}: none of its {counts['rows']} rows can be used ({why}): change the file, or "
            f"expert.sources.{name}"
        )
    if script is not None and 2 * written < usable:
        raise PipelineError(
            f"source {name}: {written} of {usable} rows hold a letter of the script of "
            f"language={source.language}: its columns are of another language; check expert.sources.{name}.rows"
        )


def judge(config: DataStage, candidates: Any, counts: dict[str, Any], drop: bool) -> dict[str, list[int]]:
    """Source -> the rows that are left of it, in their order. What is dropped or seen is counted."""
    import numpy as np

    sources, marks, maths = candidates.arrays()
    first = candidates.first_of_each()
    bits = {name: 1 << bit for bit, name in enumerate(TEXTS)}
    kept = {}
    for index, (name, source) in enumerate(config.expert.sources.items()):
        here = sources == index
        counts[name]["duplicates"] = int((here & ~first).sum())
        here &= first
        counts[name] |= {"contaminated": int((here & (marks > 0)).sum()), "word_problems": int((here & maths).sum())}
        shared = {told: int((here & (marks & bit > 0)).sum()) for told, bit in bits.items()}
        counts[name]["shared"] = {told: count for told, count in shared.items() if count}
        fatal = 0xFF if drop else sum(bits[told] for told in source.without or ())
        here &= marks & np.uint8(fatal) == 0
        if config.data.word_problems == "drop":
            here &= ~maths
        kept[name] = np.flatnonzero(here).tolist()
        counts[name]["left"] = len(kept[name])
    if not any(kept.values()):
        why = reasons(config, counts).values()
        rows = sum(counts[name]["rows"] for name in kept)
        raise PipelineError(
            f"expert={config.expert.name}: nothing is left of {rows} rows ({', '.join(why)}): ask for other sources, "
            "or data.decontaminate=count, data.word_problems=count"
        )
    return kept


# ---------------------------------------------------------------------------------------------------- the draw


def draw(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    """The rows of train and of validation, drawn by the seed.

    Without counts and shares all rows are one pool; with them and a size each side of a joint set gives half of the
    rows. Validation rows of a joint set are half of each side in any case.

    Raises:
        PipelineError: too few rows, of all or of a side.
    """
    data, sources, seed = config.data, config.expert.sources, config.seed
    size = data.size or config.expert.size
    if not any(source.count or source.share for source in sources.values()):
        pool = [row for rows in kept.values() for row in rows]
        wanted = (size or 1) + data.validation
        if len(pool) < wanted and not data.allow_fewer:
            raise PipelineError(
                f"data.size={size} and data.validation={data.validation} ask for {wanted} rows, "
                f"expert={config.expert.name} has {len(pool)}: ask for fewer, or take those with data.allow_fewer=true"
            )
        if data.shuffle:
            random.Random(seed).shuffle(pool)
        if not (data.validation and joint(config)):
            return {"train": pool[data.validation :][:size], "validation": pool[: data.validation]}
        side_of = {row: sources[name].side for name, rows in kept.items() for row in rows}
        names = dict.fromkeys(source.side for source in sources.values())
        both = {side: [row for row in pool if side_of[row] == side] for side in names}
        refuse_short_sides(config, both)
        apart = {row for rows in both.values() for row in rows[: data.validation // 2]}
        train = [row for row in pool if row not in apart]
        return {"train": train[:size], "validation": [row for row in pool if row in apart]}

    parts = quotas(config, {name: len(rows) for name, rows in kept.items()})
    sides: dict[str | None, list[int]] = {}
    for name, rows in kept.items():
        drawn = random.Random(f"{seed} {name}").sample(rows, parts[name])
        sides.setdefault(sources[name].side, []).extend(drawn if data.shuffle else sorted(drawn))
    if joint(config):
        refuse_short_sides(config, sides)
    train, validation = [], []
    for index, rows in enumerate(sides.values()):
        if data.shuffle:
            random.Random(f"{seed} {index}").shuffle(rows)
        share = halves(data.validation, len(sides))[index]
        validation += rows[:share]
        train += rows[share:]
    if data.shuffle:
        random.Random(seed).shuffle(train)
    return {"train": train, "validation": validation}


def refuse_short_sides(config: DataStage, sides: Mapping[str | None, list[int]]) -> None:
    validation = config.data.validation
    for side, rows in sides.items():
        if validation and len(rows) <= validation // 2:  # nothing would be left to train on
            raise PipelineError(
                f"data.validation={validation} takes {validation // 2} rows of each side, and side {side} of "
                f"expert={config.expert.name} has {len(rows)}: ask for fewer"
            )


def halves(total: int, parts: int) -> list[int]:
    """`total` in as equal parts as whole numbers allow."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def quotas(config: DataStage, there: dict[str, int]) -> dict[str, int]:
    """Rows to take of each source, training and validation together.

    `count` is taken as it is, a source with neither count nor share gives all it has, and the shares divide what is
    left of the size, which in a joint set is halved between the sides first.

    Raises:
        PipelineError: shares without a size, a size that is reached before the shares, or a source with too few rows.
    """
    sources, data = config.expert.sources, config.data
    size = data.size or config.expert.size
    sides = list(dict.fromkeys(source.side for source in sources.values()))
    budgets = halves(size + data.validation, len(sides)) if size else [None] * len(sides)
    asked: dict[str, int] = {}
    for side, budget in zip(sides, budgets, strict=True):
        names = [name for name, source in sources.items() if source.side == side]
        fixed = {name: sources[name].count or there[name] for name in names if sources[name].share is None}
        shares = {name: sources[name].share or 0.0 for name in names if name not in fixed}
        asked |= fixed
        left = (budget or 0) - sum(fixed.values())
        if shares and budget is None:
            raise PipelineError(
                f"expert={config.expert.name} has shares ({', '.join(shares)}) of no size: give data.size, "
                "or mixture=layer_swapping"
            )
        if budget is not None and left < 0:
            raise PipelineError(
                f"data.size={size}: the sources without a share ({', '.join(fixed)}) give {sum(fixed.values())} rows, "
                f"more than {budget}; raise the size or give expert.sources.{next(iter(fixed))}.share"
            )
        if budget is not None and not shares and left > 0 and not data.allow_fewer:
            raise PipelineError(
                f"data.size={size} and data.validation={data.validation} ask for {budget} rows of "
                f"{', '.join(names)}, which give {budget - left}: ask for fewer, or take those with "
                "data.allow_fewer=true"
            )
        asked |= apportioned(left, shares)
    short = [f"{name} has {there[name]} rows of {want} asked" for name, want in asked.items() if want > there[name]]
    if short and not data.allow_fewer:
        raise PipelineError(
            f"expert={config.expert.name}: {'; '.join(short)}: ask for fewer, or take those with data.allow_fewer=true"
        )
    for told in short:
        print(f"expert={config.expert.name}: {told}; taken as they are (data.allow_fewer)", file=sys.stderr)
    return {name: min(want, there[name]) for name, want in asked.items()}


def apportioned(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Whole rows by shares; the largest remainders get what rounding down leaves."""
    exact = {name: total * share / sum(shares.values()) for name, share in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: total - sum(whole.values())]:
        whole[name] += 1
    return whole


# ---------------------------------------------------------------------------------------------------- files


def write_jsonl(path: Path, rows: list[Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[Any]:
    """Every line of a JSONL file. PipelineError names the file and line that is not JSON."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                where = f"{path.parent.name}/{path.name}, line {number}"
                raise PipelineError(f"{where} is not JSON: make the run again with redo=true") from None
    return rows


def files_read(sources: dict[str, Source], data_root: Path) -> list[Path]:
    """The files below data_root that decide the set, checked to be there."""
    from pipeline.data.load import local_file

    return [local_file(source, data_root) for source in sources.values()]
