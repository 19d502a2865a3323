"""Stage plan: the runs of a table or of a command, what they cost, what is missing, and what could be detected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from pipeline.commands.clean import missing_snapshots
from pipeline.config.overrides import chosen_options, typed_in
from pipeline.config.stages import (
    EvalStage,
    MergeStage,
    PlanStage,
    TrainStage,
    trains,
)
from pipeline.errors import PipelineError
from pipeline.estimate.durations import History, describe_training, memory_here, visible_gpus
from pipeline.estimate.gpu_budget import estimate_costs
from pipeline.estimate.training_rows import cut_lines
from pipeline.hub.lock import read_lock
from pipeline.launch.launchers import workers_of
from pipeline.launch.preflight import evaluation_problems
from pipeline.report.contrasts import detectable_claims, detectable_differences
from pipeline.report.placed_claims import check_claims
from pipeline.report.stored import SPM_MODEL
from pipeline.runs.disk import check_writable
from pipeline.runs.dtypes import stored_dtype
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.hub_inputs import collect_hub_inputs
from pipeline.stages.rows import build_single
from pipeline.tables.overrides import describe_every_keys
from pipeline.tables.plan import TablePlan
from pipeline.tables.planned_runs import Planning, expanded_text
from pipeline.text import align_columns, pluralize
from pipeline.train.memory import emulated


def show_plan(config: PlanStage) -> str:
    """The runs of a table by kind, what they cost, what is missing, and what its contrasts could detect.

    Raises:
        PipelineError: some runs cannot be planned, evaluated, or fit plan.gpu and plan.gpus; one sentence per cause,
            with the shown text.
    """
    if config.plan.expand and config.command is None:
        return expanded_text(config.table).rstrip()
    if config.command is not None:
        runs = order_runs([build_single(config.command)])
        about = describe_training(runs[-1], chosen_options(config.command)) if trains(runs[-1].config) else ""
        if isinstance(runs[-1].config, MergeStage):
            stored = stored_dtype(runs[-1], runs[-1].runs_dir) or "the dtype of its experts"
            about = f"the merge is stored in {stored}"
        reasons, typed = reasons_unfinished(runs), typed_in(config.command)
        problems = evaluation_problems(runs, reasons, config.plan.prompts)
        return plan_text(config, runs, reasons, [], problems, about=about, typed=typed)
    planning = Planning.of(config)
    config = cast(PlanStage, planning.config)
    check_claims(planning)
    (_, runs, reasons), waiting = planning.graph(), planning.waiting_evaluations()
    deleted = missing_snapshots(runs, reasons)
    lines = [
        *count_kinds(planning, runs, reasons),
        *describe_every_keys(planning, runs),
        *published_lines(planning.plan),
        *ways_of_scoring(runs),
        *empty_spbleu(planning),
        *detectable_differences(planning),
        *detectable_claims(planning),
        *(f"cannot be computed: {name} was deleted, train it again with redo=true" for name in deleted),
    ]
    causes = [*not_planned(planning), *evaluation_problems(runs, reasons, config.plan.prompts, waiting)]
    scores = planning.plan.scores
    missing = sum(planning.expected_evaluation(score) is None for score in scores)
    omitted = f"not including {missing:,} of {len(scores):,} scores, which cannot be planned" if missing else ""
    table = planning.plan.table
    return plan_text(config, runs, reasons, lines, causes, omitted, table.free_snapshots, waiting, typed=table.every)


def ways_of_scoring(runs: Sequence[Run]) -> Iterator[str]:
    """A line: in which dtype, by which products of matrices, and by what these runs are scored."""
    found = {
        f"{config.dtype} ({config.products} products) by {config.backend}"
        for run in runs if isinstance(run.config, EvalStage) for config in [run.config.eval]
    }  # fmt: skip
    if found:
        yield f"scored in {'; '.join(sorted(found))}"


def plan_text(
    config: PlanStage, runs: list[Run], reasons: Mapping[str, str], more: list[str], causes: list[str],
    omitted: str = "", free_snapshots: bool = False, waiting: Sequence[Run] = (), about: str = "",
    typed: Container[str] = (),
) -> str:  # fmt: skip
    """A plan of runs as text: what it is `about`, takes, and what is `omitted` from that, first and last; the runs,
    their cost, and `more`. reasons: why runs are to compute; typed: keys that no hardware= would change.

    Raises:
        PipelineError: there are causes why it cannot be computed; with the text.
    """
    remaining = [run for run in runs if run.hash in reasons]
    cost = estimate_costs(remaining, config.plan, free_snapshots, waiting, typed) if config.plan.gpu else None
    causes = [*causes, *(cost.causes if cost else [])]
    if reasons:
        try:
            check_writable(Path(config.runs_dir), create=False)
        except PipelineError as error:
            causes.append(str(error))
    if config.command is not None:  # whose knobs are its own
        causes = [cause.replace("every.", "") for cause in causes]
    history = History(finished_manifests(Path(config.runs_dir)))
    workers = workers_of(config.launcher, runs) if config.launcher.name == "local" else 1
    time, unknown = history.sum(remaining, workers)
    time += f" with {workers} workers" * (workers > 1 and time.startswith("about"))
    if unknown:
        time = unknown if time == "?" else f"{time}, not including {unknown}"
    parts = [
        about,
        f"{len(reasons)} of {len(runs)} runs to compute here: {time}",
        cost.headline() if cost else "",
        omitted,
    ]
    head = "; ".join([*filter(None, parts), *([pluralize(len(causes), "problem")] if causes else [])])
    needed = cost.lines() if cost else [] if visible_gpus() else memory_lines(remaining)
    shown = show_runs(runs, history, reasons, config.plan.lines)
    text = "\n".join([head, shown, *cut_lines(remaining), *needed, *more, head])
    if causes:
        raise PipelineError("\nerror: ".join(causes), output=text)
    return text


def not_planned(planning: Planning) -> list[str]:
    """One sentence per cause why parts of a table cannot be planned, with the number of parts."""
    missing = {f"{key} is missing" for key in planning.problems}
    causes = Counter(problem for problem in planning.problems.values() if problem not in missing)
    dependents = len(planning.problems) - sum(causes.values())
    lines = [
        f"cannot be planned: {problem}{f' ({count} times)' if count > 1 else ''}" for problem, count in causes.items()
    ]
    return [*lines[:-1], f"{lines[-1]}, and {dependents} parts that depend on these"] if lines and dependents else lines


def show_runs(runs: list[Run], history: History, reasons: Mapping[str, str], max_lines: int) -> str:
    """Text table of the runs with their estimated seconds and states, at most `max_lines`; then missing inputs."""
    rows = [("run", "stage", "seconds", "state")]
    for run in runs[:max_lines]:
        if run.hash in reasons:
            rows.append((run.name, run.config.stage, history.seconds_text(run), reasons[run.hash]))
        else:
            manifest = read_manifest(run.folder)
            seconds, how = (f"{manifest.seconds:.0f}", "finished") if manifest else ("", "deleted, no longer needed")
            rows.append((run.name, run.config.stage, seconds, how))
    omitted = len(runs) - max_lines
    lines = align_columns(rows)
    lines += [f"and {omitted} more; plan.lines={len(runs)} lists all"] if omitted > 0 else []
    if runs:
        inputs = collect_hub_inputs(runs)
        missing = inputs.not_pinned(read_lock(runs[0].runs_dir))
        lines += [f"not pinned: {', '.join(missing)}; stage=prefetch locks their revisions"] if missing else []
        lines += [*inputs.problems, *(f"left out: {why}" for why in inputs.left_out)]
    return "\n".join(lines)


def memory_lines(runs: Sequence[Run]) -> list[str]:
    """Lines about trainings on a CPU: the largest memory, if it is known, and what it computes slowly."""
    trainings = [run for run in runs if isinstance(run.config, TrainStage)]
    estimates = [(bytes_needed, run.name) for run in trainings if (bytes_needed := memory_here(run)) is not None]
    lines = [f"{slow} ({run.name})" for run in trainings if (slow := emulated(run.config.sft))][:1]
    if estimates:
        lines.append(f"memory of trainings: up to {max(estimates)[0] / 1e9:.1f} GB on a CPU ({max(estimates)[1]})")
    return lines


def empty_spbleu(planning: Planning) -> list[str]:
    """A line for the cells that stay empty for want of spBLEU's SentencePiece model."""
    empty = 0
    for cell in planning.plan.cells.values():
        scores = {score for item in cell.items for reading in item.readings for score in reading.values()}
        runs = filter(None, map(planning.expected_evaluation, scores if cell.metric == "spbleu" else ()))
        empty += any(run.config.eval.spm_model is None for run in runs)
    return [f"{pluralize(empty, 'cell')} of spBLEU will be empty: give {SPM_MODEL}"] if empty else []


def count_kinds(planning: Planning, runs: Sequence[Run], reasons: Mapping[str, str]) -> list[str]:
    """Lines with the number of runs and finished runs per kind; evaluations of merges in memory are a kind of their
    own."""
    by_kind: dict[str, list[Run]] = {}
    for run in runs:
        in_memory = isinstance(run.config, EvalStage) and run.config.merge is not None
        kind = "averages of evals" if is_bundle(run) else "eval of a merge in memory" if in_memory else run.config.stage
        by_kind.setdefault(kind, []).append(run)
    lines = [
        f"{kind}: {len(members)}, {sum(run.hash not in reasons for run in members)} finished"
        for kind, members in by_kind.items()
    ]
    plan, waiting = planning.plan, len(planning.waiting_scores())
    count = len(plan.scores)
    distinct = len({run.hash for run in map(planning.evaluation_of, plan.scores) if run})
    cells = f"{len(plan.cells)} cells of {count} scores, {distinct} distinct"
    lines += [f"{cells}; {len(plan.choices)} choices" + (f", {waiting} scores wait for theirs" if waiting else "")]
    return lines


def published_lines(plan: TablePlan) -> list[str]:
    """One line per published table: how many cells have a number in it, and the rows and columns without one."""
    counts = Counter(cell.published[0] for cell in plan.cells.values() if cell.published)
    lines = []
    for key, count in counts.items():
        absent = dict.fromkeys(f"{row} {column}" for table, row, column in plan.unprinted if table == key)
        suffix = f"; not printed there, so left empty: {', '.join(absent)}" if absent else ""
        lines.append(f"published: {key} for {pluralize(count, 'cell')}{suffix}")
    return lines
