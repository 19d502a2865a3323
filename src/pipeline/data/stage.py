"""Stage data: an expert's training set, drawn from its sources or joined from two experts', or the
small world.

A training set is train.jsonl and validation.jsonl with prompt and completion (or text) a row, and a
data card that says what was taken, what was dropped and why.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import DataStage
from pipeline.data import benchmarks, small_world, union
from pipeline.data.card import summarize_counts, write_card
from pipeline.data.draw import draw_rows
from pipeline.data.mixture import filter_candidates, gather_candidates, open_sources
from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock, read_lock

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[DataStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Run the data stage. Return the counts that the card states."""
    config, facts = run.config, dict[str, Any]()
    counts: dict[str, Any]
    world = config.expert.world
    if world is not None:
        counts = small_world.write(work, "training sets and items", world.dev_items, world.items)
    elif (items := config.expert.items) is not None:
        counts = small_world.write(work, "items", items.dev, items.test)
    elif config.expert.union:
        sides = {name: expert.side for name, expert in config.expert.union.items()}
        folders = {name: run.parents[name].folder for name in sides}
        counts = union.write_union(
            work, folders, sides, config.seed if config.data.shuffle else None
        )
    else:
        root = None
        if "data_root" in run.parents:
            root = run.parents["data_root"].folder
        lock = read_lock(run.runs_dir)
        folder = benchmarks.folder_of(config, root)
        scored = benchmarks.scored_sets(config)
        pins = benchmarks.compared_with(
            folder, lock, config.expert.languages, scored
        )  # before they are read
        if benchmarks.keeps_items_apart(config, root):
            config = replace(
                config, data=replace(config.data, decontaminate="count", number_variants="count")
            )
        counts = make_training_set(config, root, work, lock)
        unread = counts.pop("unread", [])
        facts["benchmarks"] = {label: pin for label, pin in pins.items() if label not in unread}
    tracker.summary(counts)
    return {"counts": counts, **facts}


def make_training_set(
    config: DataStage, data_root: Path | None, work: Path, lock: Lock | None = None
) -> dict[str, Any]:
    """Read, judge, draw, write. The order of rows is a function of the seed.

    Rows that cannot be used and exact duplicates go; rows that share an n-gram with a benchmark
    and, of language sets, word problems go too unless they are only to be counted; then each source
    gives the rows that its share asks for, or all, and validation rows are kept apart.
    """
    opened = open_sources(config, data_root, lock)
    folder = benchmarks.folder_of(config, data_root)
    scored = benchmarks.scored_sets(config)
    known_ngrams = benchmarks.benchmark_ngrams(
        config.data.ngram, folder, lock, config.expert.languages, scored=scored
    )
    candidates, counts = gather_candidates(config, known_ngrams, opened)
    usable = filter_candidates(config, candidates, counts)
    drawn = draw_rows(
        config, {name: [(name, line) for line in lines] for name, lines in usable.items()}
    )
    if not drawn["train"]:
        raise PipelineError(
            f"data.validation={config.data.validation} leaves no row for training: ask for fewer"
        )
    for name in config.expert.sources:
        counts[name]["taken"] = sum(source == name for part in drawn.values() for source, _ in part)
    for name, part in drawn.items():
        (work / f"{name}.jsonl").write_bytes(b"".join(line for _, line in part))
    counts |= {name: len(part) for name, part in drawn.items()}
    (work / "data_card.md").write_text(write_card(config, counts, known_ngrams), encoding="utf-8")
    print(summarize_counts(config, counts), file=sys.stderr)
    if not known_ngrams.texts and config.data.benchmarks != "none":
        print(
            "no benchmark files were found to compare with: give data.benchmarks=FOLDER",
            file=sys.stderr,
        )
    if known_ngrams.unread:
        counts["unread"] = known_ngrams.unread
    return counts
