"""What runs read from the Hub: models, training sets and benchmarks, finished or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.benchmarks.benchmark import on_hub
from pipeline.config.data import Source
from pipeline.config.stages import DataStage, EvalStage
from pipeline.data.benchmarks import hub_sources
from pipeline.errors import PipelineError
from pipeline.hub.addresses import without_credentials
from pipeline.hub.lock import Lock, part_of
from pipeline.runs.run import External, Run


@dataclass
class Needs:
    """What runs read from the Hub. models: id or id@asked. sources: what it is for -> where it is, once each."""

    models: list[str] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    scored: list[tuple[str, str | None]] = field(default_factory=list)  # sets that the harness loads by their names
    problems: list[str] = field(default_factory=list)  # what cannot be had from the Hub at all

    def not_pinned(self, lock: Lock) -> list[str]:
        missing = [name for name in self.models if name not in lock.models]
        missing += [source.hub or source.url or "" for source in self.sources.values() if lock.entry(source) is None]
        return without_credentials(list(dict.fromkeys(missing)))


def needs(runs: list[Run]) -> Needs:
    """What these runs read from the Hub, finished or not."""
    found = Needs()
    for run in runs:
        for parent in run.parents.values():
            if isinstance(parent, External) and parent.hub and parent.hub not in found.models:
                found.models.append(parent.hub)
        config = run.config
        if isinstance(config, DataStage) and config.data_root is None and config.expert.world is None:
            for name, source in config.expert.sources.items():
                found.sources.setdefault(_label(name, source), source)
        if isinstance(config, DataStage | EvalStage):
            try:
                for source in benchmark_sources(config):
                    found.sources.setdefault(_label("benchmark", source), source)
                    named = (source.hub or "", source.hub_config)
                    if isinstance(config, EvalStage) and named not in found.scored:
                        found.scored.append(named)
            except PipelineError as error:
                found.problems += [str(error)] if str(error) not in found.problems else []
    return found


def _label(name: str, source: Source) -> str:
    return f"{name}: {source.url or f'{source.hub} {part_of(source)}'}"


def benchmark_sources(config: DataStage | EvalStage) -> list[Source]:
    """The benchmark sets on the Hub that a run reads: what training rows are compared with, or what is scored."""
    if config.data_root is not None:
        return []
    if isinstance(config, DataStage):
        there = config.expert.world is not None or config.expert.union or config.data.benchmarks is not None
        return [] if there else [source for _, source in hub_sources()]
    tasks = tuple((task.task, task.num_fewshot) for task in config.eval.tasks)
    return [on_hub(*found) for found in _evaluated(tasks, tuple(config.languages))]


@lru_cache(maxsize=64)
def _evaluated(tasks: tuple[tuple[str, int], ...], languages: tuple[str, ...]) -> list[tuple[str, str | None, str]]:
    """(repository, configuration, split) of each set that the harness' task files name."""
    from pipeline.config.evaluation import EvalTask
    from pipeline.evaluate.tasks import data_sets, task_definitions

    asked = [EvalTask(task, shots) for task, shots in tasks]
    found: list[tuple[str, str | None, str]] = []
    with TemporaryDirectory() as folder:
        for definition in task_definitions(asked, languages, None, Path(folder)):
            found += data_sets(definition)
    return list(dict.fromkeys(found))
