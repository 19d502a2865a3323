"""The builder of selections: the snapshots of some trainings, and their evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from pipeline.config.stages import EvalStage, SelectStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.runs.find import find_snapshot
from pipeline.runs.lineage import base_of, one_base, recorded_base
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot, without_step
from pipeline.stages.evaluation import refuse_dtypes, refuse_lower
from pipeline.stages.resolver import Draft, Resolver
from pipeline.stages.steps import training_steps
from pipeline.train.steps import snapshot_steps


def build(config: SelectStage, resolver: Resolver) -> Draft:
    """Return the draft of a selection.

    Its parents are an evaluation or snapshot for each `<training>@<step>`, and their common base as
    `model`.
    """
    check_rule(config)
    trainings: dict[str, Parent] = {}
    for reference in config.checkpoints:
        training = resolver.model(reference, "checkpoints")
        trainings[training.hash] = training
    candidates = _candidates(trainings, config.select.snapshots)
    if config.select.by == "validation_loss":
        refuse_other_losses(list(trainings.values()))
    base = _common_base(trainings.values(), resolver)
    parents: dict[str, Parent] = dict(candidates)
    if config.select.by == "scores":
        for role, candidate in candidates.items():
            parents[role] = build_evaluation(config, candidate, resolver)
        if config.select.guards:
            if base is None:
                raise PipelineError(
                    "select.guards compare with the base, but checkpoints= have no base. Leave the"
                    " guards out."
                )
            parents["base"] = build_evaluation(config, base, resolver)
        config = in_one_dtype(config, parents)
    if base is not None:
        parents["model"] = base
    suffix = f"-{config.select.place}" if config.select.place > 1 else ""
    return config, f"select-{config.select.name}{suffix}", parents


def _candidates(trainings: Mapping[str, Parent], choice: str) -> dict[str, Parent]:
    """Return the snapshots of trainings by `<number of the training>@<step>`."""
    # in the order of the hashes, so that the order of checkpoints= does not matter
    in_order = [trainings[hash_].name.partition("@")[0] for hash_ in sorted(trainings)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(in_order))}
    candidates = {}
    for training in trainings.values():
        number = numbers[training.name.partition("@")[0]]
        for step, candidate in snapshots_of(training, choice).items():
            candidates[f"{number}@{step}"] = candidate
    return candidates


def _common_base(trainings: Iterable[Parent], resolver: Resolver) -> Parent | None:
    """Return the base of all trainings, or None if they started from random weights."""
    bases: list[tuple[str, Parent | None]] = []
    for training in trainings:
        base = None
        if recorded_base(training):
            base = base_of(training, resolver.runs_dir, "checkpoints")
        bases.append((training.name, base))
    return one_base(bases, "checkpoints")


def check_rule(config: SelectStage) -> None:
    """Raise PipelineError if a rule cannot be applied."""
    select = config.select
    if select.by == "validation_loss":
        if select.primary or select.guards or select.eval:
            raise PipelineError(
                "select.by=validation_loss scores nothing. Leave out select.primary, select.guards"
                " and select.eval."
            )
        return
    if not select.primary or select.eval is None:
        raise PipelineError(
            "select.by=scores needs select.primary=[{task: ...}] and select.eval with those tasks"
        )
    scored = [task.task for task in select.eval.tasks]
    for measure in [*select.primary, *(select.guards or [])]:
        if measure.task not in scored:
            raise PipelineError(
                f"select.eval scores {', '.join(scored)}, but not {measure.task}. Add it to the"
                " tasks of select.eval."
            )
        refuse_lower(measure.task, "a selection takes")


# keys of sft that decide which tokens have a loss
LOSS_KEYS = (
    *("loss_on", "template", "separator", "template_date", "chat_template_args"),
    *("seq_length", "packing"),
)


def refuse_other_losses(trainings: list[Parent]) -> None:
    """Raise PipelineError if the trainings' losses are means over different tokens of the rows."""
    recipes = {training.name: recipe_of(training) for training in trainings}
    for key in LOSS_KEYS:
        examples = {}
        for name, recipe in recipes.items():
            if key in recipe:
                value = recipe[key]
                examples[str(value)] = f"{name} with sft.{key}={value!r}"
        if len(examples) > 1:
            first, second, *_ = examples.values()
            raise PipelineError(
                f"checkpoints: validation losses of {first} and {second} cannot be compared. Use"
                f" the same sft.{key} for all, or choose by scores, another select=."
            )


def recipe_of(training: Parent) -> dict[str, Any]:
    """Return the settings of sft of a planned or finished training."""
    planned = without_step(training)
    if isinstance(planned, Run):
        return asdict(planned.config.sft)
    manifest = read_manifest(training.folder)
    if manifest:
        return manifest.config.get("sft", {})
    return {}


def snapshots_of(training: Parent, choice: str) -> dict[int, Parent]:
    """Return the snapshots of a training by step. The final weights have the last step."""
    if "@" in training.name:
        _, _, step_text = training.name.rpartition("@")
        return {int(step_text): training}
    manifest = read_manifest(training.folder)
    if manifest is None:
        last, steps = planned_snapshot_steps(training)
    elif manifest.stage in ("sft", "cpt"):
        last, steps = manifest.facts["steps"], [int(step) for step in manifest.snapshots]
    else:
        raise PipelineError(
            f"checkpoints: {training.name} is not a training. Name runs of stage=sft or stage=cpt."
        )
    candidates: dict[int, Parent] = {last: training}
    if choice == "all":
        for step in steps:
            if isinstance(training, Run):
                candidates[step] = Snapshot(training, step)
            else:
                candidates[step] = find_snapshot(training, step, "checkpoints")  # type: ignore[arg-type]
    return dict(sorted(candidates.items()))


def planned_snapshot_steps(training: Parent) -> tuple[int, list[int]]:
    """Return the last step of a training that has not run yet, and the steps of its snapshots."""
    if isinstance(training, Run) and isinstance(training.config, TrainStage):
        last = training_steps(training)
        if last:
            return last, snapshot_steps(training.config.sft, last)
    raise PipelineError(
        f"checkpoints: the snapshots of {training.name} are not known yet. Train it first, or set"
        " sft.steps, or data.size without data.allow_fewer."
    )


def in_one_dtype(config: SelectStage, parents: Mapping[str, Parent]) -> SelectStage:
    """Return the configuration with the dtype of its evaluations.

    Raises:
        PipelineError: The evaluations have several dtypes.
    """
    runs = []
    for parent in parents.values():
        if isinstance(parent, Run) and isinstance(parent.config, EvalStage):
            runs.append(parent)
    refuse_dtypes(runs, "select.eval.dtype")
    assert config.select.eval is not None
    settings = replace(config.select.eval, dtype=runs[0].config.eval.dtype)
    return replace(config, select=replace(config.select, eval=settings))


def build_evaluation(config: SelectStage, model: Parent, resolver: Resolver) -> Run:
    select = config.select
    assert select.eval is not None
    measures = [*(select.primary or []), *(select.guards or [])]
    measured = [measure.language for measure in measures if measure.language]
    stage = EvalStage(
        stage="eval",
        runs_dir=config.runs_dir,
        tracking=config.tracking,
        seed=config.seed,
        group=config.group,
        threads=config.threads,
        deterministic=config.deterministic,
        checkpoint=model.name,
        eval=select.eval,
        languages=list(dict.fromkeys([*config.languages, *measured])),
        data_root=config.data_root,
    )
    return resolver.run(stage, {model.name: model})
