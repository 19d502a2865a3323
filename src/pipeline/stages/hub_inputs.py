"""What runs read from the Hub: models, training sets and benchmarks, finished or not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.benchmarks.benchmark import on_hub
from pipeline.config.data import Source
from pipeline.config.harness_tasks import included_state
from pipeline.config.stages import DataStage, EvalStage
from pipeline.data.benchmarks import hub_sources, scored_sets
from pipeline.errors import PipelineError
from pipeline.hub.addresses import without_credentials
from pipeline.hub.lock import Lock, hub_cache, part_of
from pipeline.runs.run import External, Run
from pipeline.stages.lengths import is_here


@dataclass
class HubInputs:
    """What runs read from the Hub.

    models: id or id@revision. sources: label -> source, without duplicates.
    """

    models: list[str] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    scored: list[tuple[str, str | None]] = field(
        default_factory=list
    )  # sets that the harness loads by name
    problems: list[str] = field(default_factory=list)  # what the Hub does not offer
    left_out: list[str] = field(
        default_factory=list
    )  # why scores that are wanted where_possible stay empty

    def not_pinned(self, lock: Lock) -> list[str]:
        missing = []
        for name in self.models:
            if name not in lock.models:
                missing.append(name)
        for source in self.sources.values():
            if lock.entry(source) is None:
                missing.append(source.hub or source.url or "")
        return without_credentials(list(dict.fromkeys(missing)))


def collect_hub_inputs(runs: list[Run]) -> HubInputs:
    """Everything that these runs read from the Hub, finished or not."""
    inputs = HubInputs()
    for run in runs:
        for parent in run.parents.values():
            if isinstance(parent, External) and parent.hub:
                add_new(inputs.models, [parent.hub])
        config = run.config
        if (
            isinstance(config, DataStage)
            and config.data_root is None
            and config.expert.world is None
        ):
            for name, source in config.expert.sources.items():
                if is_here(source):
                    continue
                inputs.sources.setdefault(_source_label(name, source), source)
        if isinstance(config, DataStage | EvalStage):
            try:
                if isinstance(config, EvalStage) and config.data_root is None:
                    add_new(inputs.left_out, _sets_of(config)[1])
                for source in benchmark_sources(config):
                    inputs.sources.setdefault(_source_label("benchmark", source), source)
                    if isinstance(config, EvalStage):
                        add_new(inputs.scored, [(source.hub or "", source.hub_config)])
            except PipelineError as error:
                add_new(inputs.problems, [str(error)])
    return inputs


def add_new(known: list[Any], found: Iterable[Any]) -> None:
    """Append what is not in a list yet."""
    known += [item for item in found if item not in known]


def kept_offline(names: Iterable[str]) -> str:
    """Return a clause that says how many models and sets HF_HUB_OFFLINE keeps from being fetched;
    "" if all are cached.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in (
        "1",
        "ON",
        "YES",
        "TRUE",
    ):  # as huggingface_hub reads it
        return ""
    folders = {name: name.partition("@")[0].replace("/", "--") for name in names}
    absent = []
    for name, folder in folders.items():
        if not any(hub_cache().glob(f"*s--{folder}")):
            absent.append(name)
    if absent:
        return f"; HF_HUB_OFFLINE is set, and {len(absent)} of these cannot be fetched here"
    return ""


def experts_on_hub(run: Run[EvalStage]) -> list[Path]:
    """Return the names on the Hub of the experts that a run merges in memory, as `local_folder`
    takes them.
    """
    experts = []
    if run.config.merge:
        experts = [run.parents[role] for role in run.config.merge.references()]
    found = []
    for expert in experts:
        if isinstance(expert, External) and expert.hub:
            found.append(expert.folder)
    return found


def _source_label(name: str, source: Source) -> str:
    return f"{name}: {source.url or f'{source.hub} {part_of(source)}'}"


def benchmark_sources(config: DataStage | EvalStage) -> list[Source]:
    """Return the benchmark sets on the Hub that a run reads, to score them or to compare rows with
    them.
    """
    if config.data_root is not None:
        return []
    if isinstance(config, DataStage):
        is_local = (
            config.expert.world is not None
            or config.expert.union
            or config.data.benchmarks is not None
        )
        sources = [] if is_local else hub_sources(config.expert.languages, scored_sets(config))
        return [source for _, source in sources]
    return [on_hub(*data_set) for data_set in _sets_of(config)[0]]


def _sets_of(config: EvalStage) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    tasks = tuple((task.task, task.num_fewshot, task.where_possible) for task in config.eval.tasks)
    return evaluated_sets(tasks, tuple(config.languages), run_code=config.eval.run_code)


def evaluated_sets(
    tasks: tuple[tuple[str, int, bool], ...],
    languages: tuple[str, ...],
    root: Path | None = None,
    **settings: Any,
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """(repository, configuration, split) of each set that the harness' task files name; why tasks
    are left out. Raises PipelineError for a task that cannot be scored, with its files below
    `root`, or on the Hub.
    """
    return _evaluated_sets(included_state(), tasks, languages, root, **settings)


@lru_cache(maxsize=128)
def _evaluated_sets(
    included: tuple[str, ...],
    tasks: tuple[tuple[str, int, bool], ...],
    languages: tuple[str, ...],
    root: Path | None,
    **settings: Any,
) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    """As evaluated_sets.

    included: the state of eval.include_path, whose files may change between calls.
    """
    from pipeline.config.evaluation import Eval, EvalTask
    from pipeline.evaluate.records import ScoreRow
    from pipeline.evaluate.tasks import data_sets, task_specs

    left_out: list[ScoreRow] = []
    with TemporaryDirectory() as folder:
        evaluation = Eval("", [EvalTask(*task) for task in tasks], **settings)
        definitions = task_specs(evaluation, languages, root, Path(folder), left_out)
        sets = (
            []
            if root
            else [data_set for definition in definitions for data_set in data_sets(definition)]
        )
    return list(dict.fromkeys(sets)), [str(skipped.reason) for skipped in left_out]
