"""The stages, a row each: its configuration, the function that runs it, its parents, and the
version of its results.
"""

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
    ReportStage,
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


def no_disk_needed(run: Run) -> dict[str, int]:
    """Nothing: what the stage writes is too small to check the disk for."""
    return {}


def bytes_of_merge(run: Run) -> dict[str, int]:
    """Purpose -> bytes: a merge is as large as its largest parent, or twice as large in float32."""
    in_float32 = run.config.merge.dtype == "float32"
    wider = in_float32 and any(
        stored_dtype(parent, run.runs_dir) != "float32" for parent in run.parents.values()
    )
    return {"weights": (1 + wider) * bytes_of_largest_parent(run)}


def bytes_of_largest_parent(run: Run) -> int:
    """Bytes of the weights that are here of a run's largest parent."""
    files = (parent.folder.glob("*.safetensors") for parent in run.parents.values())
    return max((sum(path.stat().st_size for path in paths) for paths in files), default=0)


@dataclass(frozen=True)
class RunRow:
    """A stage that computes a run.

    version: raised when the code changes the stage's results; it enters the hash. make: the module
    of `make(run, work, tracker)`, imported when it runs. torch: false for stages that compute with
    NumPy in threads of their own. bytes_needed: purpose -> bytes that a run will write; of
    trainings estimate/gpu_budget.py knows them.
    """

    config: type[RunStage]
    version: int
    make: str
    build: Callable[[Any, Resolver], Draft]
    torch: bool = True
    bytes_needed: Callable[[Run], dict[str, int]] = no_disk_needed

    def import_make(self) -> Callable[[Run, Path, Any], dict[str, Any]]:
        return import_module(self.make).make


@dataclass(frozen=True)
class Row:
    """A stage over many runs: `call` is module:function, which takes the config and returns what is
    printed.
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
    "report": Row(ReportStage, "pipeline.commands.report:report_table"),
    "export": Row(ExportStage, "pipeline.commands.export:export"),
    "status": Row(StatusStage, "pipeline.commands.status:show_status"),
    "show": Row(ShowStage, "pipeline.commands.show:show_run"),
    "prefetch": Row(PrefetchStage, "pipeline.commands.prefetch:prefetch"),
    "clean": Row(CleanStage, "pipeline.commands.clean:clean_up"),
}


def build(config: RunStage, references: Mapping[str, Parent] | None = None) -> Run:
    """Return the run that a stage's configuration describes, with its parents, finished or not.

    Args:
        references: parents by names that a RUN may have before its run exists.

    Raises:
        PipelineError: a RUN that refers to nothing, or a data file that does not exist.
    """
    row = RUN_STAGES[config.stage]
    decided, label, parents = row.build(
        config, Resolver(Path(config.runs_dir), build, references or {})
    )
    return Run(decided, label, parents, version=row.version)


def build_single(overrides: list[str]) -> Run:
    """Return the run that a command's words describe."""
    config = compose(overrides)
    assert isinstance(config, RunStage)
    return build(config)


CONFIGS: dict[str, type[Stage]] = {name: row.config for name, row in RUN_STAGES.items()}
CONFIGS |= {name: row.config for name, row in STUDY_STAGES.items()}
register(CONFIGS, METHODS)
