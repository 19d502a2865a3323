"""The sweep stage: one merge over a grid of its knobs, scored on one model in memory.

Each point is the run that stage=eval merge=... would make, by the same hash, so that either finds the other's.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage, SweepStage
from pipeline.config.words import with_values
from pipeline.errors import PipelineError
from pipeline.runs.run import Run
from pipeline.stages.evaluation import refuse_dtypes
from pipeline.stages.rows import build

Point = dict[str, Any]  # swept knob -> its value


def make_sweep(config: SweepStage) -> Path:
    """Score this shard's points, then draw all that are finished. Gives the page.

    Raises:
        PipelineError: a point that is no merge (before any is scored), or points that failed (after the page is there).
    """
    from pipeline.launch.in_process import execute
    from pipeline.merge.resident import resident
    from pipeline.merge.stage import merge_of
    from pipeline.report.html.sweep import write_page

    points = grid(config)
    runs = [build(evaluation_at(config, point)) for point in points]
    refuse_dtypes(runs, "eval.dtype")
    for run in runs:
        refuse_unfinished(run)
    for run in runs:  # by headers; weights by magnitude are measured once
        merge_of(run)
    first, count = shard(config.sweep.shard)
    mine = runs[first::count]
    print(f"sweep of {len(points)} points, {len(mine)} in shard {config.sweep.shard}", file=sys.stderr)
    with resident():
        failed = execute(mine)
    name = hashlib.sha256("".join(run.hash for run in runs).encode()).hexdigest()[:8]
    label = f"{config.merge.method}-{config.eval.name}"
    folder = Path(config.runs_dir) / "reports" / f"sweep-{label}-{name}"
    page = write_page(folder, config, points, runs)
    track(config, folder)
    if failed:
        told, reason = next(iter(failed.items()))
        raise PipelineError(f"{len(failed)} points failed, the first {told} ({reason}); the rest is in {page}")
    return page


def track(config: SweepStage, folder: Path) -> None:
    """The sweep as a W&B run of its own: the scores and the map."""
    from pipeline.runs.tracking import open_run

    if not (folder / "scores.csv").is_file():
        return
    described = {
        "name": folder.name,
        "group": folder.name,
        "job_type": "sweep",
        "config": {"merge": config.merge.method},
    }
    with open_run(folder, config.tracking, **described) as tracker:
        head, *rows = list(csv.reader((folder / "scores.csv").read_text(encoding="utf-8").splitlines()))
        tracker.table("scores", head, rows)
        tracker.image("map", folder / "map.png")


def shard(text: str) -> tuple[int, int]:
    """`i/n`, counted from 1, as (index from 0, n)."""
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise PipelineError(f"sweep.shard={text}: write i/n, the i-th of n shards, i from 1 to n (1/4 to 4/4)")
    return int(part) - 1, int(count)


def grid(config: SweepStage) -> list[Point]:
    """All combinations of the swept values, the last knob changing fastest. Refuses knobs that the merge has not."""
    swept = {item.name: getattr(config.sweep, item.name) for item in fields(config.sweep) if item.name != "shard"}
    swept = {key: values for key, values in swept.items() if values is not None}
    known = {item.name for item in fields(config.merge)}
    for key, values in swept.items():
        if key not in known:
            knobs = sorted(known & {item.name for item in fields(config.sweep)})
            raise PipelineError(f"sweep.{key}: merge={config.merge.method} has no such knob; it has {', '.join(knobs)}")
        if len(values) != len({repr(value) for value in values}):
            raise PipelineError(f"sweep.{key}={values} names a value twice: name each once")
    if not swept:
        raise PipelineError(
            "stage=sweep needs values: give sweep.<knob of the merge>=[...], sweep.bottom_layers=[3,4,5]"
        )
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def evaluation_at(config: SweepStage, point: Point) -> EvalStage:
    """The evaluation of one point, as stage=eval merge=... composes it."""
    shared = {item.name for item in fields(EvalStage)} & {item.name for item in fields(SweepStage)} - {"stage", "merge"}
    return EvalStage(
        stage="eval",
        merge=with_values(config.merge, point, "sweep."),
        **{name: getattr(config, name) for name in shared},
    )


def refuse_unfinished(run: Run) -> None:
    """A sweep starts from experts that are there."""
    for role, one in run.parents.items():
        if isinstance(one, Run) and not isinstance(one.config, EvalStage):
            raise PipelineError(f"{role} {one.name} is not finished: make it first")
