"""Notes of stage=plan: what a reader should know before the runs begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.config.data import Source
from pipeline.config.stages import EvalStage, PlanStage, TrainStage
from pipeline.data.load import example_of, with_nested
from pipeline.data.rows import UNUSABLE, is_blank
from pipeline.data.sources import is_wanted, source_columns
from pipeline.errors import PipelineError
from pipeline.estimate.flops import cards
from pipeline.estimate.gpu_budget import Bill, memory_of, training_cost, with_recipe
from pipeline.estimate.training_rows import first_rows, source_files
from pipeline.hub.lock import read_lock
from pipeline.report.report_state import Reported, overrides_of
from pipeline.report.stored import SPM_MODEL
from pipeline.runs.dtypes import stored_dtype
from pipeline.runs.graph import order_runs
from pipeline.runs.lineage import another_base
from pipeline.runs.run import Run
from pipeline.stages.hub_inputs import collect_hub_inputs, kept_offline
from pipeline.tables.plan import ScoreRef
from pipeline.tables.planned_runs import Planning
from pipeline.text import first_few, pluralize
from pipeline.train.memory import SPARE


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
    """Return a line if stage=table was last run with other settings.

    stage=report shows the table with those settings.
    """
    last = Reported.of(config)
    asked = overrides_of(replace(config, data_root=last.data_root, every=last.every))
    if not last.table or asked == overrides_of(config):
        return []
    settings = " ".join(asked) or "none of these settings"
    return [f"stage=table was last run with {settings}, and stage=report shows that table."]


def missing_inputs(runs: list[Run], runs_dir: Path) -> list[str]:
    """Return what runs read from the Hub and is not pinned here, or stays empty."""
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
    """Yield lines about rows of local files that are dropped.

    Causes are a blank in a column that a template names, many copies, and conversations that cannot
    be used.
    """
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
    copies = len(rows) - len(set(map(str, rows)))
    if copies > len(rows) / 10:
        dropped["an earlier row says the same"] = copies
    for reason, count in dropped.items():
        yield f"{file.name}: {count:,} of {len(rows):,} rows are dropped, as {reason}"


def template_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for models that are trained with a chat template but scored without it.

    The reverse case has a line, too.
    """
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
    """Yield what would make a plan much shorter.

    Fewer questions help if choosing snapshots takes most of the hours. Without recomputed
    activations trainings are faster, if all of them fit.
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
    """Return each sentence about trainings once, with the first training that it concerns."""
    texts = {}
    for run in reversed(runs):
        if isinstance(run.config, TrainStage):
            texts[text_of(run.config)] = run.name
    return [f"{text} ({name})" for text, name in texts.items() if text]


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
