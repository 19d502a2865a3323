"""Notes of stage=plan: what a reader should know before the runs begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.config.stages import EvalStage, TrainStage
from pipeline.errors import PipelineError, first_few
from pipeline.hub.lock import read_lock
from pipeline.report.stored import SPM_MODEL
from pipeline.runs.dtypes import stored_dtype
from pipeline.runs.graph import order_runs
from pipeline.runs.lineage import another_base
from pipeline.runs.run import Run
from pipeline.stages.hub_inputs import collect_hub_inputs
from pipeline.tables.plan import ScoreRef
from pipeline.tables.planned_runs import Planning
from pipeline.text import pluralize


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
    stored = [f"{dtype}: {first_few(keys, 3)}" for dtype, keys in names.items()]
    return [
        f"Models are stored in several dtypes ({'; '.join(stored)}). All are scored in"
        f" {planning.dtype}."
    ]


def missing_inputs(runs: list[Run], runs_dir: Path) -> list[str]:
    """Return what runs read from the Hub and is not pinned here, or stays empty."""
    inputs = collect_hub_inputs(runs)
    missing = inputs.not_pinned(read_lock(runs_dir))
    lines = []
    if missing:
        lines.append(
            "not pinned (stage=prefetch locks revisions, and names what needs a licence):"
            f" {', '.join(missing)}"
        )
    lines += inputs.problems
    lines += [f"left out: {why}" for why in inputs.left_out]
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


def about_trainings(runs: Sequence[Run], text_of: Callable[[TrainStage], str]) -> list[str]:
    """Return each sentence about trainings once, with the first training that it concerns."""
    texts = {}
    for run in reversed(runs):
        if isinstance(run.config, TrainStage):
            texts[text_of(run.config)] = run.name
    return [f"{text} ({name})" for text, name in texts.items() if text]
