"""Stage data: an expert's training set, from its sources or two experts' sets, or the small world.

A training set is train.jsonl and validation.jsonl, with prompt and completion (or text) a row, and
a data card with the numbers of rows and the reasons for dropped rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import DataStage
from pipeline.data import benchmarks, small_world, union
from pipeline.data.card import summarize_counts, write_card
from pipeline.data.draw import draw_rows
from pipeline.data.mixture import gather_rows, open_sources
from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock, read_lock

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[DataStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Write the data of a run into `work` and return the counts of its card."""
    config = run.config
    world, items, union_of = config.expert.world, config.expert.items, config.expert.union
    counts: dict[str, Any]
    if world is not None:
        counts = small_world.write(work, "training sets and items", world.dev_items, world.items)
    elif items is not None:
        counts = small_world.write(work, "items", items.dev, items.test)
    elif union_of:
        sides = {name: expert.side for name, expert in union_of.items()}
        folders = {name: run.parents[name].folder for name in sides}
        seed = config.seed if config.data.shuffle else None
        counts = union.write_union(work, folders, sides, seed)
    else:
        root = run.parents["data_root"].folder if "data_root" in run.parents else None
        lock = read_lock(run.runs_dir)
        if benchmarks.keeps_items_apart(config, root):
            data = replace(config.data, decontaminate="count", number_variants="count")
            config = replace(config, data=data)
        counts = make_training_set(config, root, work, lock)
    tracker.summary(counts)
    return {"counts": counts}


def make_training_set(
    config: DataStage, data_root: Path | None, work: Path, lock: Lock | None = None
) -> dict[str, Any]:
    """Read, compare, draw and write the rows of a training set. Return the counts of its card.

    The seed decides the order of rows. Unusable rows and exact duplicates are dropped. Rows that
    share an n-gram with a benchmark and word problems in language sets are dropped too, or only
    counted. Then each source gives the rows of its share, or all rows. Validation rows are kept
    apart.
    """
    opened = open_sources(config, data_root, lock)
    folder = benchmarks.folder_of(config, data_root)
    scored = benchmarks.scored_sets(config)
    known = benchmarks.benchmark_ngrams(
        config.data.ngram, folder, lock, config.expert.languages, scored=scored
    )
    usable, counts = gather_rows(config, known, opened)
    named = {name: [(name, line) for line in lines] for name, lines in usable.items()}
    drawn = draw_rows(config, named)
    if not drawn["train"]:
        raise PipelineError(
            f"data.validation={config.data.validation} leaves no row for training. Lower it."
        )
    taken = Counter(source for source, _ in chain(*drawn.values()))
    for name in config.expert.sources:
        counts[name]["taken"] = taken[name]
    for name, rows in drawn.items():
        lines = b"".join(line for _, line in rows)
        (work / f"{name}.jsonl").write_bytes(lines)
        counts[name] = len(rows)
    (work / "data_card.md").write_text(write_card(config, counts, known), encoding="utf-8")
    print(summarize_counts(config, counts), file=sys.stderr)
    if not known.texts and config.data.benchmarks != "none":
        print(
            "no benchmark files were found to compare with. Set data.benchmarks=FOLDER.",
            file=sys.stderr,
        )
    return counts
