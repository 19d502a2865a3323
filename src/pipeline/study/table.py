"""Stages table and report: a table's runs made, gathered and handed to the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.config.stages import TableStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.hub.lock import read_lock
from pipeline.runs.manifest import Manifest, finished, read_manifest
from pipeline.runs.provenance import git_state, machine, versions
from pipeline.runs.run import Run
from pipeline.study.command_rows import Study, study
from pipeline.study.execute import execute
from pipeline.study.graph import ordered, predict, unfinished
from pipeline.study.needs import needs


def show_plan(config: TableStage) -> str:
    return show(ordered(study(config).targets))


def show(runs: list[Run]) -> str:
    """What would run, what is done, and why not, as a table in text."""
    history = list(finished(runs[0].runs_dir)) if runs else []
    rows, left, reasons = [("run", "stage", "seconds", "state")], 0.0, unfinished(runs)
    for run in runs:
        if run.hash in reasons:
            left += predict(run, history)
            rows.append((run.name, run.config.stage, f"~{predict(run, history):.0f}", reasons[run.hash]))
        else:
            manifest = read_manifest(run.folder)
            assert manifest is not None
            rows.append((run.name, run.config.stage, f"{manifest.seconds:.0f}", "finished"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    if runs:
        wanted = needs(runs)
        missing = wanted.not_pinned(read_lock(runs[0].runs_dir))
        lines += [f"not pinned: {', '.join(missing)}; stage=prefetch locks their revisions"] if missing else []
        lines += wanted.problems
    return "\n".join([*lines, f"{len(reasons)} of {len(runs)} runs to make, about {left:.0f} seconds here"])


def make_table(config: TableStage) -> Path:
    """Make what the table needs, then its report. Failed runs stand in the report, and the stage fails after it."""
    asked = study(config)
    failed = execute(asked.targets)
    page = build_report(config, asked, failed)
    if failed:
        raise PipelineError(f"{len(failed)} runs failed ({', '.join(failed)}); the report {page} shows what there is")
    return page


def report_table(config: TableStage) -> Path:
    """The report of what is finished; nothing is made."""
    asked = study(config)
    runs = ordered(asked.targets)
    reasons = unfinished(runs)
    missing = {run.name: reasons[run.hash] for run in runs if run.hash in reasons}
    if len(missing) == len(runs):
        raise PipelineError(
            f"table={config.table.name} has no finished run in {config.runs_dir}: make them with stage=table"
        )
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    return build_report(config, asked, missing)


def build_report(config: TableStage, asked: Study, failed: dict[str, str]) -> Path:
    from pipeline.report.tables import build

    folder = Path(config.runs_dir) / "reports" / config.table.name
    page = build(gather(config, asked, failed), folder)
    track(config, folder)
    return page


def gather(config: TableStage, asked: Study, failed: dict[str, str]) -> dict[str, Any]:
    """What the report is made of: cells with their folders, trainings, failures, provenance."""
    runs = ordered(asked.targets)
    manifests = {run.hash: manifest for run in runs if (manifest := read_manifest(run.folder))}
    table = config.table
    data_root = f" data_root={config.data_root}" if config.data_root else ""
    trainings = [run for run in runs if isinstance(run.config, TrainStage) and run.hash in manifests]
    cells = []
    for cell in asked.cells:
        manifest = manifests.get(cell.eval.hash)
        cells.append({
            "row": cell.row, "language": cell.language, "seed": cell.seed,
            "eval": str(cell.eval.folder), "name": cell.eval.name, "checkpoint": str(cell.model.folder),
            "seconds": manifest and manifest.seconds, "manifest_warnings": differences(manifest),
        })  # fmt: skip
    return {
        "table": table.name, "title": table.title, "note": table.note,
        "command": f"python -m pipeline stage=table table={table.name}{data_root}",
        "languages": list(table.languages), "seeds": list(table.seeds), "row_order": list(table.rows),
        "cells": cells,
        "trainings": [{"label": run.label, "folder": str(run.folder), "name": run.name} for run in trainings],
        "failed": [{"name": name, "reason": reason} for name, reason in failed.items()],
        "seconds": sum(one.seconds for one in manifests.values()),
        "versions": versions(), "machine": machine(), "git": git_state(),
    }  # fmt: skip


def differences(manifest: Manifest | None) -> list[str]:
    """How the making of a cell differs from this process: versions, threads, device."""
    if manifest is None:
        return []
    here = {**versions(), **machine()}
    there = {**manifest.versions, **manifest.machine}
    return [f"{key} {there[key]}, here {here[key]}" for key in sorted(there) if key in here and there[key] != here[key]]


def track(config: TableStage, folder: Path) -> None:
    """The table as a W&B run of its own: scores, the table, the plots."""
    import csv

    from pipeline.runs.tracking import open_run

    described = {
        "name": f"table-{config.table.name}",
        "group": config.table.name,
        "job_type": "table",
        "config": {"table": config.table.name},
    }
    with open_run(folder, config.tracking, **described) as tracker:
        with open(folder / "table.csv", encoding="utf-8", newline="") as file:
            head, *rows = list(csv.reader(file))
        tracker.table("scores", head, rows)
        for plot in sorted((folder / "plots").glob("*.png")):
            tracker.image(f"plots/{plot.stem}", plot)
