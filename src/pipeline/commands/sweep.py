"""Stage sweep: evaluates one merge over a grid of its knobs, with one model in memory.

Each point is the run that stage=eval merge=... would compute, with the same hash, so that either reuses the other's.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.config.compose import with_values
from pipeline.config.stages import EvalStage, PointsStage, SweepStage
from pipeline.errors import PipelineError
from pipeline.merge.resident import keep_models_resident
from pipeline.progress import say
from pipeline.runs.run import Run
from pipeline.stages.evaluation import refuse_dtypes, refuse_lower
from pipeline.stages.rows import build

Point = dict[str, Any]  # swept knob -> its value


def make_sweep(config: SweepStage) -> Path:
    """Evaluate this shard's points, then draw all finished ones. Returns the page.

    Raises:
        PipelineError: a point is not a valid merge (before any is evaluated), or points failed (after the page is
            written).
    """
    from pipeline.launch.local import execute_here
    from pipeline.merge.stage import merge_of
    from pipeline.report.sweep import write_page
    from pipeline.runs.tracking import track_report

    for task in config.eval.tasks:
        refuse_lower(task.task, "a sweep frames")
    points = grid_points(config)
    runs = [build(evaluation_at(config, point)) for point in points]
    refuse_dtypes(runs, "eval.dtype")
    for run in runs:
        refuse_unfinished(run)
    for run in runs:  # by headers; weights by magnitude are measured once
        merge_of(run)
    first, count = parse_shard(config.sweep.shard)
    shard_runs = runs[first::count]
    say(f"sweep of {len(points)} points, {len(shard_runs)} in shard {config.sweep.shard}")
    with keep_models_resident():
        failed = execute_here(shard_runs)
    name = hashlib.sha256("".join(run.hash for run in runs).encode()).hexdigest()[:8]
    folder = config.runs_path / "reports" / f"sweep-{config.merge.method}-{config.eval.label}-{name}"
    page = write_page(folder, config, points, runs)
    if (folder / "scores.csv").is_file():
        track_report(
            folder, config.tracking, "sweep", folder.name.removeprefix("sweep-"), runs, merge=config.merge.method
        )
    if failed:
        name_failed, reason = next(iter(failed.items()))
        raise PipelineError(f"{len(failed)} points failed, the first {name_failed} ({reason}); the rest is in {page}")
    return page


def parse_shard(text: str) -> tuple[int, int]:
    """`i/n`, counted from 1, as (index from 0, n)."""
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise PipelineError(f"sweep.shard={text}: write i/n, the i-th of n shards, i from 1 to n (1/4 to 4/4)")
    return int(part) - 1, int(count)


def grid_points(config: SweepStage) -> list[Point]:
    """All combinations of the swept values, the last knob changing fastest.

    Raises:
        PipelineError: no values, a value twice, or a knob that the merge does not have.
    """
    swept = {item.name: getattr(config.sweep, item.name) for item in fields(config.sweep) if item.name != "shard"}
    swept = {key: values for key, values in swept.items() if values is not None}
    merge_knobs = {item.name for item in fields(config.merge)}
    for key, values in swept.items():
        if key not in merge_knobs:
            sweepable = sorted(merge_knobs & {item.name for item in fields(config.sweep)})
            raise PipelineError(
                f"sweep.{key}: merge={config.merge.method} has no such knob; it has {', '.join(sweepable)}"
            )
        if len(values) != len({repr(value) for value in values}):
            raise PipelineError(f"sweep.{key}={values} names a value twice: name each once")
    if not swept:
        raise PipelineError(
            "stage=sweep needs values: give sweep.<knob of the merge>=[...], sweep.bottom_layers=[3,4,5]"
        )
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def evaluation_at(config: PointsStage, point: Point, prefix: str = "sweep.") -> EvalStage:
    """The evaluation of one point, as stage=eval merge=... composes it. prefix: of its knobs, for errors."""
    shared = {item.name for item in fields(EvalStage)} & {item.name for item in fields(config)} - {"stage", "merge"}
    return EvalStage(
        stage="eval",
        merge=with_values(config.merge, point, prefix),
        **{name: getattr(config, name) for name in shared},
    )


def refuse_unfinished(run: Run) -> None:
    """Raise PipelineError if an expert of the sweep is not finished."""
    for role, parent in run.parents.items():
        if isinstance(parent, Run) and not isinstance(parent.config, EvalStage):
            raise PipelineError(f"{role} {parent.name} is not finished: run it first")
