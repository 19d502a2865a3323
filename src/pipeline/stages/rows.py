"""The stages: the configuration, function, builder and version of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.config.compose import compose
from pipeline.config.conf import register
from pipeline.config.stages import (
    AnalyzeStage,
    CleanStage,
    DataStage,
    EvalStage,
    ExportStage,
    MergeStage,
    PlanStage,
    PrefetchStage,
    RunStage,
    SelectStage,
    ShowStage,
    Stage,
    StatusStage,
    TableStage,
    TrainStage,
)
from pipeline.merge.methods import METHODS
from pipeline.runs.dtypes import stored_dtype
from pipeline.runs.run import Parent, Run
from pipeline.stages import analysis, data, evaluation, merge, selection, training
from pipeline.stages.resolver import Draft, Resolver


def bytes_of_merge(run: Run) -> dict[str, int]:
    """Return the bytes of a merge by purpose.

    A merge is as large as its largest parent, or twice as large if narrower weights become float32.
    """
    size = bytes_of_largest_parent(run)
    if run.config.merge.dtype == "float32":
        dtypes = {stored_dtype(parent, run.runs_dir) for parent in run.parents.values()}
        if dtypes - {"float32"}:
            size = 2 * size
    return {"weights": size}


def bytes_of_largest_parent(run: Run) -> int:
    """Return the bytes of the largest parent's weights on this disk."""
    files = (parent.folder.glob("*.safetensors") for parent in run.parents.values())
    return max((sum(path.stat().st_size for path in paths) for paths in files), default=0)


@dataclass(frozen=True)
class RunRow:
    """A stage that computes a run.

    Attributes:
        config: The class of its configuration.
        version: A part of the hash. Raise it when the code changes the stage's results.
        make: The module of `make(run, work, tracker)`, imported when the stage runs.
        build: The function that builds a run.
        torch: False for stages that compute with NumPy in separate threads.
        bytes_needed: The bytes that a run will write, by purpose. Trainings have them in
            estimate/gpu_budget.py.
    """

    config: type[RunStage]
    version: int
    make: str
    build: Callable[[Any, Resolver], Draft]
    torch: bool = True
    bytes_needed: Callable[[Run], dict[str, int]] = lambda run: {}

    def import_make(self) -> Callable[[Run, Path, Any], dict[str, Any]]:
        return import_module(self.make).make


@dataclass(frozen=True)
class Row:
    """A stage over many runs.

    `call` is module:function. The function takes the configuration and returns the printed text.
    """

    config: type[Stage]
    call: str

    def answer(self, config: Stage) -> str:
        module, _, function = self.call.partition(":")
        return str(getattr(import_module(module), function)(config))


RUN_STAGES = {
    "data": RunRow(DataStage, 6, "pipeline.data.stage", data.build, torch=False),
    "cpt": RunRow(TrainStage, 4, "pipeline.train.stage", training.build),
    "sft": RunRow(TrainStage, 5, "pipeline.train.stage", training.build),
    "merge": RunRow(
        MergeStage, 3, "pipeline.merge.stage", merge.build, torch=False, bytes_needed=bytes_of_merge
    ),
    "eval": RunRow(EvalStage, 9, "pipeline.evaluate.stage", evaluation.build),
    "select": RunRow(SelectStage, 1, "pipeline.evaluate.selection", selection.build),
    "analyze": RunRow(AnalyzeStage, 3, "pipeline.analyze.stage", analysis.build, torch=False),
}
STUDY_STAGES = {
    "plan": Row(PlanStage, "pipeline.commands.plan:show_plan"),
    "table": Row(TableStage, "pipeline.commands.table:make_table"),
    "report": Row(TableStage, "pipeline.commands.report:report_table"),
    "export": Row(ExportStage, "pipeline.commands.export:export"),
    "status": Row(StatusStage, "pipeline.commands.status:show_status"),
    "show": Row(ShowStage, "pipeline.commands.show:show_run"),
    "prefetch": Row(PrefetchStage, "pipeline.commands.prefetch:prefetch"),
    "clean": Row(CleanStage, "pipeline.commands.clean:clean_up"),
}


def build(config: RunStage, references: Mapping[str, Parent] | None = None) -> Run:
    """Return the run that a stage's configuration describes, with its parents, finished or not.

    Args:
        config: The configuration.
        references: Parents by names that a RUN may have before its run exists.

    Raises:
        PipelineError: A RUN refers to nothing, or a data file does not exist.
    """
    row = RUN_STAGES[config.stage]
    resolver = Resolver(config.runs_path, build, references or {})
    decided, label, parents = row.build(config, resolver)
    return Run(decided, label, parents, version=row.version)


def build_single(overrides: list[str]) -> Run:
    """Return the run that a command's keys describe."""
    config = compose(overrides)
    assert isinstance(config, RunStage)
    return build(config)


CONFIGS: dict[str, type[Stage]] = {name: row.config for name, row in RUN_STAGES.items()}
CONFIGS |= {name: row.config for name, row in STUDY_STAGES.items()}
register(CONFIGS, METHODS)
