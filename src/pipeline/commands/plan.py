"""Stage plan: shows what runs cost, what is missing, and which differences can be detected."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from pipeline.commands.clean import missing_snapshots
from pipeline.commands.overview import (
    Overview,
    kinds_table,
    memory_text,
    merge_details,
    score_details,
    training_details,
)
from pipeline.commands.prompt_ends import prompt_lines
from pipeline.config.data import Source
from pipeline.config.overrides import chosen_options, override_of, typed_in
from pipeline.config.stages import DataStage, EvalStage, MergeStage, PlanStage, TrainStage
from pipeline.data.benchmarks import comparison_text
from pipeline.data.load import example_of, with_nested
from pipeline.data.rows import IN_PART, UNUSABLE, is_blank
from pipeline.data.sources import is_kept_in_part, is_wanted, source_columns
from pipeline.errors import Mistakes, PipelineError
from pipeline.estimate.durations import NEEDS_GPU, History
from pipeline.estimate.flops import cards
from pipeline.estimate.gpu_budget import Bill, estimate_costs, memory_of, training_cost, with_recipe
from pipeline.estimate.training_rows import cut_lines, first_rows, source_files
from pipeline.hub.lock import read_lock
from pipeline.launch.launchers import workers_of
from pipeline.launch.preflight import evaluation_problems
from pipeline.progress import format_duration
from pipeline.report.detectable import detectable_claims, first_detectable
from pipeline.report.placed_claims import check_claims
from pipeline.report.report_state import Reported, overrides_of
from pipeline.report.stored import SPM_MODEL
from pipeline.runs.disk import check_writable, nearest_existing
from pipeline.runs.dtypes import stored_dtype
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.lineage import another_base
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.hub_inputs import collect_hub_inputs, kept_offline
from pipeline.stages.rows import build_single
from pipeline.stages.training import about_default_rate
from pipeline.tables.overrides import describe_every_keys
from pipeline.tables.plan import ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning, expanded_text
from pipeline.text import align_columns, first_few, pluralize
from pipeline.train.memory import SPARE, emulated


def show_plan(config: PlanStage) -> str:
    """Show what is decided before the runs of a table or of a command begin.

    The overview has 24 lines. plan.lines adds runs and all notes, and plan.keys adds the keys in
    hashes.

    Raises:
        PipelineError: some runs cannot be planned or evaluated, or exceed plan.gpu, plan.gpus or
            the disk. The error has one sentence for each cause, and the shown text.
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
        reasons, typed = reasons_unfinished(runs), typed_in(config.command)
        problems = evaluation_problems(runs, reasons, config.plan.prompts)
        command = shlex.join(["python", "-m", "pipeline", *config.command])
        overview = Overview(title, "", [], [], command, problems)
        return plan_text(config, runs, reasons, overview, typed=typed)
    return show_table_plan(config)


def show_table_plan(config: PlanStage) -> str:
    """Show what is decided before a table is computed, as show_plan does."""
    planning = Planning.of(config)
    config = cast(PlanStage, planning.config)
    check_claims(planning)
    _, runs, reasons = planning.graph()
    waiting = planning.waiting_evaluations()
    table = planning.plan.table
    detectable, claims = first_detectable(planning), detectable_claims(planning)
    compared, know, details = [], [], list[str]()
    small = [claim.id for claim in claims if claim.is_small()]
    if small:
        know.append(
            f"{len(small)} of {len(claims)} claims: the published difference is below the"
            f" detectable one ({small[0]})"
        )
    if detectable:
        compared.append(detectable[1])
        know.append(detectable[0].advice())
        details += align_columns(detectable[0].rows(), range(1, 9))
    know += last_asked(config)
    know += planning.plan.notes + other_bases(planning) + mixed_dtypes(planning)
    know += empty_spbleu(planning)
    published = sum(bool(cell.published) for cell in planning.plan.cells.values())
    if published:
        compared.append(f"{pluralize(published, 'cell')} with a published number")
    untestable = sum(claim.points is None for claim in claims)
    if untestable:
        compared.append(f"{pluralize(untestable, 'claim')} cannot be tested")
    if compared:
        details.insert(0, f"compared: {'; '.join(compared)}")
    scores = planning.plan.scores
    missing = sum(planning.expected_evaluation(score) is None for score in scores)
    without = ""
    if missing:
        without = f", not including {missing:,} of {len(scores):,} scores, which cannot be planned"
    overview = Overview(
        title=f"{table.name}: {table.title}",
        total="",
        table=[],
        details=details,
        next=next_command(config),
        fix=problems_of(planning, runs, reasons, config.plan.prompts, waiting),
        know=know,
        without=without,
    )
    appendix = [claim.text() for claim in claims]
    appendix += published_lines(planning.plan)
    if config.plan.keys:
        appendix += describe_every_keys(planning, runs)
    return plan_text(
        config, runs, reasons, overview, appendix, table.free_snapshots, waiting, typed=table.every
    )


def other_bases(planning: Planning) -> list[str]:
    """Return a line for each adapter of a study that names another base than the study."""
    base, lines = str(planning.plan.table.every.get("model")), []
    for name, row in planning.plan.table.runs.items():
        if row.kind != "checkpoint" or "eval.base" not in row.words:
            continue
        named = another_base(Path(str(row.words["checkpoint"])), base)
        if named:
            lines.append(
                f"{name} is an adapter of {named}. It is merged with and scored on the study's"
                f" base, {base}."
            )
    return lines


def mixed_dtypes(planning: Planning) -> list[str]:
    """Return a line if models are stored in several dtypes, with the dtype of all scores."""
    if planning.dtype == "auto":
        return []
    names: dict[str, list[str]] = {}
    for key, model in planning.models.items():
        with suppress(PipelineError):  # an evaluation reports a model with several dtypes
            dtype = stored_dtype(model, planning.config.runs_path) or "an unknown dtype"
            names.setdefault(dtype, []).append(key)
    stored = [f"{dtype}: {', '.join(first_few(keys, 3))}" for dtype, keys in names.items()]
    return [
        f"Models are stored in several dtypes ({'; '.join(stored)}). All are scored in"
        f" {planning.dtype}."
    ]


def last_asked(config: PlanStage) -> list[str]:
    """Return a line if stage=table was last run with other settings, which stage=report uses."""
    last = Reported.of(config)
    asked = overrides_of(replace(config, data_root=last.data_root, every=last.every))
    if not last.table or asked == overrides_of(config):
        return []
    settings = " ".join(asked) or "none of these settings"
    return [f"stage=table was last run with {settings}, and stage=report shows that table."]


def problems_of(
    planning: Planning,
    runs: list[Run],
    reasons: Container[str],
    prompts: bool,
    waiting: Sequence[Run],
) -> list[str]:
    """Return one sentence for each cause why a table cannot be computed.

    The arguments are those of `evaluation_problems`.
    """
    taken = Mistakes()
    with taken.collected():
        Reported.of(planning.config).refuse_another(planning.config)
    problems = list(taken.found)
    for name in missing_snapshots(runs, reasons):
        problems.append(
            f"{name} was deleted. Train it again with redo=true, or remove the runs that need it."
        )
    problems += not_planned(planning)
    problems += evaluation_problems(runs, reasons, prompts, waiting)
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
    overview: Overview,
    appendix: Sequence[str] = (),
    free_snapshots: bool = False,
    waiting: Sequence[Run] = (),
    typed: Container[str] = (),
) -> str:
    """Return the overview of a plan with its costs and, if requested, its runs and notes.

    Args:
        config: the stage.
        runs: all runs of the plan, parents first.
        reasons: hash -> why a run is computed.
        overview: the parts that are known already.
        appendix: further lines for plan.lines and plan.keys.
        free_snapshots: delete snapshots after their ranking.
        waiting: evaluations whose model is still to be chosen.
        typed: keys that hardware= must not change.

    Raises:
        PipelineError: the plan cannot be computed. It has the text.
    """
    remaining, runs_dir = [run for run in runs if run.hash in reasons], config.runs_path
    bill = None
    if config.plan.gpu:
        bill = estimate_costs(remaining, config.plan, free_snapshots, waiting, typed)
    history = History(finished_manifests(runs_dir))
    fix = list(overview.fix)
    if bill:
        fix += bill.causes
        fix += disk_problems(config, bill, free_snapshots)
    if reasons:
        try:
            check_writable(runs_dir, create=False)
        except PipelineError as error:
            fix.append(str(error))
    know: list[str] = []
    if bill:
        know += shorter_lines(bill)
    know += missing_inputs(runs, runs_dir)
    know += overview.know
    know += dropped_lines(remaining)
    know += cut_lines(remaining)
    know += template_lines(runs)
    know += prompt_lines(runs)
    know += comparison_lines(remaining)
    know += about_trainings(remaining, about_default_rate)
    if bill:
        know += [f"not included: {text}" for text in bill.left_out()]
    else:
        know += about_trainings(remaining, lambda config: emulated(config.sft))
    if config.command is not None:  # the options of one command have no prefix
        fix = [text.replace("every.", "") for text in fix]
        know = [text.replace("every.", "") for text in know]
    details = [
        *host_line(bill),
        *training_details(remaining),
        *merge_details([*runs, *waiting]),
        *stored_lines(runs),
        *score_details([*runs, *waiting]),
        *overview.details,
    ]
    next_command = overview.next
    if not reasons and not fix:
        next_command = next_command.replace("stage=table", "stage=report")
    takes = duration_text(config, runs, remaining, bill, history, bool(fix)) + overview.without
    overview = replace(
        overview,
        fix=fix,
        know=know,
        total=f"{pluralize(len(runs), 'run')}, {len(runs) - len(remaining):,} done. {takes}.",
        table=kinds_table(runs, waiting, reasons, bill, history),
        details=details,
        next=next_command,
    )
    lines = overview.lines()
    if config.plan.lines:
        lines.append("")
        if know:
            lines += [*know, ""]
        lines += show_runs(runs, history, reasons, config.plan.lines)
    if config.plan.lines or config.plan.keys:
        lines += appendix
    text = "\n".join(lines)
    if fix:
        raise PipelineError(*fix, output=text)
    return text


def duration_text(
    config: PlanStage,
    runs: Sequence[Run],
    remaining: Sequence[Run],
    bill: Bill | None,
    history: History,
    has_problems: bool,
) -> str:
    """Return how long the remaining runs take, in GPU-hours or on this machine."""
    if bill is not None and bill.kinds:
        return bill_text(bill)
    if bill and bill.unknown:
        return f"Unknown GPU-hours, of {bill.left_out()[0]}"
    if not remaining:
        if has_problems:
            return "All that can be planned is computed"
        return "Nothing is left to compute"
    workers = 1
    if config.launcher.name == "local":
        workers = workers_of(config.launcher, runs)
    time, unknown = history.sum(remaining, workers)
    if time == "?":
        takes = "Unknown time"
    elif time == NEEDS_GPU:
        takes = f"This {NEEDS_GPU}: add hardware=NAME for its hours"
    else:
        takes = time[0].upper() + time[1:]
    if time.startswith("about"):
        takes += " on this machine"
        if workers > 1:
            takes += f" with {workers} workers"
    if unknown:
        takes += f", not including {unknown}"
    return takes


def bill_text(bill: Bill) -> str:
    """Return the GPU-hours of a bill, and the time on its node."""
    plan, hours = bill.plan, sum(map(bill.hours, bill.kinds))
    if hours < 0.1:
        return f"{format_duration(3600 * hours)} of a GPU on {plan.gpu}x{plan.gpus}"
    days = hours / plan.gpus / 24
    time = f"{24 * days:.1f} hours"
    if days >= 1:
        time = f"{days:.1f} days"
    if plan.gpus > 1:
        time += " of one node"
    return f"{hours:,.1f} GPU-hours on {plan.gpu}x{plan.gpus} = {time}"


def disk_problems(config: PlanStage, bill: Bill, free_snapshots: bool) -> Iterator[str]:
    """Yield a problem if trainings write more than the free space in runs_dir."""
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


def host_line(bill: Bill | None) -> Iterator[str]:
    """Describe a node: its memory, what trainings write, and the source of the hours."""
    if bill is not None and bill.kinds:
        host = f"host memory: up to {memory_text(cost.host for cost in bill.costs())} GB"
        if bill.disk:
            host += f"; trainings write {size_text(bill.disk)}"
        yield host
        yield bill.basis()


def stored_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the stored dtype of the last merge."""
    merges = [run for run in runs if isinstance(run.config, MergeStage)]
    for last in merges[-1:]:
        dtype = stored_dtype(last, last.runs_dir) or "the dtype of its experts"
        yield f"the merge is stored in {dtype}"


def missing_inputs(runs: list[Run], runs_dir: Path) -> list[str]:
    """Return lines about inputs from the Hub that are not pinned here or cannot be read."""
    inputs = collect_hub_inputs(runs)
    missing = inputs.not_pinned(read_lock(runs_dir))
    lines = []
    if missing:
        lines.append(
            "not pinned (stage=prefetch locks revisions, and names what needs a licence):"
            f" {', '.join(missing)}{kept_offline(missing)}"
        )
    lines += inputs.problems
    lines += [f"left out: {why}" for why in inputs.left_out]
    return lines


def dropped_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines about rows of local files that are dropped, with the reasons."""
    files = {}
    for run in runs:
        if run.config.stage == "data":
            for name, source, file in source_files(run):
                if source.prompt or source.rows == "conversation":
                    files[file] = (name, source)
    for file, (name, source) in files.items():
        with suppress(PipelineError, KeyError, OSError):  # the data run reports problems of a file
            yield from dropped_rows(file, name, source)


def dropped_rows(file: Path, name: str, source: Source) -> Iterator[str]:
    """Yield lines about the rows of one file that are dropped."""
    wanted_columns = source_columns(name, source)
    columns = [column for column, must_fill in wanted_columns.items() if must_fill]
    rows = []
    for first_row in first_rows(file, file.stat().st_mtime_ns):
        row = with_nested(first_row, columns)
        if is_wanted(row, source):
            rows.append(row)
    dropped: Counter[str] = Counter()
    for row in rows:
        for column in columns:
            if is_blank(row[column]):
                kept = f"{{{column}?}} keeps them in a template with another column"
                dropped[f"their column {column} is blank: {kept}"] += 1
    if source.rows == "conversation":
        for row in rows:
            reading = example_of(row, source, wanted_columns)
            if isinstance(reading, str):
                dropped[f"they are {UNUSABLE[reading]}"] += 1
        parts = sum(is_kept_in_part(row, source) for row in rows)
        if parts:
            yield f"{file.name}: of {parts:,} of {len(rows):,} conversations {IN_PART}"
    copies = len(rows) - len(set(map(str, rows)))
    if copies > len(rows) / 10:
        dropped["an earlier row says the same"] = copies
    for reason, count in dropped.items():
        yield f"{file.name}: {count:,} of {len(rows):,} rows are dropped, as {reason}"


def comparison_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line for each data run of local rows, with the benchmarks to compare them with."""
    lines = []
    for run in runs:
        if isinstance(run.config, DataStage) and run.config.expert.is_own:
            root = None
            if "data_root" in run.parents:
                root = run.parents["data_root"].folder
            lines.append(f"{run.name}: {comparison_text(run.config, root)}")
    return lines


def template_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line if models are trained, but not scored, with a chat template, or vice versa."""
    unlike: dict[str, str] = {}  # template -> the last training with it
    for run in runs:
        if not isinstance(run.config, EvalStage):
            continue
        scored_with_chat = run.config.eval.chat_template
        for trained in order_runs([run]):
            if isinstance(trained.config, TrainStage):
                template = trained.config.sft.template
                if (template == "chat") != scored_with_chat:
                    unlike[template] = trained.label
    for template, label in unlike.items():
        trained_with = f"{label} is trained with sft.template={template} and scored"
        if template == "chat":
            yield f"{trained_with} without it. Set eval.chat_template=true, or sft.template=plain."
        else:
            yield (
                f"{trained_with} with the chat template. Set eval.chat_template=false, or"
                " sft.template=chat."
            )


def shorter_lines(bill: Bill) -> Iterator[str]:
    """Yield the settings that would make a plan much shorter.

    If choosing snapshots takes most of the hours, it needs fewer questions or snapshots. If all
    trainings fit without gradient checkpointing, they are faster without it.
    """
    hours, card = sum(map(bill.hours, bill.kinds)), cards()[bill.plan.gpu or ""]
    chosen = bill.hours("selection")
    if chosen > hours / 2:
        remedy = "Set every.select.eval.limit or a larger every.sft.snapshot_every."
        yield f"Choosing snapshots takes {chosen:,.1f} of {hours:,.1f} GPU-hours. {remedy}"
    saved, needed = 0.0, 0.0
    for cost in bill.costs():
        config = cost.run.config
        if isinstance(config, TrainStage) and config.sft.gradient_checkpointing:
            without = with_recipe(cost.run, gradient_checkpointing=False)
            memory = memory_of(without, row=config.sft.seq_length, card=card.memory)
            needed = max(needed, memory)
            saved += cost.hours - training_cost(without, card).hours
    if saved > hours / 10 and needed <= SPARE * card.memory:
        yield f"every.sft.gradient_checkpointing=false fits, and takes {saved:,.1f} GPU-hours less."


def about_trainings(runs: Sequence[Run], text_of: Callable[[TrainStage], str]) -> list[str]:
    """Return each sentence about trainings once, with the name of the first such training."""
    texts = {}
    for run in reversed(runs):
        if isinstance(run.config, TrainStage):
            texts[text_of(run.config)] = run.name
    return [f"{text} ({name})" for text, name in texts.items() if text]


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


def show_runs(
    runs: list[Run], history: History, reasons: Mapping[str, str], max_lines: int
) -> list[str]:
    """Return a table of at most `max_lines` runs, with estimated seconds and states."""
    rows = [("run", "stage", "seconds", "state")]
    for run in runs[:max_lines]:
        seconds, how = "", "deleted, no longer needed"
        if run.hash in reasons:
            seconds, how = history.seconds_text(run), reasons[run.hash]
        elif manifest := read_manifest(run.folder):
            seconds, how = f"{manifest.seconds:.0f}", "finished"
        rows.append((run.name, run.config.stage, seconds, how))
    lines = align_columns(rows)
    omitted = len(runs) - max_lines
    if omitted > 0:
        lines.append(f"and {omitted} more; plan.lines={len(runs)} lists all")
    return lines


def empty_spbleu(planning: Planning) -> list[str]:
    """Return a line about cells that stay empty without spBLEU's SentencePiece model."""
    empty = 0
    for cell in planning.plan.cells.values():
        if cell.metric != "spbleu":
            continue
        scores: set[ScoreRef] = set()
        for item in cell.items:
            for reading in item.readings:
                scores.update(reading.values())
        runs = filter(None, map(planning.expected_evaluation, scores))
        empty += any(run.config.eval.spm_model is None for run in runs)
    if empty:
        return [f"{pluralize(empty, 'cell')} of spBLEU will be empty: give {SPM_MODEL}"]
    return []


def published_lines(plan: TablePlan) -> list[str]:
    """Return one line per published table.

    It counts the cells with a published number, and names the rows and columns without one.
    """
    counts = Counter(cell.published[0] for cell in plan.cells.values() if cell.published)
    lines = []
    for key, count in counts.items():
        absent: dict[str, None] = {}
        for table, row, column in plan.unprinted:
            if table == key:
                absent[f"{row} {column}"] = None
        suffix = ""
        if absent:
            suffix = f"; not printed there, so left empty: {', '.join(absent)}"
        lines.append(f"published: {key} for {pluralize(count, 'cell')}{suffix}")
    return lines
