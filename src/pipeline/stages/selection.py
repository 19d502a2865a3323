"""The builder of selections: the snapshots of some trainings, and the evaluations that compare
them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Parents: `<training>@<step>` -> evaluation or snapshot, `model` -> the base they share."""
    check_rule(config)
    trainings = {
        training.hash: training
        for training in (resolver.model(name, "checkpoints") for name in config.checkpoints)
    }
    runs = dict.fromkeys(
        training.name.partition("@")[0] for _, training in sorted(trainings.items())
    )
    candidates = {}
    for training in trainings.values():
        for step, candidate in snapshots_of(training, config.select.snapshots).items():
            candidates[f"{[*runs].index(training.name.partition('@')[0])}@{step}"] = candidate
    if config.select.by == "validation_loss":
        refuse_other_losses(list(trainings.values()))
    parents: dict[str, Parent] = dict(candidates)
    bases = [  # none of those that started from random weights
        (
            training.name,
            (
                base_of(training, resolver.runs_dir, "checkpoints")
                if recorded_base(training)
                else None
            ),
        )
        for training in trainings.values()
    ]
    base: Parent | None = one_base(bases, "checkpoints")
    if config.select.by == "scores":
        parents = {
            role: build_evaluation(config, candidate, resolver)
            for role, candidate in candidates.items()
        }
        if config.select.guards:
            if base is None:
                raise PipelineError(
                    "select.guards compare with the base, and checkpoints= have none: leave"
                    " them out"
                )
            parents["base"] = build_evaluation(config, base, resolver)
        config = in_one_dtype(config, parents)
    if base is not None:
        parents["model"] = base
    rank_suffix = ""
    if config.select.place > 1:
        rank_suffix = f"-{config.select.place}"
    return config, f"select-{config.select.name}{rank_suffix}", parents


def check_rule(config: SelectStage) -> None:
    """Raise PipelineError for a rule that cannot be applied."""
    select = config.select
    if select.by == "validation_loss":
        if select.primary or select.guards or select.eval:
            raise PipelineError(
                "select.by=validation_loss scores nothing: leave out select.primary, guards and"
                " eval"
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
                f"select.eval scores {', '.join(scored)}, not {measure.task}: add it to its tasks"
            )
        refuse_lower(measure.task, "a selection takes")


def refuse_other_losses(trainings: list[Parent]) -> None:
    """Raise PipelineError for trainings whose losses are of other tokens of the same rows."""
    recipes = {training.name: recipe_of(training) for training in trainings}
    for key in (
        "loss_on",
        "template",
        "separator",
        "template_date",
        "chat_template_args",
        "seq_length",
        "packing",
    ):
        named = {}
        for name, recipe in recipes.items():
            if key in recipe:
                named[str(recipe[key])] = f"{name} with sft.{key}={recipe[key]!r}"
        if len(named) > 1:
            first, second, *_ = named.values()
            raise PipelineError(
                f"checkpoints: validation losses of {first} and {second} cannot be compared: give"
                f" all the same sft.{key}, or choose by scores, another select="
            )


def recipe_of(training: Parent) -> dict[str, Any]:
    """Return the knobs of a planned or finished training."""
    planned = without_step(training)
    if isinstance(planned, Run):
        return asdict(planned.config.sft)
    manifest = read_manifest(training.folder)
    if manifest:
        return manifest.config.get("sft", {})
    return {}


def snapshots_of(training: Parent, choice: str) -> dict[int, Parent]:
    """Step -> snapshot; the last step stands for the final weights where it has no snapshot."""
    if "@" in training.name:
        return {int(training.name.rpartition("@")[2]): training}
    manifest = read_manifest(training.folder)
    if manifest is not None:
        if manifest.stage not in ("sft", "cpt"):
            raise PipelineError(
                f"checkpoints: {training.name} is not a training: name runs of stage=sft or"
                " stage=cpt"
            )
        last, steps = manifest.facts["steps"], [int(step) for step in manifest.snapshots]
    else:
        last, steps = planned_snapshot_steps(training)
    candidates: dict[int, Parent] = {last: training}
    if choice == "all" and isinstance(training, Run):
        candidates |= {step: Snapshot(training, step) for step in steps}
    elif choice == "all":
        candidates |= {step: find_snapshot(training, step, "checkpoints") for step in steps}  # type: ignore[arg-type]
    return dict(sorted(candidates.items()))


def planned_snapshot_steps(training: Parent) -> tuple[int, list[int]]:
    """Return the last step of a training that has not run yet, and the steps of its snapshots."""
    if isinstance(training, Run) and isinstance(training.config, TrainStage):
        last = training_steps(training)
        if last:
            return last, snapshot_steps(training.config.sft, last)
    raise PipelineError(
        f"checkpoints: the snapshots of {training.name} are not known yet: train it first, or give"
        " sft.steps, or data.size without data.allow_fewer"
    )


def in_one_dtype(config: SelectStage, parents: Mapping[str, Parent]) -> SelectStage:
    """Return the configuration with the dtype of its evaluations.

    Raises PipelineError if they have several.
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
    languages = []
    for measure in [*(select.primary or []), *(select.guards or [])]:
        if measure.language:
            languages.append(measure.language)
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
        languages=list(dict.fromkeys([*config.languages, *languages])),
        data_root=config.data_root,
    )
    return resolver.run(stage, {model.name: model})
