"""Stages plan, table and report: what a table needs, made, and what it came to."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.commands.clean import free_ranked, freed_needed
from pipeline.config.stages import EvalStage, PlanStage, Report, ReportStage, SelectStage, TableStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.durations import History, memory_here, visible_gpus
from pipeline.estimate.gpu_budget import bill
from pipeline.hub.lock import read_lock
from pipeline.launch.launchers import Execute, makers_for
from pipeline.launch.preflight import refusals
from pipeline.report.load.archive import is_archive
from pipeline.report.render.text import aligned, some
from pipeline.results.contrasts import contrasts
from pipeline.results.placed_claims import check_claims
from pipeline.results.report_state import Reported
from pipeline.results.simulated import lines as claim_odds
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished
from pipeline.runs.graph import ordered, unfinished
from pipeline.runs.lease import job
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, runs_behind
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.hub_inputs import needs
from pipeline.tables.overrides import told_every
from pipeline.tables.plan import TablePlan
from pipeline.tables.planned_runs import Planning


def show_plan(config: PlanStage) -> str:
    """The runs of a table by kind, what they cost, what is missing, and what its contrasts could detect.

    Raises:
        PipelineError: what cannot be planned, evaluated, or fit plan.gpu and plan.gpus, a sentence for each cause,
            with all that is shown.
    """
    planning = Planning.of(config)
    check_claims(planning)
    runs = ordered(planning.targets())
    lines = [show(runs, config.plan.lines), *kinds(planning, runs)]
    waiting = [run for score in planning.waiting() if (run := planning.like(score))]
    cost = bill(runs, config.plan, planning.plan.table.free_snapshots, waiting) if config.plan.gpu else None
    lines += [*(cost.lines() if cost else []), *told_every(planning), *published(planning.plan), *contrasts(planning)]
    lines += claim_odds(planning, config.plan.worlds)
    lines += [f"cannot be made: {name} was freed, train it again with redo=true" for name in freed_needed(runs)]
    causes = [*not_planned(planning), *refusals([*runs, *waiting], config.plan.prompts), *(cost.causes if cost else [])]
    if causes:
        raise PipelineError("\nerror: ".join(causes), shown="\n".join(lines))
    return "\n".join(lines)


def not_planned(planning: Planning) -> list[str]:
    """A sentence for each cause why parts of a table cannot be built, and how many parts lack it."""
    missing = {f"{key} is missing" for key in planning.problems}
    causes = Counter(told for told in planning.problems.values() if told not in missing)
    others = len(planning.problems) - sum(causes.values())
    found = [f"cannot be planned: {told}{f' ({count} times)' if count > 1 else ''}" for told, count in causes.items()]
    return [*found[:-1], f"{found[-1]}, and {others} parts that depend on these"] if found and others else found


def show(runs: list[Run], most: int = 10**9) -> str:
    """What would run, what is done, and why not, as a table in text; where there are many runs, of the first ones."""
    history = History(finished(runs[0].runs_dir) if runs else ())
    rows, reasons = [("run", "stage", "seconds", "state")], unfinished(runs)
    for run in runs:
        if run.hash in reasons:
            rows.append((run.name, run.config.stage, history.told(run), reasons[run.hash]))
        else:
            manifest = read_manifest(run.folder)
            assert manifest is not None
            rows.append((run.name, run.config.stage, f"{manifest.seconds:.0f}", "finished"))
    more = len(rows) - 1 - most
    lines = aligned(rows[: most + 1])
    lines += [f"and {more} more; plan.lines={len(runs)} lists all"] if more > 0 else []
    if runs:
        wanted = needs(runs)
        missing = wanted.not_pinned(read_lock(runs[0].runs_dir))
        lines += [f"not pinned: {', '.join(missing)}; stage=prefetch locks their revisions"] if missing else []
        lines += wanted.problems
    left = [run for run in runs if run.hash in reasons]
    lines += memory_lines(left) if not visible_gpus() else []
    return "\n".join([*lines, f"{len(left)} of {len(runs)} runs to make here: {history.sum(left)}"])


def memory_lines(runs: Sequence[Run]) -> list[str]:
    """Of the trainings without a GPU, the one that takes the most memory."""
    trainings = [run for run in runs if isinstance(run.config, TrainStage)]
    known = [(bytes_needed, run.name) for run in trainings if (bytes_needed := memory_here(run)) is not None]
    return [f"memory of trainings: up to {max(known)[0] / 1e9:.1f} GB on a CPU ({max(known)[1]})"] if known else []


def kinds(planning: Planning, runs: Sequence[Run]) -> list[str]:
    """Runs by kind, distinct and finished; scores of merges are told apart, as they are made in memory."""
    there: dict[str, list[Run]] = {}
    for run in runs:
        live = isinstance(run.config, EvalStage) and run.config.merge is not None
        kind = "averages of evals" if is_bundle(run) else "eval of a merge in memory" if live else run.config.stage
        there.setdefault(kind, []).append(run)
    left = unfinished(list(runs))
    lines = [f"{kind}: {len(of)}, {sum(run.hash not in left for run in of)} finished" for kind, of in there.items()]
    plan, waiting = planning.plan, len(planning.waiting())
    asked = len(plan.scores)
    distinct = len({run.hash for run in map(planning.evaluation, plan.scores) if run})
    cells = f"{len(plan.cells)} cells of {asked} scores, {distinct} distinct"
    lines += [f"{cells}; {len(plan.choices)} choices" + (f", {waiting} scores wait for theirs" if waiting else "")]
    return lines


def published(plan: TablePlan) -> list[str]:
    """How many cells have a published number, a line a published table, and the rows and columns without one."""
    there = Counter(cell.published[0] for cell in plan.cells.values() if cell.published)
    lines = []
    for key, count in there.items():
        absent = dict.fromkeys(f"{row} {column}" for table, row, column in plan.unprinted if table == key)
        told = f"; not printed there, so left empty: {', '.join(absent)}" if absent else ""
        lines.append(f"published: {key} for {some(count, 'cell')}{told}")
    return lines


def make_table(config: TableStage) -> Path:
    """Make what a table needs: all that is known, then what choices among it ask for, until nothing is.

    Failed runs stand in what is written, and the stage fails after it.
    """
    planning = Planning.of(config)
    check_claims(planning)
    targets = planning.targets()
    if gone := freed_needed(ordered(targets)):
        problem = f"table={config.table} needs {', '.join(gone)}, which {'was' if len(gone) == 1 else 'were'} freed"
        raise PipelineError(f"{problem}: train again with redo=true, or leave out what is made from it")
    waiting = [run for score in planning.waiting() if (run := planning.like(score))]
    # the job that continues a table leaves prompts to the evaluations, which check them, too
    prompts = config.launcher.retry_failed or job() is None
    if causes := not_planned(planning) or refusals([*ordered(targets), *waiting], prompts):
        raise PipelineError("\nerror: ".join(causes))
    reported = replace(Reported.of(config), data_root=config.data_root, every=dict(config.every))
    check_writable(Path(config.runs_dir))
    reported.write(report_folder(planning))
    failed: dict[str, str] = {}
    made: set[str] = set()
    with makers_for(config.launcher, targets, again=sys.argv[1:]) as execute:
        while targets := [run for run in targets if run.hash not in made]:
            failed = make_all(execute, planning, targets, failed)
            made |= {run.hash for run in targets}
            targets = planning.targets()
    page = write(planning, replace(reported, failed=failed), Report(fewer=True))
    if failed:
        raise PipelineError(f"{what_failed(failed, ordered(planning.targets()))}; {page} shows what there is")
    return page


def what_failed(failed: Mapping[str, str], runs: Sequence[Run]) -> str:
    """Those that failed by themselves and why, and how many were not made as they depend on them."""
    blocked = {run.name for run in runs if any(parent.name in failed for parent in runs_behind(run.parents))}
    itself = [f"{name}: {reason}" for name, reason in failed.items() if name not in blocked]
    more = f"; {len(itself) - 3} more" if len(itself) > 3 else ""
    told = f"{some(len(itself), 'run')} failed ({'; '.join(itself[:3])}{more})"
    others = len(failed) - len(itself)
    return f"{told}, so {others} that depend on them were not made" if others else told


def make_all(execute: Execute, planning: Planning, targets: list[Run], failed: dict[str, str]) -> dict[str, str]:
    """Make runs; with free_snapshots selection by selection, and what one has ranked is freed before the next."""
    if planning.plan.table.free_snapshots:
        runs = ordered(targets)
        kept = planning.snapshots()
        for selection in (run for run in runs if isinstance(run.config, SelectStage)):
            failed = execute([selection], failed)
            for name in free_ranked(runs, kept):
                print(f"freed: {name}, which is ranked", file=sys.stderr)
    return execute(targets, failed)


def report_table(config: ReportStage) -> Path:
    """What is finished of a table, or what an archive holds; nothing is made."""
    if is_archive(Path(config.table)):
        from pipeline.commands.export import report_archive

        return report_archive(config)
    reported = Reported.of(config)
    planning = Planning.of(reported.asked_again(config))
    runs = ordered(planning.targets())
    reasons = unfinished(runs)
    missing = {run.name: reasons[run.hash] for run in runs if run.hash in reasons}
    if len(missing) == len(runs):
        raise PipelineError(
            f"table={config.table} has no finished run in {config.runs_dir}: make them with stage=table"
        )
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    failed = reported.still_failed(missing)
    return write(planning, replace(reported, failed=failed), config.report, reasons)


def report_folder(planning: Planning) -> Path:
    return Path(planning.config.runs_dir) / "reports" / planning.plan.table.name


def write(planning: Planning, reported: Reported, report: Report, reasons: Mapping[str, str] | None = None) -> Path:
    """The page of all scores, and beside it the cells that the table reduces them to, its contrasts and claims."""
    from pipeline.report.html.page import by_message
    from pipeline.report.html.write import write_report
    from pipeline.results.collect import gather

    folder = report_folder(planning)
    results = replace(gather(planning, reported.failed, reasons), base_tolerance=report.base_tolerance)
    reported.refuse_fewer(folder, results, report.fewer)
    page = write_report(results, folder)
    for message, names in by_message(results, lambda run: run.warnings):
        print(f"warning: {message} ({names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)})", file=sys.stderr)
    reported.write(folder, finished=results.finished)
    track(planning, folder)
    return page


def track(planning: Planning, folder: Path) -> None:
    """The table as a W&B run of its own."""
    if planning.config.tracking.mode == "disabled":
        return
    import csv

    from pipeline.runs.tracking import open_run

    name = planning.plan.table.name
    described = {"name": f"table-{name}", "group": name, "job_type": "table", "config": {"table": name}}
    with open_run(folder, planning.config.tracking, **described) as tracker:
        with open(folder / "cells.csv", encoding="utf-8", newline="") as file:
            head, *rows = list(csv.reader(file))
        tracker.table("cells", head, rows)
