"""The results that a table's report shows, gathered from its plan and its runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.config.stages import EvalStage, TableStage
from pipeline.files import config_dir_flags
from pipeline.hub.addresses import without_credentials
from pipeline.report.cells import cell_result, choices_of
from pipeline.report.contrasts import compared_pairs, mark_cells, measure_pairs, sampled_axes
from pipeline.report.load.answers import Evaluation, read_answers, sample_files
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.report_state import overrides_of
from pipeline.report.stored import StoredAnswers, first_failure, page_text
from pipeline.report.verdicts import judge_claims
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.manifest import Malformed, Manifest, read_manifest
from pipeline.runs.provenance import DISTRIBUTION, git_state, package_version
from pipeline.runs.run import Run, flatten_dict
from pipeline.runs.unchanged import SMALL_BYTES, damage_of, describe_change
from pipeline.tables.planned_runs import Planning, stored_scores


def gather_results(
    planning: Planning, failed: Mapping[str, str], reasons: Mapping[str, str] | None = None
) -> Results:
    """Return the results of a table, as the report reads them.

    Args:
        planning: The table's plan and runs.
        failed: The reasons of failed runs, by name.
        reasons: `reasons_unfinished` of the table's runs, if already known.
    """
    table, plan = planning.plan.table, planning.plan
    targets = planning.targets()
    runs = order_runs(targets)
    damaged = {}
    for run in targets:
        damage = damage_of(run.folder)
        if damage:
            damaged[run.name] = damage
    stored = StoredAnswers(planning, failed, damaged)
    evaluations = {}
    for run in runs:
        is_stored = isinstance(run.config, EvalStage) and (run.folder / "scores.json").is_file()
        if is_stored and run.name not in damaged:
            evaluations[run.name] = Evaluation(*stored_scores(run), sample_files(run.folder))
    stored.answers, parquet = read_answers(evaluations)
    cells = [cell_result(stored, cell) for cell in plan.cells.values()]
    contrasts = measure_pairs(plan, stored, compared_pairs(plan))
    if reasons is None:
        reasons = reasons_unfinished(runs, targets)
    run_results, missing = describe_runs(runs, failed, reasons)
    failures, blocked = {}, {}
    for name, reason in failed.items():
        first = first_failure(name, failed)
        if first == name:
            failures[name] = page_text(reason, planning.config.runs_dir)
        else:
            blocked[name] = f"not made ({first} failed)"
    versions: Mapping[str, Any] = {}
    machine: Mapping[str, Any] = {}
    for result in run_results:
        if result.stage == "eval" and result.finished:
            versions, machine = result.versions, result.machine
            break
    return Results(
        table=table.name,
        title=table.title,
        note=table.note,
        command=without_credentials(command_of(planning.config)),
        rows=plan.rows,
        columns=plan.columns,
        cells=mark_cells(cells, contrasts, table.baselines),
        sampled=sampled_axes(plan),
        runs=run_results,
        failed=failures,
        missing=blocked | missing,
        git=git_state(),
        machine=dict(sorted(machine.items())),
        versions={"pipeline": package_version(DISTRIBUTION), **dict(sorted(versions.items()))},
        contrasts=contrasts,
        primary=table.primary,
        baselines=table.baselines,
        verdicts=judge_claims(plan, stored),
        choices=choices_of(planning),
        evaluations=evaluations,
        answers=stored.answers,
        parquet=parquet,
    )


def command_of(config: TableStage) -> str:
    """Return the shell command that computes a table.

    It has the folders of options, and all overrides that decide results.
    """
    overrides = [*config_dir_flags(), "stage=table", f"table={config.table}"]
    overrides += overrides_of(config)
    if config.runs_dir != TableStage.runs_dir:
        overrides += [f"runs_dir={config.runs_dir}"]
    return shlex.join(["python", "-m", "pipeline", *overrides])


# --- runs ---


def describe_runs(
    runs: Sequence[Run], failed: Mapping[str, str], reasons: Mapping[str, str]
) -> tuple[list[RunResult], dict[str, str]]:
    """Return all runs as their manifests record them, and run -> why it was not started yet."""
    results, missing = [], {}
    for run in runs:
        name, runs_dir = run.name, run.folder.parent
        manifest = None
        with suppress(Malformed):  # `reasons` says why
            manifest = read_manifest(run.folder)
        if manifest is not None:
            stale = reasons.get(run.hash, "")
            if not stale:
                stale = describe_change(run.folder, manifest, SMALL_BYTES, weights=False)
            results.append(finished_result(run, manifest, page_text(stale, runs_dir)))
            continue
        reason = failed.get(name, "deleted after what needs it was finished")
        reason = page_text(reason, runs_dir)
        if run.hash in reasons and name not in failed:
            reason = page_text(f"not made ({reasons[run.hash]})", runs_dir)
            missing[name] = reason
        results.append(RunResult(name, run.config.stage, run.folder, False, reason))
    return results, missing


def finished_result(run: Run, manifest: Manifest, stale: str) -> RunResult:
    """Return a finished run as the report reads it.

    `stale` is the reason why it has to be recomputed, or "".
    """
    parents = {role: parent.name for role, parent in manifest.parents.items()}
    root = manifest.facts.get("weights_root") or manifest.weights_root
    if root is None and "checkpoint" in manifest.parents:
        root = manifest.parents["checkpoint"].content
    model = parents.get("checkpoint", "")
    if not model and isinstance(run.config, EvalStage) and run.config.merge:
        model = run.config.merge.method
    decided = flatten_dict(manifest.decided_by.get("config", {}))
    decided.pop("stage", None)
    warnings = manifest.facts.get("warnings", [])
    return RunResult(
        name=run.name,
        stage=run.config.stage,
        folder=run.folder,
        stale=stale,
        model=model or parents.get("model", ""),
        parents=parents,
        config={key: format_knob_value(value) for key, value in decided.items()},
        seconds=manifest.seconds,
        attempt=manifest.attempt,
        started=manifest.started,
        weights_root=root,
        versions=manifest.versions,
        machine=manifest.machine,
        warnings=[page_text(warning, run.folder.parent) for warning in warnings],
    )


def format_knob_value(value: Any) -> Any:
    """Return the value of a setting for readers, with blank text and structures as JSON."""
    if isinstance(value, int | float) or value is None:
        return value
    if isinstance(value, str) and value.strip():
        return without_credentials(value)
    return without_credentials(json.dumps(value, ensure_ascii=False))
