"""Stage table: computes the runs of a table and writes its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.commands.clean import free_ranked
from pipeline.commands.plan import problems_of, show_plan
from pipeline.commands.report import write_results
from pipeline.config.compose import compose
from pipeline.config.overrides import override_of
from pipeline.config.stages import SelectStage, TableStage
from pipeline.errors import PipelineError
from pipeline.launch.launchers import Execute, executor_for, what_failed
from pipeline.progress import say
from pipeline.report.placed_claims import check_claims
from pipeline.report.report_state import Reported, report_folder
from pipeline.runs.disk import check_writable
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


def make_table(config: TableStage) -> Path:
    """Compute the runs of a table, and the runs that its selections add.

    Returns the report's page.

    Raises:
        PipelineError: the plan has problems, and no run was computed; or runs failed, and the
            report lists them.
    """
    planning = Planning.of(config)
    config = planning.config
    check_claims(planning)
    reported = Reported.of(config)
    check_writable(config.runs_path, create=False)  # before their digests are needed
    targets, runs, reasons = planning.graph()
    waiting = planning.waiting_evaluations()
    again = [override_of(key, value) for key, value in config.given.items()]
    if config.launcher.dry_run:
        show_plan(compose([*again, "stage=plan"]))  # type: ignore[arg-type]  # which refuses more
    elif causes := problems_of(planning, runs, reasons, waiting):
        raise PipelineError(*causes)
    reported = replace(
        reported, table=config.table, data_root=config.data_root, every=dict(config.every)
    )
    check_writable(config.runs_path)
    if not config.launcher.dry_run:
        reported.write_state(report_folder(config))
    failed: dict[str, str] = {}
    executed: set[str] = set()
    with executor_for(config.launcher, targets, again or None) as execute:
        while targets := [run for run in targets if run.hash not in executed]:
            failed |= execute_targets(execute, planning, targets)
            executed |= {run.hash for run in targets}
            targets = planning.targets()
    page = write_results(planning, replace(reported, failed=failed))
    if failed:
        raise PipelineError(f"{what_failed(failed)}; {page} shows the finished runs")
    return page


def execute_targets(execute: Execute, planning: Planning, targets: list[Run]) -> dict[str, str]:
    """Compute runs and return the failures.

    With free_snapshots, one selection runs at a time, and its ranked snapshots are deleted before
    the next.
    """
    if planning.plan.table.free_snapshots:
        runs = order_runs(targets)
        protected = planning.named_snapshots()
        for selection in (run for run in runs if isinstance(run.config, SelectStage)):
            execute([selection])
            for name in free_ranked(runs, protected):
                say(f"freed: {name}, which is ranked")
    return execute(targets)
