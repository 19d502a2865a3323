"""The builder of data runs: sources at their locked revisions, and the files below data_root."""

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
from pipeline.data.load import local_file
from pipeline.data.mixture import check_sources
from pipeline.errors import PipelineError, suggest
from pipeline.hub.lock import digest_of, read_lock
from pipeline.runs.run import External, Parent, Run
from pipeline.stages.hub_inputs import benchmark_sources
from pipeline.stages.lengths import is_here
from pipeline.stages.resolver import Draft, Resolver


def build(config: DataStage, resolver: Resolver) -> Draft:
    label = f"data-{config.expert.name}"
    if config.expert.union:
        config, parents = build_joint(config, resolver)
        return config, label, parents
    config = at_locked_revisions(apart_from_data_root(without_left_out(config)))
    if config.expert.world is None and config.expert.items is None:
        check_sources(config.expert)
    languages = [source.language for source in config.expert.sources.values()]
    return config, label, parents_of(config, resolver) | own_languages(filter(None, languages))


def apart_from_data_root(config: DataStage) -> DataStage:
    """Use data_root only for benchmarks, if all rows come from files that sources name (url)."""
    sources = config.expert.sources.values()
    if config.data_root is None or not sources or not all(map(is_here, sources)):
        return config
    data = config.data
    if data.benchmarks is None and any(scored_files(Path(config.data_root)).values()):
        data = replace(data, benchmarks=config.data_root)
    return replace(config, data_root=None, data=data)


def tell_scored(runs: Sequence[Run]) -> None:
    """Store in the data runs of users' rows which tasks `runs` score, and the places of their rows.

    These rows are compared with the training rows.
    """
    scored: dict[str, str] = {}
    for run in runs:
        if not isinstance(run.config, EvalStage):
            continue
        root = run.parents["data_root"].folder if "data_root" in run.parents else None
        for task in run.config.eval.tasks:
            benchmark = find_benchmark(task.task)
            name = task.task
            if benchmark and not benchmark.of_harness:
                name = benchmark.name
            place = scored_rows(task.task) or root
            scored[name] = str(place.absolute()) if place else ""
    for run in runs:
        if isinstance(run.config, DataStage) and run.config.expert.is_own:
            run.config.data.scored = scored


def own_languages(codes: Iterable[str]) -> dict[str, Parent]:
    """Return users' languages as parents, because their fields affect the run hash."""
    parents: dict[str, Parent] = {}
    for code in codes:
        file = languages.custom_language_file(code)
        if file is not None:
            path, digest = file
            parents[f"language {code}"] = External(code, digest, path)
    return parents


def build_joint(config: DataStage, resolver: Resolver) -> tuple[DataStage, dict[str, Parent]]:
    """Return the configuration of a joint set, and the two experts' data runs as parents."""
    experts = config.expert.union
    if sorted(expert.side for expert in experts.values()) != ["language", "math"]:
        sides = [f"{name} {expert.side}" for name, expert in experts.items()]
        raise PipelineError(
            f"expert.union of expert={config.expert.name} has the sides {', '.join(sides)}. Choose"
            " a math and a language expert."
        )
    parents: dict[str, Parent] = {}
    for name, expert in experts.items():
        parents[name] = resolver.run(replace(config, expert=expert, redo=False))
    return replace(config, data=Data(shuffle=config.data.shuffle)), parents


def without_left_out(config: DataStage) -> DataStage:
    """Return the expert without the sources that data.leave_out names.

    A name may belong to another expert.
    """
    sources = dict(config.expert.sources)
    known = {*sources, *conf.options("data")}
    for name in config.data.leave_out or []:
        if name not in known:
            raise PipelineError(
                f"data.leave_out={name} is not a source of expert={config.expert.name}"
                f" ({suggest(name, config.expert.sources)}). Correct the name."
            )
        sources.pop(name, None)
    return with_sources(config, sources)


def with_sources(config: DataStage, sources: dict[str, Source]) -> DataStage:
    return replace(config, expert=replace(config.expert, sources=sources))


def at_locked_revisions(config: DataStage) -> DataStage:
    """Return the sources on the Hub at the revisions of stage=prefetch, which enter the hash."""
    if config.data_root is not None or config.expert.world is not None:
        return config
    lock = read_lock(config.runs_path)
    sources = config.expert.sources.items()
    return with_sources(config, {name: lock.pinned(source) for name, source in sources})


def parents_of(config: DataStage, resolver: Resolver) -> dict[str, Parent]:
    """Return the data_root as a parent: a data run, or a folder identified by the sources' files.

    Without a data_root, the sources on this disk are the parents. Benchmarks that rows are compared
    with are not hashed.
    """
    if config.expert.world is not None:
        return {}
    benchmarks = config.data.benchmarks
    has_folder = benchmarks not in (None, "none")
    if has_folder and not any(scored_files(Path(benchmarks or "")).values()):
        raise PipelineError(
            f"data.benchmarks={benchmarks} has no file like mgsm/sw/test.jsonl. Name a folder with"
            " benchmark files."
        )
    if config.data_root is None:
        return local_sources(config)
    data_root = resolver.data_root(config.data_root)
    if data_root is None:
        folder = Path(config.data_root)
        files = [local_file(source, folder) for source in config.expert.sources.values()]
        data_root = External.of_files(folder, files)
    return {"data_root": data_root}


def local_sources(config: DataStage) -> dict[str, Parent]:
    """Return the sources that are local files or copies of repositories, identified by content."""
    parents: dict[str, Parent] = {}
    for name, source in config.expert.sources.items():
        address = source.url or source.hub
        if not address:
            continue
        place = Path(address)
        if not place.exists():
            if source.url is None or source.is_on_web:
                continue
            raise PipelineError(
                f"expert.sources.{name}.url={source.url} does not exist. Give the path or the"
                " address of a file."
            )
        folder, files = place, [place]
        if folder.is_dir():
            files = list(folder.glob(source.files)) if source.files else []
            files = files or list(folder.rglob("*"))
        else:
            folder = folder.parent
        visible = []
        for path in files:
            parts = path.relative_to(folder).parts
            if path.is_file() and not any(part[0] == "." for part in parts):
                visible.append(path)
        parents[f"source {name}"] = External.of_files(folder, visible, place.name)
    return parents


def locked_benchmarks(config: EvalStage) -> dict[str, Parent]:
    """Return the benchmarks on the Hub that an evaluation reads, as a parent.

    It is identified by their locked revisions. The result is empty if nothing is locked.
    """
    lock = read_lock(config.runs_path)
    if not lock.datasets:
        return {}
    pins = set()
    try:
        for source in benchmark_sources(config):
            entry = lock.entry(source)
            if entry:
                pins.add(f"{source.hub}@{entry['revision']}")
    except PipelineError:  # the Hub has no data for a task; the evaluation reports it
        return {}
    if not pins:
        return {}
    return {"benchmarks": External("benchmarks on the Hub", digest_of(sorted(pins)), Path("hub"))}
