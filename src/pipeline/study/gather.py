"""What the report of a table is made of: each cell's evaluations by model, language and seed, trainings, provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.report.results import CellResult, FailedRun, Results, TrainingResult
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.provenance import git_state, machine, versions
from pipeline.study.cells import Cell, Item, ScoreRef
from pipeline.study.graph import ordered
from pipeline.study.planning import Planning


def gather(planning: Planning, failed: Mapping[str, str]) -> Results:
    """The finished and failed runs of a table as the report reads them.

    A row of the report is a model: the table's rows where these name runs, else its columns. What a cell is reduced
    over, besides languages, stands as seeds there.
    """
    table, plan = planning.plan.table, planning.plan
    runs = ordered(planning.targets())
    manifests = {run.hash: manifest for run in runs if (manifest := read_manifest(run.folder))}
    rows_are_models = any(side.words.get("run") for side in table.rows)
    repeats: dict[Any, int] = {}  # the axes that a number is repeated over, in the order met
    cells: dict[CellResult, None] = {}
    for cell in plan.cells.values():
        for item, score in shown(planning, cell):
            run = planning.evaluation(score)
            if run is None:
                continue
            manifest = manifests.get(run.hash)
            checkpoint = run.parents.get("checkpoint")
            seed = seed_of(item.at, repeats)
            cells[CellResult(
                row=cell.row if rows_are_models else cell.column,
                language=str(item.at.get("language", score.language)), seed=seed, name=run.name, folder=run.folder,
                checkpoint=checkpoint.folder if checkpoint else None,
                seconds=manifest.seconds if manifest else None, manifest_warnings=tuple(differences(manifest)),
            )] = None  # fmt: skip
    trainings = [run for run in runs if isinstance(run.config, TrainStage) and run.hash in manifests]
    root = f" data_root={planning.config.data_root}" if planning.config.data_root else ""
    return Results(
        table=table.name, title=table.title, note=table.note,
        command=f"python -m pipeline stage=table table={planning.config.table}{root}",
        languages=list(dict.fromkeys(cell.language for cell in cells)),
        seeds=sorted({cell.seed for cell in cells}),
        rows=list(dict.fromkeys(plan.rows if rows_are_models else plan.columns)), cells=list(cells),
        trainings=[TrainingResult(run.label, run.name, run.folder) for run in trainings],
        failed=[FailedRun(name, reason) for name, reason in failed.items()],
        seconds=sum(one.seconds for one in manifests.values()),
        versions=versions(), machine=machine(), git=git_state(),
    )  # fmt: skip


def shown(planning: Planning, cell: Cell) -> Iterator[tuple[Item, ScoreRef]]:
    """The scores that a cell shows: of what is chosen, the winner's; none while a choice is open."""
    for item in cell.items:
        winner = planning.chosen(item.choice) if item.choice else ()
        for reading in item.readings:
            score = reading.get(()) or (reading.get(winner) if winner is not None else None)
            if score is not None:
                yield item, score


def seed_of(at: Mapping[str, Any], repeats: dict[Any, int]) -> int:
    """The seed, or where other axes repeat a number, the place of their values among those met."""
    others = tuple((axis, str(value)) for axis, value in at.items() if axis not in ("language", "seed"))
    if not others:
        return int(at.get("seed", 0))
    return repeats.setdefault((others, at.get("seed")), len(repeats))


def differences(manifest: Manifest | None) -> list[str]:
    """How the making of a cell differs from this process: versions, threads, device."""
    if manifest is None:
        return []
    here = {**versions(), **machine()}
    there = {**manifest.versions, **manifest.machine}
    return [f"{key} {there[key]}, here {here[key]}" for key in sorted(there) if key in here and there[key] != here[key]]
