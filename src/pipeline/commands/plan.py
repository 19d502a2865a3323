"""Stage plan: what the runs of a table or of a command cost, what is missing, and what could be
detected.
"""

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
from pipeline.tables.plan import TablePlan
from pipeline.tables.planned_runs import Planning, expanded_text
from pipeline.text import align_columns, first_few, pluralize
from pipeline.train.memory import SPARE, emulated


def show_plan(config: PlanStage) -> str:
    """Show what is decided before the runs of a table or of a command begin.

    The overview has 24 lines. plan.lines adds all runs and notes, plan.keys the keys in hashes.

    Raises: PipelineError: some runs cannot be planned or evaluated, or do not fit plan.gpu,
    plan.gpus and the disk; one sentence for each cause, with the shown text.
    """
    if config.plan.expand and config.command is None:
        return expanded_text(config.table).rstrip()
    if config.command is not None:
        runs = order_runs([build_single(config.command)])
        options = chosen_options(config.command)
        option_text = " ".join(
            f"{key}={options[key]}" for key in ("recipe", "mixture") if key in options
        )
        title = f"stage={runs[-1].config.stage}: {runs[-1].label}" + (
            f" ({option_text})" if option_text else ""
        )
        reasons, typed = reasons_unfinished(runs), typed_in(config.command)
        problems = evaluation_problems(runs, reasons, config.plan.prompts)
        command = ["python", "-m", "pipeline", *config.command]
        return plan_text(
            config,
            runs,
            reasons,
            Overview(title, "", [], [], shlex.join(command), problems),
            typed=typed,
        )
    planning = Planning.of(config)
    config = cast(PlanStage, planning.config)
    check_claims(planning)
    _, runs, reasons = planning.graph()
    waiting = planning.waiting_evaluations()
    table, detectable, claims = (
        planning.plan.table,
        first_detectable(planning),
        detectable_claims(planning),
    )
    compared = [detectable[1]] if detectable else []
    published = sum(bool(cell.published) for cell in planning.plan.cells.values())
    if published:
        compared += [f"{pluralize(published, 'cell')} with a published number"]
    untestable = sum(claim.points is None for claim in claims)
    if untestable:
        compared += [f"{pluralize(untestable, 'claim')} cannot be tested"]
    small = [claim.id for claim in claims if claim.is_small()]
    know = []
    if small:
        know = [
            f"{len(small)} of {len(claims)} claims: the published difference is below the"
            f" detectable one ({small[0]})"
        ]
    if detectable:
        know += [detectable[0].advice()]
    know += last_asked(config)
    know += planning.plan.notes + other_bases(planning) + mixed_dtypes(planning)
    scores = planning.plan.scores
    missing = sum(planning.expected_evaluation(score) is None for score in scores)
    without = ""
    if missing:
        without = f", not including {missing:,} of {len(scores):,} scores, which cannot be planned"
    know += empty_spbleu(planning)
    overview = Overview(
        f"{table.name}: {table.title}",
        "",
        [],
        [f"compared: {'; '.join(compared)}"] if compared else [],
        next_command(config),
        problems_of(planning, runs, reasons, config.plan.prompts, waiting),
        know,
        without,
    )
    if detectable:
        overview.details += align_columns(detectable[0].rows(), range(1, 9))
    appendix = [*(claim.text() for claim in claims), *published_lines(planning.plan)]
    if config.plan.keys:
        appendix += describe_every_keys(planning, runs)
    return plan_text(
        config, runs, reasons, overview, appendix, table.free_snapshots, waiting, typed=table.every
    )


def other_bases(planning: Planning) -> list[str]:
    """Return a line for each adapter of a study that names another base than the study's."""
    base, lines = str(planning.plan.table.every.get("model")), []
    for name, row in planning.plan.table.runs.items():
        on_base = row.kind == "checkpoint" and "eval.base" in row.words
        named = ""
        if on_base:
            named = another_base(Path(str(row.words["checkpoint"])), base)
        if named:
            lines.append(
                f"{name} is an adapter of {named}: it is merged with and scored on the study's"
                f" base, {base}"
            )
    return lines


def mixed_dtypes(planning: Planning) -> list[str]:
    """Return a line about models that are stored in several dtypes, and the dtype in which all are
    scored.
    """
    if planning.dtype == "auto":
        return []
    names: dict[str, list[str]] = {}
    for key, model in planning.models.items():
        with suppress(
            PipelineError
        ):  # of several dtypes in one model, which its evaluation reports
            names.setdefault(
                stored_dtype(model, planning.config.runs_path) or "an unknown dtype", []
            ).append(key)
    stored = "; ".join(f"{dtype}: {', '.join(first_few(keys, 3))}" for dtype, keys in names.items())
    return [f"models are stored in several dtypes ({stored}): all are scored in {planning.dtype}"]


def last_asked(config: PlanStage) -> list[str]:
    """With which other settings stage=table was last asked for this table, as stage=report shows
    it.
    """
    last = Reported.of(config)
    asked = overrides_of(replace(config, data_root=last.data_root, every=last.every))
    told = (
        f"stage=table was last asked with {' '.join(asked) or 'none of these settings'}, and"
        " stage=report shows that"
    )
    if last.table and asked != overrides_of(config):
        return [told]
    return []


def problems_of(
    planning: Planning,
    runs: list[Run],
    reasons: Container[str],
    prompts: bool,
    waiting: Sequence[Run],
) -> list[str]:
    """One sentence per cause why a table cannot be computed; the arguments as of
    `evaluation_problems`.
    """
    taken = Mistakes()
    with taken.collected():
        Reported.of(planning.config).refuse_another(planning.config)
    deleted = [
        f"{name} was deleted: train it again with redo=true, or remove the runs that need it"
        for name in missing_snapshots(runs, reasons)
    ]
    return (
        taken.found
        + deleted
        + not_planned(planning)
        + evaluation_problems(runs, reasons, prompts, waiting)
    )


def next_command(config: PlanStage) -> str:
    """Return the command that computes the planned table, with the same words."""
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
    """Return the overview of a plan with its costs; then, as asked, its runs, notes and `appendix`.

    Args: reasons: why runs are to be computed. typed: keys that no hardware= would change.

    Raises: PipelineError: the plan cannot be computed; with the text.
    """
    remaining, runs_dir = [run for run in runs if run.hash in reasons], config.runs_path
    bill = None
    if config.plan.gpu:
        bill = estimate_costs(remaining, config.plan, free_snapshots, waiting, typed)
    history = History(finished_manifests(runs_dir))
    fix = [
        *overview.fix,
        *(bill.causes if bill else []),
        *disk_problems(config, bill, free_snapshots),
    ]
    if reasons:
        try:
            check_writable(runs_dir, create=False)
        except PipelineError as error:
            fix.append(str(error))
    know = [*shorter_lines(bill)] if bill else []
    know += [*missing_inputs(runs, runs_dir), *overview.know, *dropped_lines(remaining)]
    know += [
        *cut_lines(remaining),
        *template_lines(runs),
        *prompt_lines(runs),
        *comparison_lines(remaining),
        *about_trainings(remaining, about_default_rate),
    ]
    if bill:
        know += [f"not included: {text}" for text in bill.left_out()]
    else:
        know += about_trainings(remaining, lambda config: emulated(config.sft))
    if config.command is not None:  # whose knobs are its own
        fix, know = ([text.replace("every.", "") for text in texts] for texts in (fix, know))
    overview = replace(
        overview,
        fix=fix,
        know=know,
        total=total_text(
            config, runs, remaining, bill, history, overview.without, len(fix), len(know)
        ),
        table=kinds_table(runs, waiting, reasons, bill, history),
        details=[
            *host_line(bill),
            *training_details(remaining),
            *merge_details([*runs, *waiting]),
            *stored_lines(runs),
            *score_details([*runs, *waiting]),
            *overview.details,
        ],
        next=(
            overview.next
            if reasons or fix
            else overview.next.replace("stage=table", "stage=report")
        ),
    )
    lines = overview.lines()
    if config.plan.lines:
        lines += [
            "",
            *know,
            *([""] if know else []),
            *show_runs(runs, history, reasons, config.plan.lines),
        ]
    if config.plan.lines or config.plan.keys:
        lines += appendix
    text = "\n".join(lines)
    if fix:
        raise PipelineError(*fix, output=text)
    return text


def total_text(
    config: PlanStage,
    runs: Sequence[Run],
    remaining: Sequence[Run],
    bill: Bill | None,
    history: History,
    without: str,
    fix: int,
    know: int,
) -> str:
    """Return what all runs take, how many are done, and how much there is to fix and to know."""
    if bill is not None and bill.kinds:
        plan = bill.plan
        hours = sum(map(bill.hours, bill.kinds))
        days = hours / plan.gpus / 24
        if days >= 1:
            time = f"{days:.1f} days"
        else:
            time = f"{24 * days:.1f} hours"
        takes = f"{hours:,.1f} GPU-hours on {plan.gpu}x{plan.gpus} = {time}" + " of one node" * (
            plan.gpus > 1
        )
        if hours < 0.1:
            takes = f"{format_duration(3600 * hours)} of a GPU on {plan.gpu}x{plan.gpus}"
    elif bill and bill.unknown:
        takes = f"Unknown GPU-hours, of {bill.left_out()[0]}"
    elif not remaining:
        takes = "Nothing is left to compute"
        if fix:
            takes = "All that can be planned is computed"
    else:
        workers = 1
        if config.launcher.name == "local":
            workers = workers_of(config.launcher, runs)
        time, unknown = history.sum(remaining, workers)
        takes = {
            "?": "Unknown time",
            NEEDS_GPU: f"This {NEEDS_GPU}: add hardware=NAME for its hours",
        }.get(time, time)
        takes = takes[0].upper() + takes[1:]
        if time.startswith("about"):
            takes += " on this machine" + f" with {workers} workers" * (workers > 1)
        if unknown:
            takes += f", not including {unknown}"
    counts = []
    if fix:
        counts = [pluralize(fix, "thing") + " to fix"]
    if know:
        counts += [f"{know} to know" if fix else f"{pluralize(know, 'thing')} to know"]
    done = f"{len(runs) - len(remaining):,} of {len(runs):,} runs are done."
    return f"{takes}{without}. {done}" + (f" {', '.join(counts)}." if counts else "")


def disk_problems(config: PlanStage, bill: Bill | None, free_snapshots: bool) -> Iterator[str]:
    """Compare what trainings write with what is free in runs_dir."""
    if bill is None or not bill.disk:
        return
    free = free_bytes(config.runs_path.resolve())
    if bill.disk > free:
        written = f"trainings write {size_text(bill.disk)} to runs_dir={config.runs_dir}"
        saved = not free_snapshots and bill.freed < 0.9 * bill.disk
        remedy = ""
        if saved:
            remedy = f"free_snapshots=true needs {size_text(bill.freed)}, or "
        yield f"{written}, where {size_text(free)} are free: {remedy}give a runs_dir with more room"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk where a folder is, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def size_text(size: float) -> str:
    if size >= 1e12:
        return f"{size / 1e12:.2f} TB"
    return f"{size / 1e9:.1f} GB"


def host_line(bill: Bill | None) -> Iterator[str]:
    """Describe a node in a line: its memory, the disk of trainings, rows scored together, and the
    source of the hours.
    """
    if bill is not None and bill.kinds:
        host = memory_text(cost.host for cost in bill.costs())
        yield f"host memory: up to {host} GB" + (
            f"; trainings write {size_text(bill.disk)}" if bill.disk else ""
        )
        yield bill.basis()


def stored_lines(runs: Sequence[Run]) -> Iterator[str]:
    """In which dtype the last of merges is written."""
    merges = []
    for run in runs:
        if isinstance(run.config, MergeStage):
            merges.append(run)
    for last in merges[-1:]:
        yield (
            "the merge is stored in"
            f" {stored_dtype(last, last.runs_dir) or 'the dtype of its experts'}"
        )


def missing_inputs(runs: list[Run], runs_dir: Path) -> list[str]:
    """Return what runs read from the Hub and is not pinned here, or stays empty."""
    inputs = collect_hub_inputs(runs)
    missing = inputs.not_pinned(read_lock(runs_dir))
    lines = [*inputs.problems, *(f"left out: {why}" for why in inputs.left_out)]
    named = (
        "not pinned (stage=prefetch locks revisions, and names what needs a licence):"
        f" {', '.join(missing)}"
    )
    if missing:
        return [named + kept_offline(missing), *lines]
    return lines


def dropped_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines about files of one's own of which rows are dropped: those with a blank in a
    column that a template names, copies, where they are many, and conversations that cannot be
    used, or in part.
    """
    files = {}
    for run in runs:
        if run.config.stage == "data":
            for name, source, file in source_files(run):
                if source.prompt or source.rows == "conversation":
                    files[file] = (name, source)
    for file, (name, source) in files.items():
        with suppress(
            PipelineError, KeyError, OSError
        ):  # what is wrong with a file the data run says
            columns = []
            for column, must_fill in source_columns(name, source).items():
                if must_fill:
                    columns.append(column)
            first = (with_nested(row, columns) for row in first_rows(file, file.stat().st_mtime_ns))
            rows = [row for row in first if is_wanted(row, source)]
            dropped = Counter(
                f"their column {column} is blank: {{{column}?}} keeps them in a template with"
                " another column"
                for row in rows
                for column in columns
                if is_blank(row[column])
            )
            if source.rows == "conversation":
                readings = [example_of(row, source, source_columns(name, source)) for row in rows]
                dropped.update(
                    f"they are {UNUSABLE[reading]}"
                    for reading in readings
                    if isinstance(reading, str)
                )
                parts = sum(is_kept_in_part(row, source) for row in rows)
                if parts:
                    yield f"{file.name}: of {parts:,} of {len(rows):,} conversations {IN_PART}"
            copies = len(rows) - len(set(map(str, rows)))
            if copies > len(rows) / 10:
                dropped["a row before says the same"] = copies
            for reason, count in dropped.items():
                yield f"{file.name}: {count:,} of {len(rows):,} rows are dropped, as {reason}"


def comparison_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line for each data run of own rows: the benchmarks that its rows are compared
    with.
    """
    lines = []
    for run in runs:
        if isinstance(run.config, DataStage) and run.config.expert.is_own:
            root = None
            if "data_root" in run.parents:
                root = run.parents["data_root"].folder
            lines.append(f"{run.name}: {comparison_text(run.config, root)}")
    return lines


def template_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Models that are trained with a chat template and scored without it, or the reverse."""
    unlike = {}
    for run in runs:
        if isinstance(run.config, EvalStage):
            for trained in order_runs([run]):
                if (
                    isinstance(trained.config, TrainStage)
                    and (trained.config.sft.template == "chat") != run.config.eval.chat_template
                ):
                    unlike[(trained.config.sft.template, run.config.eval.chat_template)] = (
                        trained.label
                    )
    for (template, chat), label in unlike.items():
        scored = "without it"
        if chat:
            scored = "with the chat template"
        yield (
            f"{label} is trained with sft.template={template} and scored {scored}: set"
            f" eval.chat_template={str(not chat).lower()}, or"
            f" sft.template={'chat' if chat else 'plain'}"
        )


def shorter_lines(bill: Bill) -> Iterator[str]:
    """Return what would make a plan much shorter.

    Fewer questions help where choosing snapshots takes most of its hours. Without recomputed
    activations trainings are faster, where all of them fit.
    """
    hours, card = sum(map(bill.hours, bill.kinds)), cards()[bill.plan.gpu or ""]
    chosen = bill.hours("selection")
    if chosen > hours / 2:
        remedy = "set every.select.eval.limit or a larger every.sft.snapshot_every"
        yield f"choosing snapshots takes {chosen:,.1f} of {hours:,.1f} GPU-hours: {remedy}"
    trainings = []
    for cost in bill.costs():
        if isinstance(cost.run.config, TrainStage):
            trainings.append(cost)
    twice = []
    for cost in trainings:
        if cost.run.config.sft.gradient_checkpointing:
            twice.append(cost)
    once = [with_recipe(cost.run, gradient_checkpointing=False) for cost in twice]
    needed = max(
        (memory_of(run, row=run.config.sft.seq_length, card=card.memory) for run in once),
        default=0.0,
    )
    saved = sum(cost.hours for cost in twice) - sum(training_cost(run, card).hours for run in once)
    if saved > hours / 10 and needed <= SPARE * card.memory:
        yield f"every.sft.gradient_checkpointing=false fits, and takes {saved:,.1f} GPU-hours less"


def about_trainings(runs: Sequence[Run], text_of: Callable[[TrainStage], str]) -> list[str]:
    """Return what there is to say about trainings, each sentence once, with the first training that
    it is about.
    """
    texts = {}
    for run in reversed(runs):
        if isinstance(run.config, TrainStage):
            texts[text_of(run.config)] = run.name
    found = []
    for text, name in texts.items():
        if text:
            found.append(f"{text} ({name})")
    return found


def not_planned(planning: Planning) -> list[str]:
    """One sentence per cause why parts of a table cannot be planned, with the number of parts."""
    missing = {f"{key} is missing" for key in planning.problems}
    causes = Counter(problem for problem in planning.problems.values() if problem not in missing)
    dependents = len(planning.problems) - sum(causes.values())
    lines = [
        f"cannot be planned: {problem}{f' ({count} times)' if count > 1 else ''}"
        for problem, count in causes.items()
    ]
    if lines and dependents:
        lines[-1] += f"; {dependents} runs and cells need these"
    return lines


def show_runs(
    runs: list[Run], history: History, reasons: Mapping[str, str], max_lines: int
) -> list[str]:
    """Text table of the runs with their estimated seconds and states, at most `max_lines`."""
    rows = [("run", "stage", "seconds", "state")]
    for run in runs[:max_lines]:
        seconds, how = "", "deleted, no longer needed"
        if run.hash in reasons:
            seconds, how = history.seconds_text(run), reasons[run.hash]
        elif manifest := read_manifest(run.folder):
            seconds, how = f"{manifest.seconds:.0f}", "finished"
        rows.append((run.name, run.config.stage, seconds, how))
    omitted = len(runs) - max_lines
    return align_columns(rows) + (
        [f"and {omitted} more; plan.lines={len(runs)} lists all"] if omitted > 0 else []
    )


def empty_spbleu(planning: Planning) -> list[str]:
    """Return a line for the cells that stay empty for want of spBLEU's SentencePiece model."""
    empty = 0
    for cell in planning.plan.cells.values():
        scores = set()
        for item in cell.items:
            for reading in item.readings:
                for score in reading.values():
                    scores.add(score)
        runs = filter(
            None, map(planning.expected_evaluation, scores if cell.metric == "spbleu" else ())
        )
        empty += any(run.config.eval.spm_model is None for run in runs)
    if empty:
        return [f"{pluralize(empty, 'cell')} of spBLEU will be empty: give {SPM_MODEL}"]
    return []


def published_lines(plan: TablePlan) -> list[str]:
    """One line per published table: how many cells have a number in it, and the rows and columns
    without one.
    """
    counts = Counter(cell.published[0] for cell in plan.cells.values() if cell.published)
    lines = []
    for key, count in counts.items():
        absent = dict.fromkeys(
            f"{row} {column}" for table, row, column in plan.unprinted if table == key
        )
        suffix = ""
        if absent:
            suffix = f"; not printed there, so left empty: {', '.join(absent)}"
        lines.append(f"published: {key} for {pluralize(count, 'cell')}{suffix}")
    return lines
