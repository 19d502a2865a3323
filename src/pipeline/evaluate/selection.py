"""Stage select: choose a snapshot of some trainings.

If snapshots are ranked by scores, the parents of a selection are the evaluations of the snapshots,
and the evaluation of the base if there are guards. If they are ranked by validation loss, the
parents are the snapshots themselves. The folder of a selection has the chosen weights as hard
links, which take no space, and choice.json with the whole ranking. So a selection can be used as an
expert like a training, even after its snapshots are deleted.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import primary_metric
from pipeline.config.evaluation import Measure
from pipeline.config.knob import identity
from pipeline.config.stages import SelectStage
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.files import link_or_copy
from pipeline.models.files import SUFFIXES
from pipeline.runs.find import find_run
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.run import Parent, Run, Snapshot
from pipeline.runs.unchanged import check_unchanged

if TYPE_CHECKING:
    from pipeline.runs.tracking import Tracker

CHOICE = "choice.json"
Row = dict[str, Any]


def make(run: Run[SelectStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Rank the candidates that pass the guards, and link the chosen weights into `work`."""
    config = run.config
    select = config.select
    by_loss = select.by == "validation_loss"
    models = {role: run.parents[role] for role in run.parents if "@" in role}
    if by_loss:
        keys = ["validation_loss"]
        values = validation_losses(models)
    else:
        keys = [label(measure) for measure in select.primary or []]
        values = {role: scores(parent, config) for role, parent in models.items()}
        models = {role: scored(parent, config) for role, parent in models.items()}
    floor = {}
    if "base" in run.parents:
        floor = guarded(scores(run.parents["base"], config), config)
    rows = []
    for role, measured in values.items():
        training, _, step = role.partition("@")
        below = [name for name, least in floor.items() if measured[name] < least]
        row = {"checkpoint": models[role].name, "training": training, "step": int(step)}
        rows.append(row | {"values": measured, "below": below})
    ranking = ranked(rows, keys, lower_is_better=by_loss)
    choice = choose(ranking, select.place)
    folder = models[f"{choice['training']}@{choice['step']}"].folder
    check_unchanged(folder)
    link_model(folder, work)
    content = {"rule": identity(select), "floor": floor, "chosen": choice, "ranking": ranking}
    (work / CHOICE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tracker.summary({"chosen": choice["checkpoint"], **choice["values"]})
    manifest = read_manifest(folder)
    assert manifest is not None
    model = manifest.config.get("model") or {}
    base = model.get("path") or manifest.facts.get("base")
    return {"weights": manifest.weights, "base": base, "choice": choice, "candidates": len(rows)}


def compared(selection: Run) -> list[Snapshot]:
    """Return the snapshots that a selection ranks, finished or not."""
    snapshots = []
    for run in selection.parents.values():
        for parent in [run, *getattr(run, "parents", {}).values()]:
            if isinstance(parent, Snapshot):
                snapshots.append(parent)
    return snapshots


def scored(evaluation: Parent, config: SelectStage) -> Parent:
    """Return the candidate that a finished evaluation scored."""
    manifest = read_manifest(evaluation.folder)
    assert manifest is not None
    return find_run(manifest.parents["checkpoint"].name, Path(config.runs_dir), "checkpoints")


def label(measure: Measure) -> str:
    return f"{measure.task} {measure.language or 'mean'}"


def scores(evaluation: Parent, config: SelectStage) -> dict[str, float]:
    """Return the value of each measure in a finished evaluation."""
    rows, _ = read_scores(evaluation.folder / "scores.json")
    values = {}
    for measure in [*(config.select.primary or []), *(config.select.guards or [])]:
        number = value(rows, measure, config.languages)
        if not math.isfinite(number):
            raise PipelineError(
                f"{label(measure)} of {evaluation.name} is not a finite number. Leave out the"
                " checkpoint that it scores."
            )
        values[label(measure)] = number
    return values


def value(rows: list[ScoreRow], measure: Measure, languages: list[str]) -> float:
    """Return the primary metric of a task in the measure's language, or the mean over `languages`.

    The score of a translation pair counts for both of its languages.
    """
    primary = primary_metric(measure.task)
    if measure.language:
        languages = [measure.language]
    means = []
    for language in languages:
        numbers = []
        for row in rows:
            is_primary = (row.metric, row.filter) == primary
            is_measured = row.task == measure.task and is_primary and not row.subject
            if is_measured and language in row.where.split("-"):
                numbers.append(math.nan if row.value is None else row.value)
        if numbers:
            means.append(statistics.fmean(numbers))
    if not means:
        raise PipelineError(f"{label(measure)} was not scored. Add its language to languages.")
    return statistics.fmean(means)


def guarded(base: dict[str, float], config: SelectStage) -> dict[str, float]:
    """Return the lowest allowed value of each guard: the base's score minus the slack."""
    guards = [label(measure) for measure in config.select.guards or []]
    return {name: base[name] - config.select.guard_slack for name in guards}


def validation_losses(models: dict[str, Parent]) -> dict[str, dict[str, float]]:
    """Return the validation loss of each model.

    A snapshot has its loss in the manifest. Final weights have the last loss of the log.

    Raises:
        PipelineError: A model has no validation loss, or the models have different validation sets,
            whose losses cannot be compared.
    """
    losses = {}
    sets = {}
    for role, model in models.items():
        manifest = read_manifest(model.folder)
        assert manifest is not None
        loss = manifest.weights.get("validation_loss")
        if "@" not in model.name:
            loss = None
            for row in read_jsonl(model.folder / "log.jsonl"):
                loss = row.get("validation_loss", loss)
        if loss is None:
            raise PipelineError(
                f"{model.name} has no validation loss. Train it with data.validation=N."
            )
        losses[role] = {"validation_loss": loss}
        sets[manifest.parents["data"].hash] = model.name
    if len(sets) > 1:
        first, second, *_ = sets.values()
        raise PipelineError(
            f"checkpoints: {first} and {second} have different validation sets, so their losses"
            " cannot be compared. Choose checkpoints with the same data."
        )
    return losses


def ranked(rows: list[Row], keys: list[str], lower_is_better: bool = False) -> list[Row]:
    """Sort rows by the mean of their ranks in `keys`, the best first.

    Equal values share a rank. Ties go to the better value of the first key, then to the earlier
    step. Rows below a guard come last and have no rank.
    """
    from scipy.stats import rankdata

    sign = 1 if lower_is_better else -1
    allowed = [row for row in rows if not row["below"]]
    refused = [row for row in rows if row["below"]]
    ranks = [rankdata([sign * row["values"][key] for row in allowed]) for key in keys]
    for row in refused:
        row["rank"] = None
    for row, *row_ranks in zip(allowed, *ranks, strict=True):
        row["rank"] = statistics.fmean(row_ranks)

    def place(row: Row) -> tuple[Any, ...]:
        first_value = sign * row["values"][keys[0]]
        return row["rank"], first_value, row["step"], row["checkpoint"]

    return sorted(allowed, key=place) + refused


def choose(ranking: list[Row], place: int) -> Row:
    """Return the best snapshot of the training in this place.

    Trainings are ordered by their best snapshots. So selections with different places choose
    snapshots of different trainings (LS 3.1, "sufficient diversity").
    """
    best: dict[str, Row] = {}
    missed: set[str] = set()
    for row in ranking:
        missed.update(row["below"])
        if not row["below"]:
            best.setdefault(row["training"], row)
    if not best:
        guards = ", ".join(sorted(missed))
        raise PipelineError(f"No snapshot passes the guards ({guards}). Raise select.guard_slack.")
    if place > len(best):
        raise PipelineError(
            f"select.place={place}, but only {len(best)} trainings have a snapshot that passes the"
            f" guards. Set select.place to at most {len(best)}."
        )
    return list(best.values())[place - 1]


def link_model(folder: Path, work: Path) -> None:
    """Link the files of a model, which takes no disk space."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES and path.name not in (MANIFEST, CHOICE):
            link_or_copy(path, work / path.name)
