"""The builder of selections: the snapshots of some trainings, and the evaluations that compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.config.stages import EvalStage, SelectStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.runs.find import find_snapshot
from pipeline.runs.lineage import base_of, one_base, recorded_base
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot
from pipeline.stages.evaluation import refuse_dtypes
from pipeline.stages.resolver import Draft, Resolver
from pipeline.stages.steps import planned_steps
from pipeline.train.steps import planned_snapshots


def build(config: SelectStage, resolver: Resolver) -> Draft:
    """Parents: `<training>@<step>` -> evaluation or snapshot, `model` -> the base they share."""
    check_rule(config)
    trainings = {one.hash: one for one in (resolver.model(name, "checkpoints") for name in config.checkpoints)}
    candidates = {
        f"{index}@{step}": candidate
        for index, (_, training) in enumerate(sorted(trainings.items()))
        for step, candidate in snapshots_of(training, config.select.snapshots).items()
    }
    parents: dict[str, Parent] = dict(candidates)
    base = shared_base(list(trainings.values()), config)
    if config.select.by == "scores":
        parents = {role: evaluation(config, candidate, resolver) for role, candidate in candidates.items()}
        if config.select.guards:
            if base is None:
                raise PipelineError("select.guards compare with the base, and checkpoints= have none: leave them out")
            parents["base"] = evaluation(config, base, resolver)
        config = in_one_dtype(config, parents)
    if base is not None:
        parents["model"] = base
    place = f"-{config.select.place}" if config.select.place > 1 else ""
    return config, f"select-{config.select.name}{place}", parents


def check_rule(config: SelectStage) -> None:
    """Refuse a rule that cannot be followed."""
    select = config.select
    if select.by == "validation_loss":
        if select.primary or select.guards or select.eval:
            raise PipelineError("select.by=validation_loss scores nothing: leave out select.primary, guards and eval")
        return
    if not select.primary or select.eval is None:
        raise PipelineError("select.by=scores needs select.primary=[{task: ...}] and select.eval with those tasks")
    scored = [task.task for task in select.eval.tasks]
    for measure in [*select.primary, *(select.guards or [])]:
        if measure.task not in scored:
            raise PipelineError(f"select.eval scores {', '.join(scored)}, not {measure.task}: add it to its tasks")


def snapshots_of(training: Parent, which: str) -> dict[int, Parent]:
    """Step -> snapshot, and the final weights under the last step where no snapshot is of it."""
    if "@" in training.name:
        return {int(training.name.rpartition("@")[2]): training}
    manifest = read_manifest(training.folder)
    if manifest is not None:
        if manifest.stage not in ("sft", "cpt"):
            raise PipelineError(f"checkpoints: {training.name} is no training: name runs of stage=sft or stage=cpt")
        last, steps = manifest.facts["steps"], [int(step) for step in manifest.snapshots]
    else:
        last, steps = planned(training)
    found: dict[int, Parent] = {last: training}
    if which == "all":
        made = isinstance(training, Run)
        found |= {
            step: Snapshot(training, step) if made else find_snapshot(training, step, "checkpoints")  # type: ignore[arg-type]
            for step in steps
        }
    return dict(sorted(found.items()))


def planned(training: Parent) -> tuple[int, list[int]]:
    """The last step of a training that is not made yet, and the steps of its snapshots."""
    if isinstance(training, Run) and isinstance(training.config, TrainStage) and (last := planned_steps(training)):
        steps = planned_snapshots(training.config.sft, last)
        if steps is not None:
            return last, steps
    raise PipelineError(
        f"checkpoints: the snapshots of {training.name} are not known yet: train it first, or give sft.steps, or "
        "data.size without data.allow_fewer, and no sft.snapshot_keep_by"
    )


def shared_base(trainings: list[Parent], config: SelectStage) -> Parent | None:
    """The base that all were trained from; None where they were made from nothing."""
    bases = [(one.name, base_of(one, config, "checkpoints") if recorded_base(one) else None) for one in trainings]
    return one_base(bases, "checkpoints")


def in_one_dtype(config: SelectStage, parents: Mapping[str, Parent]) -> SelectStage:
    """The configuration with the dtype of its evaluations. Raises PipelineError where they have several."""
    runs = [one for one in parents.values() if isinstance(one, Run) and isinstance(one.config, EvalStage)]
    refuse_dtypes(runs, "select.eval.dtype")
    assert config.select.eval is not None
    asked = replace(config.select.eval, dtype=runs[0].config.eval.dtype)
    return replace(config, select=replace(config.select, eval=asked))


def evaluation(config: SelectStage, model: Parent, resolver: Resolver) -> Run:
    select = config.select
    assert select.eval is not None
    named = [one.language for one in [*(select.primary or []), *(select.guards or [])] if one.language]
    asked = EvalStage(
        stage="eval", runs_dir=config.runs_dir, tracking=config.tracking, seed=config.seed, group=config.group,
        threads=config.threads, deterministic=config.deterministic, checkpoint=model.name, eval=select.eval,
        languages=list(dict.fromkeys([*config.languages, *named])), data_root=config.data_root,
    )  # fmt: skip
    return resolver.run(asked, {model.name: model})
