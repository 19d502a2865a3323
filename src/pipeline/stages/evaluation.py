"""The builder of evaluations: the model or merge that is scored and the files that hold the
questions; for several tasks or languages, the runs that score one each.
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
    name, configs = config.eval.label, scoring_runs(config)
    in_table = bool(resolver.references)  # which checks each evaluation when it runs
    if len(configs) > 1 or not in_table:
        check_tasks(config, resolver)
    if len(configs) > 1:
        references = models_by_reference(config, parents)
        scored: dict[str, Parent] = {
            role: resolver.run(bundled, references) for role, bundled in configs.items()
        }
        return config, f"eval-{name}-{label}", parents | scored
    config = next(iter(configs.values()), config)
    parents |= own_languages(config.languages)
    if config.data_root is not None:
        plain_folder = Path(config.data_root)
        parents["data_root"] = resolver.data_root(config.data_root) or question_files_parent(
            config, plain_folder
        )
    else:
        parents |= locked_benchmarks(config)
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is not a file: give the SentencePiece model of spBLEU,"
                " which sacrebleu -tok flores200 fetches to"
                " ~/.sacrebleu/models/flores200sacrebleuspm, or leave it out"
            )
        parents["spm_model"] = External(file.name, sha256(file), file)
    (task,) = config.eval.tasks
    folder = included_folder(task.task)
    if folder:
        parents["include_path"] = External.of_files(folder, files_of_task(task.task))
    (code,) = config.languages
    return config, f"{f'eval-{name}-{label}'[: LABEL_LENGTH - len(code) - 1]}-{code}", parents


def with_base(config: EvalStage, resolver: Resolver) -> EvalStage:
    """Return the configuration.

    An adapter from elsewhere becomes a merge in memory of the adapter and its base.

    The base is eval.base, or the base that the adapter names. Raises PipelineError for eval.base
    with other models.
    """
    base, reference = config.eval.base, config.checkpoint
    adapter = None
    if reference is not None:
        adapter = resolver.model(reference, "checkpoint")
    if reference is not None and isinstance(adapter, Folder) and gives_adapter(adapter):
        merge = TaskArithmetic(experts=[reference], base=base)
        return replace(config, checkpoint=None, merge=merge, eval=replace(config.eval, base=None))
    if base is not None:
        if adapter is None:
            model = "a merge takes merge.base=RUN"
        else:
            model = f"{adapter.name} is not one: leave it out"
        raise PipelineError(
            f"eval.base={base} is read with checkpoint=, an adapter from elsewhere; {model}"
        )
    return config


def refuse_sampling(settings: Eval) -> None:
    """Raise PipelineError for answers that cannot be drawn or scored so."""
    if settings.think_end == "":
        raise PipelineError(
            "eval.think_end is empty: give what ends the model's thoughts, or leave it out"
        )
    if settings.temperature == 0:
        for name in ("answers", "top_p", "sample_seed"):
            if getattr(settings, name) != getattr(Eval, name):
                raise PipelineError(
                    f"eval.{name}={getattr(settings, name)} is read with eval.temperature above 0"
                    " alone: give eval.temperature=0.7, or leave it out"
                )
        return
    kinds = {task.task: kind_of(task.task) for task in settings.tasks}
    if not {*SAMPLED} & {*kinds.values()}:
        raise PipelineError(
            f"eval.temperature={settings.temperature:g} is read by tasks that the model writes"
            f" answers to, not by {', '.join(kinds)}: leave it out"
        )


def with_dtype(config: EvalStage, parents: Mapping[str, Parent]) -> EvalStage:
    """Return the configuration with eval.dtype=auto resolved; unchanged if the dtype is unknown."""
    if config.eval.dtype != "auto":
        return config
    runs_dir = Path(config.runs_dir)
    if config.merge is not None:
        dtype = merged_dtype(config.merge, parents, runs_dir)
    else:
        dtype = stored_dtype(parents["checkpoint"], runs_dir)
    if dtype:
        return replace(config, eval=replace(config.eval, dtype=dtype), as_stored=True)
    return config


def refuse_dtypes(runs: Iterable[Run[EvalStage]], knob: str) -> None:
    """Raise PipelineError where evaluations that are compared use different dtypes.

    `knob` sets the dtype of all.
    """
    firsts: dict[str, Run[EvalStage]] = {}
    for run in runs:
        firsts.setdefault(run.config.eval.dtype, run)
    firsts.pop("auto", None)
    if len(firsts) > 1:
        examples = ", ".join(f"{run.name} in {dtype}" for dtype, run in firsts.items())
        raise PipelineError(
            f"scores in several dtypes cannot be compared ({examples}): give {knob}=float32 for all"
        )


def one_dtype_for(runs: Iterable[Run[EvalStage]]) -> str | None:
    """Return the dtype in which models of several dtypes are compared: float32, which holds all of
    them.

    None if all have one dtype. A dtype that is not known yet (auto) counts as different from
    float32.
    """
    dtypes = {run.config.eval.dtype for run in runs}
    several = "float32" in dtypes or len(dtypes - {"auto"}) > 1
    if len(dtypes) > 1 and several:
        return "float32"
    return None


def refuse_lower(task: str, what: str) -> None:
    """Raise PipelineError for a task of whose metric less is better, where the highest would be
    taken for the best.
    """
    if lower_is_better(task):
        metric, _ = primary_metric(task)
        raise PipelineError(
            f"{task}: of {metric} less is better, and {what} the highest: name another task, or"
            " choose in a table, by best: [AXIS]"
        )


def source_models(run: Run) -> tuple[str, ...]:
    """Hashes of the models that an evaluation reads; empty for other stages."""
    if not isinstance(run.config, EvalStage):
        return ()
    return tuple(sorted(parent.hash for role, parent in run.parents.items() if role != "data_root"))


def is_bundle(run: Run) -> bool:
    """Whether a run covers several tasks or languages: it scores nothing itself, its parents do."""
    return any(
        isinstance(parent, Run) and isinstance(parent.config, EvalStage)
        for parent in run.parents.values()
    )


def models_by_reference(config: EvalStage, parents: Mapping[str, Parent]) -> dict[str, Parent]:
    """Return reference in the configuration -> model, so that a model is looked up once."""
    if config.checkpoint is not None:
        return {config.checkpoint: parents["checkpoint"]}
    assert config.merge is not None
    models = {
        str(reference): parents[role] for role, (_, reference) in config.merge.references().items()
    }
    base = config.merge.base
    return models | ({base: parents["base"]} if base else {})


def check_tasks(config: EvalStage, resolver: Resolver) -> None:
    """Raise PipelineError for a task that cannot be scored, before any is.

    Data that does not exist yet is not read.
    """
    data_run = None
    if config.data_root is not None:
        data_run = resolver.data_root(config.data_root)
    if data_run:
        root = data_run.folder
    else:
        root = None
        if config.data_root is not None:
            root = Path(config.data_root)
    if root is None or root.is_dir():
        settings = config.eval
        tasks = tuple((task.task, task.num_fewshot, task.where_possible) for task in settings.tasks)
        how = {
            "split": settings.split,
            "exemplars": settings.exemplars,
            "run_code": settings.run_code,
        }
        evaluated_sets(tasks, tuple(config.languages), root, **how)


def question_files_parent(config: EvalStage, folder: Path) -> External:
    """Return a plain data_root as a parent, identified by the files that this evaluation reads."""
    sets = [
        (task.task, language)
        for task in config.eval.tasks
        for language in {*config.languages, "en"}
    ]
    files = {path for task, language in sets for path in benchmark_of(task).files(folder, language)}
    return External.of_files(folder, files)
