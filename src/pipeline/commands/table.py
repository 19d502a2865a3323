"""Stages table and report: compute the runs of a table, and write its report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.commands.clean import free_ranked, missing_snapshots
from pipeline.commands.plan import not_planned, waiting_evaluations
from pipeline.config.stages import (
    Report,
    ReportStage,
    SelectStage,
    TableStage,
)
from pipeline.errors import PipelineError
from pipeline.launch.launchers import Execute, executor_for
from pipeline.launch.preflight import evaluation_problems, training_problems
from pipeline.report.load.archive import is_archive
from pipeline.report.placed_claims import check_claims
from pipeline.report.report_state import Reported
from pipeline.runs.disk import check_writable
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.lease import slurm_job
from pipeline.runs.run import Run, parent_runs
from pipeline.tables.planned_runs import Planning
from pipeline.text import pluralize


def make_table(config: TableStage) -> Path:
    """Compute the runs of a table, then those that its selections add, until none is left. Returns the report's page.

    Raises:
        PipelineError: the plan has problems (before anything is computed), or runs failed (after the report, which
            lists them).
    """
    planning = Planning.of(config)
    config = planning.config
    check_claims(planning)
    targets = planning.targets()
    if missing := missing_snapshots(order_runs(targets)):
        problem = (
            f"table={config.table} needs {', '.join(missing)}, which {'was' if len(missing) == 1 else 'were'} deleted"
        )
        raise PipelineError(f"{problem}: train again with redo=true, or remove the runs that need it")
    waiting = waiting_evaluations(planning)
    # the job that continues a table leaves prompts to the evaluations, which check them, too
    prompts = config.launcher.retry_failed or slurm_job() is None
    if causes := not_planned(planning) or evaluation_problems([*order_runs(targets), *waiting], prompts):
        raise PipelineError("\nerror: ".join(causes))
    reported = Reported.of(config)
    reported.warn_of_another(config.table, report_folder(planning))
    reported = replace(reported, table=config.table, data_root=config.data_root, every=dict(config.every))
    check_writable(Path(config.runs_dir))
    reported.write_state(report_folder(planning))
    failed: dict[str, str] = {}
    executed: set[str] = set()
    later = partial(waiting_evaluations, planning)
    with executor_for(config.launcher, targets, again=sys.argv[1:], later=later) as execute:
        while targets := [run for run in targets if run.hash not in executed]:
            failed = execute_targets(execute, planning, targets, failed)
            executed |= {run.hash for run in targets}
            targets = planning.targets()
    page = write_results(planning, replace(reported, failed=failed), Report(fewer=True))
    if failed:
        raise PipelineError(f"{what_failed(failed, order_runs(planning.targets()))}; {page} shows what there is")
    return page


def what_failed(failed: Mapping[str, str], runs: Sequence[Run]) -> str:
    """Text with the failed runs and reasons, and the number of runs that were not computed as they depend on them."""
    blocked = {run.name for run in runs if any(parent.name in failed for parent in parent_runs(run.parents))}
    own_failures = [f"{name}: {reason}" for name, reason in failed.items() if name not in blocked]
    suffix = f"; {len(own_failures) - 3} more" if len(own_failures) > 3 else ""
    summary = f"{pluralize(len(own_failures), 'run')} failed ({'; '.join(own_failures[:3])}{suffix})"
    dependents = len(failed) - len(own_failures)
    return f"{summary}, so {dependents} that depend on them were not computed" if dependents else summary


def execute_targets(execute: Execute, planning: Planning, targets: list[Run], failed: dict[str, str]) -> dict[str, str]:
    """Compute runs and return the failures; with free_snapshots one selection at a time, deleting the snapshots that
    it has ranked before the next."""
    if planning.plan.table.free_snapshots:
        runs = order_runs(targets)
        protected = planning.named_snapshots()
        for selection in (run for run in runs if isinstance(run.config, SelectStage)):
            failed = execute([selection], failed)
            for name in free_ranked(runs, protected):
                print(f"freed: {name}, which is ranked", file=sys.stderr)
    return execute(targets, failed)


def report_table(config: ReportStage) -> Path:
    """Write the report of a table's finished runs, or of an archive, without computing any. Returns its page."""
    if is_archive(Path(config.table)):
        from pipeline.commands.export import report_archive

        return report_archive(config)
    reported = Reported.of(config)
    planning = Planning.of(reported.asked_again(config))
    targets = planning.targets()
    runs = order_runs(targets)
    reasons = reasons_unfinished(runs, targets)
    missing = {run.name: reasons[run.hash] for run in runs if run.hash in reasons}
    if len(missing) == len(runs):
        raise PipelineError(
            f"table={config.table} has no finished run in {config.runs_dir}: compute them with stage=table"
        )
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    for problem in training_problems(runs, reasons):
        print(f"warning: {problem}", file=sys.stderr)
    failed = {name: reason for name, reason in reported.failed.items() if name in missing}
    return write_results(planning, replace(reported, failed=failed), config.report, reasons)


def report_folder(planning: Planning) -> Path:
    return Path(planning.config.runs_dir) / "reports" / planning.plan.table.name


def write_results(
    planning: Planning, reported: Reported, report: Report, reasons: Mapping[str, str] | None = None
) -> Path:
    """Write the report: page, cells, contrasts and claims. Returns the page."""
    from pipeline.report.collect import gather_results
    from pipeline.report.page import by_message
    from pipeline.report.write import write_report

    folder = report_folder(planning)
    results = gather_results(planning, reported.failed, reasons)
    reported.refuse_fewer(folder, results.finished, report.fewer)
    page = write_report(results, folder)
    print((folder / "summary.txt").read_text(encoding="utf-8"), file=sys.stderr)
    for message, names in by_message((warning, run.name) for run in results.runs for warning in run.warnings):
        print(f"warning: {message} ({names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)})", file=sys.stderr)
    reported.write_state(folder, finished=results.finished)
    if planning.config.tracking.mode != "disabled":
        from pipeline.runs.tracking import track_report

        track_report(folder, planning.config.tracking, "table", planning.plan.table.name, planning.targets())
    return page
