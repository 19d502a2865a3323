"""Stage plan: shows what runs cost, what is missing, and which differences can be detected."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pipeline.commands.clean import missing_snapshots
from pipeline.commands.overview import (
    WIDTH,
    kinds_table,
    marked,
    merge_details,
    score_details,
    training_details,
    wrapped,
)
from pipeline.commands.plan_notes import (
    about_trainings,
    empty_spbleu,
    missing_inputs,
    mixed_dtypes,
    other_bases,
    template_lines,
)
from pipeline.commands.prompt_ends import prompt_lines
from pipeline.config.overrides import chosen_options, override_of
from pipeline.config.stages import PlanStage
from pipeline.errors import PipelineError
from pipeline.estimate.durations import DAY, guess, total_seconds, visible_gpus
from pipeline.estimate.gpu_budget import Bill, estimate_costs
from pipeline.launch.launchers import workers_of
from pipeline.launch.preflight import evaluation_problems
from pipeline.progress import format_duration
from pipeline.report.detectable import first_detectable, untestable_claims
from pipeline.report.placed_claims import check_claims
from pipeline.report.report_state import Reported
from pipeline.runs.disk import check_writable, nearest_existing
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build_single
from pipeline.stages.training import about_default_rate
from pipeline.tables.planned_runs import Planning
from pipeline.tables.table_files import expanded_text
from pipeline.text import align_columns, pluralize, shorten
from pipeline.train.memory import emulated


@dataclass
class Parts:
    """The parts of a plan that do not follow from its runs.

    Attributes:
        title: the first line.
        next: the command that computes the plan.
        fix: problems because of which the plan would fail.
        know: notes to read before the start.
        details: further lines.
        without: the parts that the total does not include, as text.
        appendix: lines after the listed runs.
    """

    title: str
    next: str
    fix: list[str]
    know: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    without: str = ""
    appendix: list[str] = field(default_factory=list)


def show_plan(config: PlanStage) -> str:
    """Show what is decided before the runs of a table or of a command begin.

    Raises:
        PipelineError: some runs cannot be planned or evaluated, or exceed plan.gpu, plan.gpus or
            the disk. It has one sentence for each cause, and the shown text.
    """
    if config.plan.expand and config.command is None:
        return expanded_text(config.table).rstrip()
    if config.command is not None:
        runs = order_runs([build_single(config.command)])
        options = chosen_options(config.command)
        named = [f"{key}={options[key]}" for key in ("recipe", "mixture") if key in options]
        title = f"stage={runs[-1].config.stage}: {runs[-1].label}"
        if named:
            title += f" ({' '.join(named)})"
        reasons = reasons_unfinished(runs)
        problems = evaluation_problems(runs, reasons)
        command = shlex.join(["python", "-m", "pipeline", *config.command])
        return plan_text(config, runs, reasons, Parts(title, command, problems))
    return show_table_plan(config)


def show_table_plan(config: PlanStage) -> str:
    """Show what is decided before a table is computed, as show_plan does."""
    planning = Planning.of(config)
    config = cast(PlanStage, planning.config)
    check_claims(planning)
    _, runs, reasons = planning.graph()
    waiting = planning.waiting_evaluations()
    table = planning.plan.table
    details = []
    detectable = first_detectable(planning)
    if detectable:
        text, rows = detectable
        details = [*wrapped(f"compared: {text}"), *align_columns(rows, range(1, 9))]
    scores = planning.plan.scores
    missing = sum(planning.expected_evaluation(score) is None for score in scores)
    without = ""
    if missing:
        without = f", not including {missing:,} of {len(scores):,} scores, which cannot be planned"
    parts = Parts(
        title=f"{table.name}: {table.title}",
        next=next_command(config),
        fix=problems_of(planning, runs, reasons, waiting),
        know=other_bases(planning) + mixed_dtypes(planning) + empty_spbleu(planning),
        details=details,
        without=without,
        appendix=untestable_claims(planning),
    )
    return plan_text(config, runs, reasons, parts, table.free_snapshots, waiting)


def problems_of(
    planning: Planning,
    runs: list[Run],
    reasons: Container[str],
    waiting: Sequence[Run],
) -> list[str]:
    """Return one sentence for each cause why a table cannot be computed.

    The arguments are those of `evaluation_problems`.
    """
    problems = []
    problem = Reported.of(planning.config).other_table(planning.config)
    if problem:
        problems.append(problem)
    for name in missing_snapshots(runs, reasons):
        problems.append(
            f"{name} was deleted. Train it again with redo=true, or remove the runs that need it."
        )
    problems += not_planned(planning)
    problems += evaluation_problems(runs, reasons, waiting)
    return problems


def next_command(config: PlanStage) -> str:
    """Return the command that computes the planned table, with the same settings."""
    overrides = []
    for key, value in config.given.items():
        if key.partition(".")[0] not in ("stage", "plan"):
            overrides.append(override_of(key, value))
    return shlex.join(["python", "-m", "pipeline", "stage=table", *overrides])


def plan_text(
    config: PlanStage,
    runs: list[Run],
    reasons: Mapping[str, str],
    parts: Parts,
    free_snapshots: bool = False,
    waiting: Sequence[Run] = (),
) -> str:
    """Return a plan with its costs and, if requested, its runs.

    Args:
        config: the stage.
        runs: all runs of the plan, parents first.
        reasons: hash -> why a run is computed.
        parts: the parts that are known already.
        free_snapshots: delete snapshots after their ranking.
        waiting: evaluations whose model is still to be chosen.

    Raises:
        PipelineError: the plan cannot be computed. It has the text.
    """
    remaining, runs_dir = [run for run in runs if run.hash in reasons], config.runs_path
    bill = None
    if config.plan.gpu:
        bill = estimate_costs(remaining, config.plan, free_snapshots, waiting)
    fix = list(parts.fix)
    if bill:
        fix += bill.causes
        fix += disk_problems(config, bill, free_snapshots)
    if reasons:
        try:
            check_writable(runs_dir, create=False)
        except PipelineError as error:
            fix.append(str(error))
    know = [*missing_inputs(runs, runs_dir), *parts.know, *template_lines(runs)]
    know += prompt_lines(runs)
    know += about_trainings(remaining, about_default_rate)
    if bill:
        know += [f"not included: {text}" for text in bill.left_out()]
    else:
        know += about_trainings(remaining, lambda config: emulated(config.sft))
    if config.command is not None:  # the options of one command have no prefix
        fix = [text.replace("every.", "") for text in fix]
        know = [text.replace("every.", "") for text in know]
    takes = duration_text(config, runs, remaining, bill) + parts.without
    total = f"{pluralize(len(runs), 'run')}, {len(runs) - len(remaining):,} done. {takes}."
    next_step = parts.next
    if fix:
        next_step = f"fix it, then run {next_step}"
    elif not reasons:
        next_step = next_step.replace("stage=table", "stage=report")
    lines = [
        shorten(parts.title, WIDTH),
        *wrapped(total),
        *marked("FIX", fix),
        *marked("KNOW", know),
        *kinds_table(runs, waiting, reasons, bill),
    ]
    if bill and bill.disk:
        lines.append(f"trainings write {size_text(bill.disk)}")
    lines += wrapped(training_details(remaining))
    lines += wrapped(merge_details([*runs, *waiting]))
    lines += wrapped(score_details([*runs, *waiting]))
    lines += [*parts.details, f"Next: {next_step}"]
    if config.plan.lines:
        if know:
            lines += ["", *know]
        lines += ["", *show_runs(runs, reasons, config.plan.lines), *parts.appendix]
    text = "\n".join(lines)
    if fix:
        raise PipelineError(*fix, output=text)
    return text


def duration_text(
    config: PlanStage, runs: Sequence[Run], remaining: Sequence[Run], bill: Bill | None
) -> str:
    """Return how long the remaining runs take, in GPU-hours or on this machine."""
    if bill is not None and bill.costs:
        return bill_text(bill)
    if bill and bill.unknown:
        return f"Unknown GPU-hours, of {bill.left_out()[0]}"
    if not remaining:
        return "Nothing is left to compute"
    workers = 1
    if config.launcher.name == "local":
        workers = workers_of(config.launcher, runs)
    seconds, unknown = total_seconds(remaining, workers)
    takes = f"About {format_duration(seconds)} on this machine"
    if unknown == len(remaining):
        takes = "Unknown time"
    elif workers > 1:
        takes += f" with {workers} workers"
    if 0 < unknown < len(remaining):
        takes += f", not including {pluralize(unknown, 'run')} that cannot be estimated"
    if seconds > DAY and not visible_gpus():
        takes += ". It has no GPU: hardware=NAME shows the GPU-hours"
    return takes


def bill_text(bill: Bill) -> str:
    """Return the GPU-hours of a bill, and the time on its node."""
    plan, hours = bill.plan, bill.hours
    if hours < 0.1:
        return f"{format_duration(3600 * hours)} of a GPU on {plan.gpu}x{plan.gpus}"
    time = format_duration(3600 * hours / plan.gpus)
    return f"{hours:,.1f} GPU-hours on {plan.gpu}x{plan.gpus} = {time} of one node"


def disk_problems(config: PlanStage, bill: Bill, free_snapshots: bool) -> Iterator[str]:
    """Compare what trainings write with the free space in runs_dir."""
    free = free_bytes(config.runs_path.resolve())
    if bill.disk > free:
        remedy = "Set a runs_dir with more room."
        if not free_snapshots and bill.freed < 0.9 * bill.disk:
            remedy = (
                f"Set a runs_dir with more room, or free_snapshots=true, which needs"
                f" {size_text(bill.freed)}."
            )
        yield (
            f"Trainings write {size_text(bill.disk)} to runs_dir={config.runs_dir}, where"
            f" {size_text(free)} are free. {remedy}"
        )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk where a folder is, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def size_text(size: float) -> str:
    if size >= 1e12:
        return f"{size / 1e12:.2f} TB"
    return f"{size / 1e9:.1f} GB"


def not_planned(planning: Planning) -> list[str]:
    """Return one sentence for each cause why parts of a table cannot be planned, with a count."""
    missing = {f"{key} is missing" for key in planning.problems}
    causes = Counter(planning.problems.values())
    for problem in missing:
        del causes[problem]
    dependents = len(planning.problems) - sum(causes.values())
    lines = []
    for problem, count in causes.items():
        line = f"cannot be planned: {problem}"
        if count > 1:
            line += f" ({count} times)"
        lines.append(line)
    if lines and dependents:
        lines[-1] += f"; {dependents} runs and cells need these"
    return lines


def show_runs(runs: list[Run], reasons: Mapping[str, str], max_lines: int) -> list[str]:
    """Return a table of at most `max_lines` runs, with estimated seconds and states."""
    rows = [("run", "stage", "seconds", "state")]
    for run in runs[:max_lines]:
        seconds, how = "", "deleted, no longer needed"
        if run.hash in reasons:
            expected, how = guess(run), reasons[run.hash]
            seconds = "?" if expected is None else f"~{expected:.0f}"
        elif manifest := read_manifest(run.folder):
            seconds, how = f"{manifest.seconds:.0f}", "finished"
        rows.append((run.name, run.config.stage, seconds, how))
    lines = align_columns(rows)
    omitted = len(runs) - max_lines
    if omitted > 0:
        lines.append(f"and {omitted} more; plan.lines={len(runs)} lists all")
    return lines
