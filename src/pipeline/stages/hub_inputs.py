"""The models, training sets and benchmarks that runs read from the Hub."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.benchmarks.benchmark import on_hub
from pipeline.config.data import Source
from pipeline.config.harness_tasks import remembered
from pipeline.config.stages import DataStage, EvalStage
from pipeline.data.benchmarks import hub_sources, scored_sets
from pipeline.errors import PipelineError
from pipeline.hub.addresses import without_credentials
from pipeline.hub.lock import Lock, part_of
from pipeline.runs.run import External, Run
from pipeline.stages.lengths import is_here


@dataclass
class HubInputs:
    """The models and data sets that runs read from the Hub.

    Attributes:
        models: id or id@revision.
        sources: Sources by label, without duplicates.
        scored: The sets that the harness loads by name.
        problems: Inputs that the Hub does not have.
        left_out: Why scores that are wanted `where_possible` stay empty.
    """

    models: list[str] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    scored: list[tuple[str, str | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def not_pinned(self, lock: Lock) -> list[str]:
        missing = [name for name in self.models if name not in lock.models]
        for source in self.sources.values():
            if lock.entry(source) is None:
                missing.append(source.hub or source.url or "")
        return without_credentials(list(dict.fromkeys(missing)))


def collect_hub_inputs(runs: list[Run]) -> HubInputs:
    """Return everything that these runs read from the Hub, whether they are finished or not."""
    inputs = HubInputs()
    for run in runs:
        for parent in run.parents.values():
            if isinstance(parent, External) and parent.hub:
                add_new(inputs.models, [parent.hub])
        config = run.config
        if not isinstance(config, DataStage | EvalStage):
            continue
        if isinstance(config, DataStage) and not config.data_root and not config.expert.world:
            for name, source in config.expert.sources.items():
                if not is_here(source):
                    inputs.sources.setdefault(_source_label(name, source), source)
        try:
            if isinstance(config, EvalStage) and config.data_root is None:
                _, reasons = evaluated_sets(config)
                add_new(inputs.left_out, reasons)
            for source in benchmark_sources(config):
                inputs.sources.setdefault(_source_label("benchmark", source), source)
                if isinstance(config, EvalStage):
                    add_new(inputs.scored, [(source.hub or "", source.hub_config)])
        except PipelineError as error:
            add_new(inputs.problems, [str(error)])
    return inputs


def add_new(known: list[Any], found: Iterable[Any]) -> None:
    """Append the items that are not in a list yet."""
    known += [item for item in found if item not in known]


def experts_on_hub(run: Run[EvalStage]) -> list[Path]:
    """Return the experts on the Hub that a run merges in memory, in the form of `local_folder`."""
    folders: list[Path] = []
    if not run.config.merge:
        return folders
    for role in run.config.merge.references():
        expert = run.parents[role]
        if isinstance(expert, External) and expert.hub:
            folders.append(expert.folder)
    return folders


def _source_label(name: str, source: Source) -> str:
    place = source.url or f"{source.hub} {part_of(source)}"
    return f"{name}: {place}"


def benchmark_sources(config: DataStage | EvalStage) -> list[Source]:
    """Return the benchmark sets on the Hub that a run scores, or compares rows with."""
    if config.data_root is not None:
        return []
    if isinstance(config, EvalStage):
        sets, _ = evaluated_sets(config)
        return [on_hub(*data_set) for data_set in sets]
    expert = config.expert
    if expert.world is not None or expert.union or config.data.benchmarks is not None:
        return []
    return [source for _, source in hub_sources(expert.languages, scored_sets(config))]


def evaluated_sets(
    config: EvalStage, root: Path | None = None
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """Return the sets that the harness' task files name, and why tasks are left out.

    Args:
        config: The evaluation.
        root: The folder of the data. None: the Hub.

    Returns:
        (repository, configuration, split) of each set, and the reasons.

    Raises:
        PipelineError: A task cannot be scored.
    """
    settings = config.eval
    return _evaluated_sets(
        tuple(astuple(task) for task in settings.tasks),
        tuple(config.languages),
        root,
        split=settings.split,
        exemplars=settings.exemplars,
        run_code=settings.run_code,
    )


@remembered
def _evaluated_sets(
    tasks: tuple[tuple[Any, ...], ...],
    languages: tuple[str, ...],
    root: Path | None,
    **settings: Any,
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """Compute `evaluated_sets`."""
    from pipeline.config.evaluation import Eval, EvalTask
    from pipeline.evaluate.records import ScoreRow
    from pipeline.evaluate.tasks import data_sets, task_specs

    left_out: list[ScoreRow] = []
    sets: dict[tuple[str, str | None, str], None] = {}
    with TemporaryDirectory() as folder:
        evaluation = Eval("", [EvalTask(*task) for task in tasks], **settings)
        for spec in task_specs(evaluation, languages, root, Path(folder), left_out):
            if not root:
                sets |= dict.fromkeys(data_sets(spec))
    return list(sets), [str(skipped.reason) for skipped in left_out]
