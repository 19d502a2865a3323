"""From a table's plan and its runs to the results that its report shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage
from pipeline.hub.addresses import without_credentials
from pipeline.report.html.sweep import sweeps_of
from pipeline.report.load.archive import without_private
from pipeline.report.load.contents import FailedRun, Link, Results, RunResult
from pipeline.results.cell_values import Outcome
from pipeline.results.contrasts import compared, default_pairs, measured, sampled, with_best
from pipeline.results.intervals import cell_result, choices_of
from pipeline.results.questions import StoredAnswers
from pipeline.results.verdicts import judged
from pipeline.runs.graph import ordered, unfinished
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.provenance import git_state
from pipeline.runs.run import Run, flat
from pipeline.runs.unchanged import changed
from pipeline.tables.planned_runs import Planning

SMALL_BYTES = 2**26  # a touched file up to this size is hashed again: copying a folder changes its times alone


def gather(planning: Planning, failed: Mapping[str, str], reasons: Mapping[str, str] | None = None) -> Results:
    """The runs of a table as the report reads them. failed: of runs that were tried, name -> reason; reasons: what
    `unfinished` says of its runs, where that is known.
    """
    table, plan = planning.plan.table, planning.plan
    runs = ordered(planning.targets())
    names = {run.hash: run.name for run in runs}
    bound = planning.bind()
    outcome, answers = Outcome.of(bound, failed), StoredAnswers(bound)
    run_results, missing = described(runs, names, failed, unfinished(runs) if reasons is None else reasons)
    finished = [run for run in run_results if run.finished]
    versions, machine = usual(finished).get("eval", ({}, {}))
    overrides = {
        **planning.config.every,
        **({"data_root": planning.config.data_root} if planning.config.data_root else {}),
    }
    cells = with_best(plan, answers, [cell_result(outcome, place, answers) for place in outcome.cells])
    return Results(
        table=table.name, title=table.title, note=table.note,
        command=without_credentials(" ".join([
            f"python -m pipeline stage=table table={planning.config.table}",
            *(f"{'' if key == 'data_root' else 'every.'}{key}={value}" for key, value in overrides.items())])),
        rows=plan.rows, columns=plan.columns, cells=cells, sampled=sampled(plan), runs=run_results,
        failed=[FailedRun(name, without_private(why)) for name, why in failed.items()], missing=missing,
        seconds=sum(run.seconds or 0.0 for run in finished), versions=versions, machine=machine, git=git_state(),
        contrasts=measured(plan, answers, compared(plan) or default_pairs(plan, cells)), declared=bool(plan.compare),
        verdicts=judged(plan, answers), choices=choices_of(outcome), links=[Link(*sweep) for sweep in sweeps_of(
            Path(planning.config.runs_dir) / "reports", {run.hash for run in runs})],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- runs


def described(
    runs: Sequence[Run], names: Mapping[str, str], failed: Mapping[str, str], reasons: Mapping[str, str]
) -> tuple[list[RunResult], list[FailedRun]]:
    """Every run as its manifest has it, and those that nobody has tried yet."""
    run_results, missing = [], []
    for run in runs:
        manifest = read_manifest(run.folder)
        if manifest is None:
            why = without_private(failed.get(names[run.hash], f"not made ({reasons.get(run.hash, 'never made')})"))
            run_results.append(RunResult(names[run.hash], run.config.stage, run.folder, run.label, False, why))
            missing += [FailedRun(names[run.hash], why)] if names[run.hash] not in failed else []
            continue
        stale = reasons.get(run.hash, "") or changed(run.folder, manifest, SMALL_BYTES)
        run_results.append(recorded(run, names[run.hash], manifest, without_private(stale)))
    return marked(run_results), missing


def recorded(run: Run, name: str, manifest: Manifest, stale: str) -> RunResult:
    parents = {role: parent.name for role, parent in manifest.parents.items()}
    root = manifest.facts.get("weights_root") or manifest.weights_root
    if root is None and "checkpoint" in manifest.parents:
        root = manifest.parents["checkpoint"].content
    merge = (run.config.merge.method if run.config.merge else "") if isinstance(run.config, EvalStage) else ""
    config = {key: told(value) for key, value in flat(manifest.decided_by.get("config", {})).items() if key != "stage"}
    return RunResult(
        name=name, stage=run.config.stage, folder=run.folder, label=run.label, stale=stale,
        model=parents.get("checkpoint") or merge or parents.get("model", ""), card=parents.get("data", ""),
        parents=parents, config=config, seconds=manifest.seconds, attempt=manifest.attempt, started=manifest.started,
        weights_root=root, versions=manifest.versions, machine=manifest.machine,
        warnings=[without_private(parent) for parent in manifest.facts.get("warnings", [])],
    )  # fmt: skip


def told(value: Any) -> Any:
    """A knob's value as one reads it; text without a letter, as a separator is, in quotes."""
    if isinstance(value, int | float | bool) or value is None:
        return value
    return without_private(value if isinstance(value, str) and value.strip() else json.dumps(value, ensure_ascii=False))


def made_on(run: RunResult) -> tuple[str, str]:
    """Versions and machine, as text that is compared."""
    return json.dumps(run.versions, sort_keys=True), json.dumps(run.machine, sort_keys=True)


def usual(runs: Iterable[RunResult]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Stage -> the versions and the machine that made most of its runs."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for run in runs:
        counts.setdefault(run.stage, Counter())[made_on(run)] += 1
    commonest = {stage: counter.most_common(1)[0][0] for stage, counter in counts.items()}
    return {stage: (json.loads(versions), json.loads(machine)) for stage, (versions, machine) in commonest.items()}


def marked(runs: Sequence[RunResult]) -> list[RunResult]:
    """Each run with how its making differs from that of most runs of its stage: device, threads, versions."""
    commonest = usual(run for run in runs if run.finished)
    differences: dict[Any, list[str]] = {}  # compared once for each way of making

    def unlike(run: RunResult) -> list[str]:
        key = run.stage, made_on(run)
        if key not in differences:
            versions, machine = commonest[run.stage]
            own_machine, usual_machine = {**run.versions, **run.machine}, {**versions, **machine}
            differences[key] = [
                f"{name} {own_machine.get(name, 'unknown')}, most {usual_machine.get(name, 'unknown')}"
                for name in sorted({*own_machine, *usual_machine})
                if own_machine.get(name) != usual_machine.get(name)
            ]
        return differences[key]

    return [replace(run, unlike=unlike(run)) if run.finished else run for run in runs]
