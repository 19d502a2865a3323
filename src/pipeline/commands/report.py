"""Stage report: writes the report of a table's finished runs and computes no run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.commands.plan import not_planned
from pipeline.config.stages import TableStage
from pipeline.errors import PipelineError, first_few
from pipeline.launch.preflight import training_problems
from pipeline.progress import say, warn
from pipeline.report.report_state import Reported, report_folder
from pipeline.tables.planned_runs import Planning


def report_table(config: TableStage) -> Path:
    """Write the report of a table's finished runs. Return its page."""
    reported = Reported.of(config)
    planning = Planning.of(reported.asked_again(config))
    problem = reported.other_table(config)
    if problem:
        raise PipelineError(problem)
    _, runs, reasons = planning.graph()
    missing = {}
    for run in runs:
        if run.hash in reasons:
            missing[run.name] = reasons[run.hash]
    if len(missing) == len(runs):
        raise PipelineError(
            f"table={config.table} has no finished run in {config.runs_dir}: compute them with"
            " stage=table",
            *not_planned(planning),
        )
    for name, reason in missing.items():
        say(f"missing: {name}: {reason}")
    for problem in training_problems(runs, reasons):
        warn(problem)
    failed = {}
    for name, reason in reported.failed.items():
        if name in missing:
            failed[name] = reason
    return write_results(planning, replace(reported, failed=failed), reasons)


def write_results(
    planning: Planning, reported: Reported, reasons: Mapping[str, str] | None = None
) -> Path:
    """Write the report: page, cells, contrasts and claims. Return the page."""
    from pipeline.report.collect import gather_results
    from pipeline.report.render.cells import by_message
    from pipeline.report.write import write_report

    folder = report_folder(planning.config)
    results = gather_results(planning, reported.failed, reasons)
    page = write_report(results, folder)
    say((folder / "summary.txt").read_text(encoding="utf-8"))
    warnings = []
    for run in results.runs:
        warnings += [(warning, run.name) for warning in run.warnings]
    for message, names in by_message(warnings):
        warn(f"{message} ({first_few(names, 1, ' ')})")
    reported.write_state(folder)
    if planning.config.tracking.mode != "disabled":
        from pipeline.runs.tracking import track_report

        track_report(folder, planning.config.tracking, planning.plan.table.name, planning.targets())
    return page
