"""The builder of evaluations: the model or merge that is scored, the files that hold the questions; of several tasks or
languages, the runs that score one each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.benchmarks import benchmark_of
from pipeline.config.stages import EvalStage, EvalTask
from pipeline.errors import PipelineError
from pipeline.evaluate.bundle import scoring_runs
from pipeline.evaluate.tasks import task_definitions
from pipeline.files import content_hash, sha256
from pipeline.languages import language
from pipeline.models.load import date_of_templates
from pipeline.runs.dtypes import merged_dtype, stored_dtype
from pipeline.runs.run import LABEL_LENGTH, External, Parent, Run
from pipeline.stages.data import locked_benchmarks, own_languages
from pipeline.stages.merge import described
from pipeline.stages.resolver import Draft, Resolver, label_of
from pipeline.stages.world import refuse_another_world


def build(config: EvalStage, resolver: Resolver) -> Draft:
    for code in config.languages:
        if language(code).constructed and config.data_root is None:
            raise PipelineError(f"{code} is a constructed language and not on the Hub: set data_root")
    if config.eval.chat_template:
        date_of_templates(config.eval.template_date, "eval.template_date")
    if config.checkpoint is None:
        label, parents = described(config, resolver)
    else:
        parents = {"checkpoint": resolver.model(config.checkpoint, "checkpoint")}
        label = label_of(parents["checkpoint"])
    config = with_dtype(config, parents)
    name, each = config.eval.name, scoring_runs(config)
    if len(each) > 1 or (config.data_root is not None and not resolver.known):  # a table's when they are made
        refuse_early(config, resolver)
    if len(each) > 1:
        known = named(config, parents)
        scored: dict[str, Parent] = {role: resolver.run(one, known) for role, one in each.items()}
        return config, f"eval-{name}-{label}", parents | scored
    config = next(iter(each.values()), config)
    parents |= own_languages(config.languages)
    if config.data_root is not None:
        parents["data_root"] = resolver.data_root(config.data_root) or questions(config, Path(config.data_root))
        for model in [one for role, one in parents.items() if role != "data_root"]:
            refuse_another_world(model, parents["data_root"], config)
    else:
        parents |= locked_benchmarks(config)
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is no file: give the SentencePiece model of spBLEU, which sacrebleu -tok "
                "flores200 fetches to ~/.sacrebleu/models/flores200sacrebleuspm, or leave it out"
            )
        parents["spm_model"] = External(file.name, sha256(file), file)
    (code,) = config.languages
    return config, f"{f'eval-{name}-{label}'[: LABEL_LENGTH - len(code) - 1]}-{code}", parents


def with_dtype(config: EvalStage, parents: Mapping[str, Parent]) -> EvalStage:
    """The configuration with the dtype that eval.dtype=auto stands for; as it is where nothing tells it, as of a model
    on the Hub that is not locked."""
    if config.eval.dtype != "auto":
        return config
    runs_dir = Path(config.runs_dir)
    if config.merge is not None:
        found = merged_dtype(config.merge, parents, runs_dir)
    else:
        found = stored_dtype(parents["checkpoint"], runs_dir)
    return replace(config, eval=replace(config.eval, dtype=found), as_stored=True) if found else config


def refuse_dtypes(runs: Iterable[Run[EvalStage]], knob: str) -> None:
    """Refuse evaluations that are compared and are scored in different dtypes. `knob` sets the dtype of all."""
    found: dict[str, str] = {}
    for run in runs:
        if run.config.eval.dtype != "auto":
            found.setdefault(run.config.eval.dtype, run.name)
    if len(found) > 1:
        told = ", ".join(f"{name} in {dtype}" for dtype, name in found.items())
        raise PipelineError(f"scores in several dtypes cannot be compared ({told}): give {knob}=float32 for all")


def is_bundle(run: Run) -> bool:
    """Whether a run is of several tasks or languages: it scores nothing itself, its parents do."""
    return any(isinstance(one, Run) and isinstance(one.config, EvalStage) for one in run.parents.values())


def named(config: EvalStage, parents: Mapping[str, Parent]) -> dict[str, Parent]:
    """The model's runs by what the configuration calls them, so that they are not looked for again."""
    if config.checkpoint is not None:
        return {config.checkpoint: parents["checkpoint"]}
    assert config.merge is not None
    found = {str(reference): parents[role] for role, (_, reference) in config.merge.references().items()}
    return found | ({config.merge.base: parents["base"]} if config.merge.base else {})


def refuse_early(config: EvalStage, resolver: Resolver) -> None:
    """What one of the tasks would be refused for, before any of them is scored. Data that is to be made is not read."""
    made = resolver.data_root(config.data_root) if config.data_root is not None else None
    root = made.folder if made else Path(config.data_root) if config.data_root is not None else None
    if root is None or root.is_dir():
        asked = config.eval
        tasks = tuple((one.task, one.num_fewshot, one.where_possible) for one in asked.tasks)
        _refuse(tasks, tuple(config.languages), root, asked.split, asked.exemplars, asked.run_code)


@lru_cache(maxsize=64)
def _refuse(
    tasks: tuple[tuple[str, int, bool], ...], languages: tuple[str, ...], root: Path | None, split: str,
    exemplars: str, run_code: bool,
) -> None:  # fmt: skip
    with TemporaryDirectory() as folder:
        task_definitions(
            [EvalTask(*task) for task in tasks], languages, root, Path(folder), split=split, exemplars=exemplars,
            run_code=run_code, left_out=[],
        )  # fmt: skip


def questions(config: EvalStage, folder: Path) -> External:
    """A plain data_root, known by the files that this evaluation reads."""
    asked = [(task.task, language) for task in config.eval.tasks for language in {*config.languages, "en"}]
    files = {path for task, language in asked for path in benchmark_of(task).files(folder, language)}
    return External(folder.name, content_hash(sorted(files), folder), folder)
