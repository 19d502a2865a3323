"""Stage select: of the snapshots of some trainings, the one that stands for them.

Its parents are the evaluations of the snapshots (and of the base, where there are guards), made as
runs of their own; by validation loss, the snapshots themselves. Its folder holds the chosen weights
as hard links, which take no room, and choice.json with the whole ranking: so it is an expert as a
training is, and stays one when snapshots are freed.
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
    """Measure each candidate, rank those that keep to the guards, and put the chosen weights into
    the run's folder.
    """
    config = run.config
    select = config.select
    by_loss = select.by == "validation_loss"
    candidates = {}
    for role, parent in run.parents.items():
        if role not in ("base", "model"):
            candidates[role] = parent
    if by_loss:
        models, values = candidates, validation_losses(candidates)
    else:
        models = {role: scored(parent, config) for role, parent in candidates.items()}
        values = {role: scores(parent, config) for role, parent in candidates.items()}
    floor = {}
    if "base" in run.parents:
        floor = guarded(scores(run.parents["base"], config), config)
    rows = [
        {
            "checkpoint": models[role].name,
            "training": role.partition("@")[0],
            "step": int(role.partition("@")[2]),
            "values": measured,
            "below": [name for name, least in floor.items() if measured[name] < least],
        }
        for role, measured in values.items()
    ]
    if by_loss:
        keys = ["validation_loss"]
    else:
        keys = [label(measure) for measure in select.primary or []]
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
    base = (manifest.config.get("model") or {}).get("path") or manifest.facts.get("base")
    return {"weights": manifest.weights, "base": base, "choice": choice, "candidates": len(rows)}


def compared(selection: Run) -> list[Snapshot]:
    """Return the snapshots that a selection ranks, made or not."""
    models = []
    for run in selection.parents.values():
        for parent in [run, *getattr(run, "parents", {}).values()]:
            models.append(parent)
    found = []
    for parent in models:
        if isinstance(parent, Snapshot):
            found.append(parent)
    return found


def scored(evaluation: Parent, config: SelectStage) -> Parent:
    """Return the candidate that a finished evaluation is of."""
    manifest = read_manifest(evaluation.folder)
    assert manifest is not None
    return find_run(manifest.parents["checkpoint"].name, Path(config.runs_dir), "checkpoints")


def label(measure: Measure) -> str:
    return f"{measure.task} {measure.language or 'mean'}"


def scores(evaluation: Parent, config: SelectStage) -> dict[str, float]:
    """Measure -> value, from a finished evaluation."""
    rows, _ = read_scores(evaluation.folder / "scores.json")
    measures = [*(config.select.primary or []), *(config.select.guards or [])]
    score_of = {label(measure): value(rows, measure, config.languages) for measure in measures}
    strange = []
    for name, number in score_of.items():
        if not math.isfinite(number):
            strange.append(name)
    if strange:
        raise PipelineError(
            f"{strange[0]} of {evaluation.name} is not a finite number: leave out what it scores"
        )
    return score_of


def value(rows: list[ScoreRow], measure: Measure, languages: list[str]) -> float:
    """Return the primary metric of a task in a language, or its mean over `languages`; of a pair,
    in both its languages.
    """
    metric, filter_name = primary_metric(measure.task)
    means = []
    for language in [measure.language] if measure.language else languages:
        numbers = []
        for row in rows:
            if (
                (row.task, row.metric, row.filter) == (measure.task, metric, filter_name)
                and not row.subject
                and language in row.where.split("-")
            ):
                numbers.append(math.nan if row.value is None else row.value)
        if numbers:
            means.append(statistics.fmean(numbers))
    if not means:
        raise PipelineError(
            f"{label(measure)} was not scored: name its language in languages=[...]"
        )
    return statistics.fmean(means)


def guarded(base: dict[str, float], config: SelectStage) -> dict[str, float]:
    """Guard -> the least that a candidate must reach: the base's score less the slack."""
    guards = [label(measure) for measure in config.select.guards or []]
    return {name: base[name] - config.select.guard_slack for name in guards}


def validation_losses(models: dict[str, Parent]) -> dict[str, dict[str, float]]:
    """Return the validation loss of each model: of a snapshot as recorded, of final weights the
    last one logged.

    Raises: PipelineError: none was recorded, or they are of different validation sets, whose losses
    cannot be compared.
    """
    losses, sets = {}, {}
    for role, model in models.items():
        manifest = read_manifest(model.folder)
        assert manifest is not None
        loss = manifest.weights.get("validation_loss")
        if "@" not in model.name:
            steps = read_jsonl(model.folder / "log.jsonl")
            logged = []
            for row in steps:
                if "validation_loss" in row:
                    logged.append(row["validation_loss"])
            loss = logged[-1] if logged else None
        if loss is None:
            raise PipelineError(
                f"{model.name} has no validation loss: train it with data.validation=N"
            )
        losses[role] = {"validation_loss": loss}
        sets[manifest.parents["data"].hash] = model.name
    if len(sets) > 1:
        names = " and ".join(list(sets.values())[:2])
        raise PipelineError(
            f"checkpoints: {names} have different validation sets, whose losses cannot be compared"
        )
    return losses


def ranked(rows: list[Row], keys: list[str], lower_is_better: bool = False) -> list[Row]:
    """Rows by the mean of their ranks in `keys`, best first; equal values share a rank.

    Those below a guard come last.

    Ties go to the first key, then to the earlier step.
    """
    from scipy.stats import rankdata

    sign = 1 if lower_is_better else -1
    allowed = [row for row in rows if not row["below"]]
    ranks = [rankdata([sign * row["values"][key] for row in allowed]) for key in keys]
    for row in rows:
        row["rank"] = None
    for row, *row_ranks in zip(allowed, *ranks, strict=True):
        row["rank"] = statistics.fmean(row_ranks)
    order = sorted(
        allowed,
        key=lambda row: (
            row["rank"],
            sign * row["values"][keys[0]],
            row["step"],
            row["checkpoint"],
        ),
    )
    return order + [row for row in rows if row["below"]]


def choose(ranking: list[Row], place: int) -> Row:
    """Choose the best of the run that comes `place`-th by its best: at most one a run (LS 3.1,
    "sufficient diversity").
    """
    best: dict[str, Row] = {}
    for row in ranking:
        if not row["below"]:
            best.setdefault(row["training"], row)
    if not best:
        worst = sorted({name for row in ranking for name in row["below"]})
        raise PipelineError(
            f"no snapshot keeps to the guards ({', '.join(worst)}): raise select.guard_slack"
        )
    if place > len(best):
        raise PipelineError(
            f"select.place={place}: only {len(best)} runs have a snapshot that keeps to the guards"
        )
    return list(best.values())[place - 1]


def link_model(folder: Path, work: Path) -> None:
    """Link the model's files, which takes no room."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES and path.name not in (MANIFEST, CHOICE):
            link_or_copy(path, work / path.name)
