"""The builder of evaluations: the model or merge that is scored, and the files of the questions.

For several tasks or languages, the parents are runs that score one task in one language.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.benchmarks import benchmark_of, kind_of, lower_is_better, primary_metric
from pipeline.config.evaluation import Eval, settle_products
from pipeline.config.harness_tasks import files_of_task, include, included_folder
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.evaluate.bundle import SAMPLED, scoring_runs
from pipeline.files import sha256
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.models.load import date_of_templates
from pipeline.runs.dtypes import merged_dtype, stored_dtype
from pipeline.runs.lineage import gives_adapter
from pipeline.runs.run import LABEL_LENGTH, External, Folder, Parent, Run
from pipeline.stages.data import locked_benchmarks, own_languages
from pipeline.stages.hub_inputs import evaluated_sets
from pipeline.stages.merge import label_and_parents
from pipeline.stages.resolver import Draft, Resolver, label_of


def build(config: EvalStage, resolver: Resolver) -> Draft:
    if config.eval.include_path is not None:
        include(config.eval.include_path)
    refuse_sampling(config.eval)
    if config.eval.chat_template:
        date_of_templates(config.eval.template_date, "eval.template_date")
    config = with_base(config, resolver)
    if config.merge is not None:
        config = replace(config, merge=config.merge.settled(config.partition))
    if config.checkpoint is None:
        label, parents = label_and_parents(config, resolver)
    else:
        parents = {"checkpoint": resolver.model(config.checkpoint, "checkpoint")}
        label = label_of(parents["checkpoint"])
    config = with_dtype(config, parents)
    config = replace(config, eval=settle_products(config.eval))
    label = f"eval-{config.eval.label}-{label}"
    configs = scoring_runs(config)
    # a table, which has references, checks each evaluation when it runs
    if len(configs) > 1 or not resolver.references:
        check_tasks(config, resolver)
    if len(configs) > 1:
        references = models_by_reference(config, parents)
        scored = {role: resolver.run(scoring, references) for role, scoring in configs.items()}
        return config, label, parents | scored
    config = next(iter(configs.values()), config)
    (code,) = config.languages
    label = f"{label[: LABEL_LENGTH - len(code) - 1]}-{code}"
    return config, label, parents | own_languages([code]) | question_parents(config, resolver)


def question_parents(config: EvalStage, resolver: Resolver) -> dict[str, Parent]:
    """Return the parents of a scoring run besides its model: the files that it reads."""
    parents: dict[str, Parent] = {}
    root = config.data_root
    if root is None:
        parents = locked_benchmarks(config)
    else:
        parents["data_root"] = resolver.data_root(root) or question_files_parent(config, Path(root))
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is not a file. Set it to the SentencePiece model of spBLEU,"
                " which sacrebleu -tok flores200 fetches to"
                " ~/.sacrebleu/models/flores200sacrebleuspm, or leave it out."
            )
        parents["spm_model"] = External(file.name, sha256(file), file)
    (task,) = config.eval.tasks
    task_folder = included_folder(task.task)
    if task_folder:
        parents["include_path"] = External.of_files(task_folder, files_of_task(task.task))
    return parents


def with_base(config: EvalStage, resolver: Resolver) -> EvalStage:
    """Turn a foreign adapter into a merge in memory of the adapter and its base.

    The base is eval.base, or the base that the adapter names. Other configurations are unchanged.

    Raises:
        PipelineError: eval.base is set for a model that is not a foreign adapter.
    """
    base, reference = config.eval.base, config.checkpoint
    remedy = "a merge takes merge.base=RUN"
    if reference is not None:
        adapter = resolver.model(reference, "checkpoint")
        if isinstance(adapter, Folder) and gives_adapter(adapter):
            merge = TaskArithmetic(experts=[reference], base=base)
            settings = replace(config.eval, base=None)
            return replace(config, checkpoint=None, merge=merge, eval=settings)
        remedy = f"leave it out for {adapter.name}"
    if base is not None:
        raise PipelineError(
            f"eval.base={base} is only read if checkpoint= is an adapter from elsewhere; {remedy}"
        )
    return config


def refuse_sampling(settings: Eval) -> None:
    """Raise PipelineError if answers cannot be sampled or scored with these settings."""
    if settings.think_end == "":
        raise PipelineError(
            "eval.think_end is empty. Set it to the text at the end of the model's thoughts, or"
            " leave it out."
        )
    if settings.temperature == 0:
        for name in ("answers", "top_p", "sample_seed"):
            value = getattr(settings, name)
            if value != getattr(Eval, name):
                raise PipelineError(
                    f"eval.{name}={value} is only read with eval.temperature above 0. Set"
                    " eval.temperature=0.7, or leave it out."
                )
        return
    kinds = {task.task: kind_of(task.task) for task in settings.tasks}
    if not {*SAMPLED} & {*kinds.values()}:
        raise PipelineError(
            f"eval.temperature={settings.temperature:g} is only read by tasks with written answers,"
            f" not by {', '.join(kinds)}. Leave it out."
        )


def with_dtype(config: EvalStage, parents: Mapping[str, Parent]) -> EvalStage:
    """Return the configuration with eval.dtype=auto resolved, if the dtype is known."""
    if config.eval.dtype != "auto":
        return config
    runs_dir = config.runs_path
    if config.merge is not None:
        dtype = merged_dtype(config.merge, parents, runs_dir)
    else:
        dtype = stored_dtype(parents["checkpoint"], runs_dir)
    if not dtype:
        return config
    return replace(config, eval=replace(config.eval, dtype=dtype), as_stored=True)


def refuse_dtypes(runs: Iterable[Run[EvalStage]], knob: str) -> None:
    """Raise PipelineError if evaluations that are compared use different dtypes.

    `knob` is the key that sets the dtype of all.
    """
    firsts: dict[str, Run[EvalStage]] = {}
    for run in runs:
        firsts.setdefault(run.config.eval.dtype, run)
    firsts.pop("auto", None)
    if len(firsts) > 1:
        examples = [f"{run.name} in {dtype}" for dtype, run in firsts.items()]
        raise PipelineError(
            f"Scores in several dtypes cannot be compared ({', '.join(examples)}). Set"
            f" {knob}=float32 for all."
        )


def one_dtype_for(runs: Iterable[Run[EvalStage]]) -> str | None:
    """Return float32 if models of several dtypes are compared, or None if all have the same dtype.

    float32 represents all of them exactly. An unknown dtype (auto) differs from float32 only.
    """
    dtypes = {run.config.eval.dtype for run in runs}
    several = "float32" in dtypes or len(dtypes - {"auto"}) > 1
    if len(dtypes) > 1 and several:
        return "float32"
    return None


def refuse_lower(task: str, what: str) -> None:
    """Raise PipelineError if lower values of a task's metric are better.

    `what` is the subject and verb of the choice, such as "a selection takes".
    """
    if lower_is_better(task):
        metric, _ = primary_metric(task)
        raise PipelineError(
            f"{task}: lower {metric} is better, but {what} the highest value. Name another task, or"
            " choose in a table with best: [AXIS]."
        )


# roles of an evaluation's parents that are no models; "language CODE" is a language file
OTHER_INPUTS = ("data_root", "benchmarks", "spm_model", "include_path")


def source_models(run: Run) -> tuple[str, ...]:
    """Return the hashes of the models that an evaluation reads. Other stages have none."""
    if not isinstance(run.config, EvalStage):
        return ()
    models = []
    for role, parent in run.parents.items():
        if role not in OTHER_INPUTS and not role.startswith("language "):
            models.append(parent.hash)
    return tuple(sorted(models))


def is_bundle(run: Run) -> bool:
    """Return True if a run covers several tasks or languages, so that only its parents score."""
    for parent in run.parents.values():
        if isinstance(parent, Run) and isinstance(parent.config, EvalStage):
            return True
    return False


def models_by_reference(config: EvalStage, parents: Mapping[str, Parent]) -> dict[str, Parent]:
    """Return the models by their references, so that a model is looked up once."""
    if config.checkpoint is not None:
        return {config.checkpoint: parents["checkpoint"]}
    assert config.merge is not None
    models = {}
    for role, (_, reference) in config.merge.references().items():
        models[str(reference)] = parents[role]
    if config.merge.base:
        models[config.merge.base] = parents["base"]
    return models


def check_tasks(config: EvalStage, resolver: Resolver) -> None:
    """Raise PipelineError if a task cannot be scored, before anything is scored.

    Data that does not exist yet is not read.
    """
    root = None
    if config.data_root is not None:
        data_run = resolver.data_root(config.data_root)
        root = data_run.folder if data_run else Path(config.data_root)
    if root is None or root.is_dir():
        evaluated_sets(config, root)


def question_files_parent(config: EvalStage, folder: Path) -> External:
    """Return a plain data_root as a parent, identified by the files that this evaluation reads."""
    files: set[Path] = set()
    for task in config.eval.tasks:
        for language in {*config.languages, "en"}:
            files.update(benchmark_of(task.task).files(folder, language))
    return External.of_files(folder, files)
