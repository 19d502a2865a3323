"""The builder of data runs: the sources at their locked revisions, and the files below data_root
that are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import languages
from pipeline.benchmarks import find_benchmark, scored_files
from pipeline.benchmarks.harness import scored_rows
from pipeline.config import conf
from pipeline.config.data import Data, Source
from pipeline.config.stages import DataStage, EvalStage
from pipeline.data.mixture import check_sources, files_read
from pipeline.errors import PipelineError
from pipeline.hub.lock import digest_of, read_lock
from pipeline.runs.run import External, Parent, Run
from pipeline.stages.hub_inputs import benchmark_sources
from pipeline.stages.lengths import is_here
from pipeline.stages.resolver import Draft, Resolver
from pipeline.stages.world import check_items, refuse_items, small_world


def build(config: DataStage, resolver: Resolver) -> Draft:
    label = f"data-{config.expert.name}"
    if config.expert.union:
        config, parents = build_joint(config, resolver)
        return config, label, parents
    config = at_locked_revisions(apart_from_data_root(without_left_out(config)))
    if config.expert.world is None and config.expert.items is None:
        check_sources(config.expert)
    check_items(config.expert)
    codes = []
    for source in config.expert.sources.values():
        if source.language is not None:
            codes.append(source.language)
    return config, label, parents_of(config, resolver) | own_languages(codes)


def apart_from_data_root(config: DataStage) -> DataStage:
    """Where all rows are of files that sources name by themselves (url), data_root has the
    benchmarks alone.
    """
    sources = config.expert.sources.values()
    if config.data_root is None or not sources or not all(is_here(source) for source in sources):
        return config
    data = config.data
    if data.benchmarks is None and any(scored_files(Path(config.data_root)).values()):
        data = replace(data, benchmarks=config.data_root)
    return replace(config, data_root=None, data=data)


def tell_scored(runs: Sequence[Run]) -> None:
    """Tell the data runs of own rows which tasks the evaluations among `runs` score, and where
    their rows are.
    """
    scored: dict[str, str] = {}
    for run in runs:
        if isinstance(run.config, EvalStage):
            root = None
            if "data_root" in run.parents:
                root = run.parents["data_root"].folder
            for task in run.config.eval.tasks:
                benchmark = find_benchmark(task.task)
                if benchmark and not benchmark.of_harness:
                    name = benchmark.name
                else:
                    name = task.task
                place = scored_rows(task.task, root) or root
                if place:
                    scored[name] = str(place.absolute())
                else:
                    scored[name] = ""
    for run in runs:
        if isinstance(run.config, DataStage) and run.config.expert.is_own:
            run.config.data.scored = scored


def own_languages(codes: Iterable[str]) -> dict[str, Parent]:
    """Languages that are not shipped, as parents: their fields affect the run hash."""
    custom = {}
    for code in codes:
        file = languages.custom_language_file(code)
        if file is not None:
            custom[code] = file
    return {
        f"language {code}": External(code, digest, path) for code, (path, digest) in custom.items()
    }


def build_joint(config: DataStage, resolver: Resolver) -> tuple[DataStage, dict[str, Parent]]:
    """Return the configuration and parents of a joint set: the two experts' data runs, and how it
    is shuffled.
    """
    experts = config.expert.union
    if sorted(expert.side for expert in experts.values()) != ["language", "math"]:
        sides = ", ".join(f"{name} {expert.side}" for name, expert in experts.items())
        raise PipelineError(
            f"expert.union of expert={config.expert.name} has the sides {sides}: give a math and a"
            " language expert"
        )
    parents: dict[str, Parent] = {
        name: resolver.run(replace(config, expert=expert, redo=False))
        for name, expert in experts.items()
    }
    return replace(config, data=Data(shuffle=config.data.shuffle)), parents


def without_left_out(config: DataStage) -> DataStage:
    """Return the expert without the sources that data.leave_out names.

    A name may belong to another expert.
    """
    left_out = config.data.leave_out or []
    names = {*config.expert.sources, *conf.options("data")}
    unknown = [name for name in left_out if name not in names]
    if unknown:
        raise PipelineError(
            f"data.leave_out={unknown[0]} is not a source: name one of"
            f" {', '.join(config.expert.sources)}"
        )
    return with_sources(
        config, {key: value for key, value in config.expert.sources.items() if key not in left_out}
    )


def with_sources(config: DataStage, sources: dict[str, Source]) -> DataStage:
    return replace(config, expert=replace(config.expert, sources=sources))


def at_locked_revisions(config: DataStage) -> DataStage:
    """Return the sources on the Hub at the revisions that stage=prefetch locked, so that these
    enter the hash.
    """
    if config.data_root is not None or config.expert.world is not None:
        return config
    lock = read_lock(Path(config.runs_dir))
    return with_sources(
        config, {name: lock.pinned(source) for name, source in config.expert.sources.items()}
    )


def parents_of(config: DataStage, resolver: Resolver) -> dict[str, Parent]:
    """Return the data_root as a parent: a data run, or a folder identified by the files of the
    sources.

    Without one, the sources on this disk are the parents. Benchmarks that rows are compared with
    are recorded (data/benchmarks.py), but not hashed.
    """
    if config.expert.world is not None:
        return {}
    if config.expert.items is not None and config.data_root is None:
        small_world(None)
    if config.data.benchmarks not in (None, "none") and not any(
        scored_files(Path(config.data.benchmarks)).values()
    ):
        raise PipelineError(
            f"data.benchmarks={config.data.benchmarks} holds no file like mgsm/sw/test.jsonl: name"
            " a folder with some"
        )
    if config.data_root is None:
        return local_sources(config)
    data_root = resolver.data_root(config.data_root)
    refuse_items(data_root or Path(config.data_root))
    if config.expert.items is not None:
        return {"data_root": small_world(data_root)}
    if data_root is None:
        folder = Path(config.data_root)
        files = files_read(config.expert.sources, folder)
        data_root = External.of_files(folder, files)
    return {"data_root": data_root}


def local_sources(config: DataStage) -> dict[str, Parent]:
    """Return the sources that are a local copy of a repository or a local file, identified by
    content.
    """
    parents: dict[str, Parent] = {}
    for name, source in config.expert.sources.items():
        address = Path(source.url or source.hub or "")
        if (source.url or source.hub) and address.exists():
            if address.is_dir():
                folder = address
            else:
                folder = address.parent
            matching = []
            if source.files and folder == address:
                matching = list(folder.glob(source.files))
            files = matching or (folder.rglob("*") if folder == address else [address])
            visible = (
                path
                for path in files
                if not any(part[0] == "." for part in path.relative_to(folder).parts)
            )
            parents[f"source {name}"] = External.of_files(
                folder, filter(Path.is_file, visible), address.name
            )
    return parents


def locked_benchmarks(config: EvalStage) -> dict[str, Parent]:
    """Return the benchmarks on the Hub that an evaluation reads, as a parent identified by their
    locks; {} until locked.
    """
    lock = read_lock(Path(config.runs_dir))
    if not lock.datasets:
        return {}
    try:
        entries = [(source.hub, lock.entry(source)) for source in benchmark_sources(config)]
    except PipelineError:  # a task that the Hub has no data for: the evaluation itself reports it
        return {}
    pins = sorted({f"{hub}@{entry['revision']}" for hub, entry in entries if entry})
    if pins:
        return {"benchmarks": External("benchmarks on the Hub", digest_of(pins), Path("hub"))}
    return {}
