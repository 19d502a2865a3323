"""From one stage asked for to a run with its parents, made or not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pipeline.config import DataStage, EvalStage, LayerSwap, MergeStage, RunStage, Soup, Ties, TrainStage
from pipeline.knobs import PipelineError
from pipeline.lock import digest, read_lock
from pipeline.runs import Found, Parent, Run, content_hash, find, from_folder, read_manifest

Known = dict[str, Parent]  # runs that a RUN may name before they are finished


def build(config: RunStage, known: Known | None = None) -> Run:
    """The run that a stage asks for, with its parents, made or not.

    Raises:
        PipelineError: a RUN that is nothing, or a data file that is not there.
    """
    known = known or {}
    if isinstance(config, DataStage):
        config = at_locked_revisions(config)
        return Run(config, f"data-{config.expert.name}", data_parents(config, known))
    if isinstance(config, TrainStage):
        way = "cpt" if config.stage == "cpt" else config.sft.name
        return Run(config, f"{config.expert.name}-{way}-s{config.seed}", train_parents(config, known))
    if isinstance(config, MergeStage):
        return build_merge(config, known)
    assert isinstance(config, EvalStage)
    parents = {"checkpoint": parent(config.checkpoint, config, "checkpoint", known)}
    if config.data_root is not None:
        parents["data_root"] = eval_root(config, known)
    else:
        parents |= locked_benchmarks(config)
    return Run(config, f"eval-{config.eval.name}-{label_of(parents['checkpoint'])}", parents)


def parent(reference: str, config: RunStage, knob: str, known: Known, revision: str | None = None) -> Parent:
    return known[reference] if reference in known else find(reference, Path(config.runs_dir), knob, revision)


def at_locked_revisions(config: DataStage) -> DataStage:
    """The sources of the hub at the revisions that stage=prefetch locked, so that these enter the hash."""
    if config.data_root is not None or config.expert.world is not None:
        return config
    lock = read_lock(Path(config.runs_dir))
    sources = {name: lock.pinned(source) for name, source in config.expert.sources.items()}
    return replace(config, expert=replace(config.expert, sources=sources))


def data_parents(config: DataStage, known: Known) -> dict[str, Parent]:
    """A finished data run or a folder; of a folder, the files that are read make its identity.

    `benchmarks`, what rows are compared with, is a parent of its own where a folder is named or the hub's are locked.
    """
    if config.expert.world is not None:
        return {}
    from pipeline.data import benchmarks
    from pipeline.data.mixture import files_read

    parents: dict[str, Parent] = {}
    if config.data.benchmarks is not None:
        folder = Path(config.data.benchmarks)
        files = [path for paths in benchmarks.files(folder).values() for path in paths]
        if not files:
            raise PipelineError(
                f"data.benchmarks={folder} holds no file like mgsm/sw/test.jsonl: name a folder with some"
            )
        parents["benchmarks"] = Found(folder.name, content_hash(files, folder), folder)
    elif config.data_root is None:
        parents |= locked_benchmarks(config)
    if config.data_root is None:
        return parents
    found = root(config.data_root, config, known)
    if found is None:
        folder = Path(config.data_root)
        files = files_read(config.expert.sources, folder)
        if config.data.benchmarks is None:
            files += [path for paths in benchmarks.files(folder).values() for path in paths]
        found = Found(folder.name, content_hash(files, folder), folder)
    return {"data_root": found, **parents}


def locked_benchmarks(config: DataStage | EvalStage) -> dict[str, Parent]:
    """The benchmark sets of the hub that a run reads, as a parent known by its locked revisions; none until then."""
    lock = read_lock(Path(config.runs_dir))
    if not lock.datasets:
        return {}
    from pipeline.study.prefetch import benchmark_sources

    try:
        entries = [(source.hub, lock.entry(source)) for source in benchmark_sources(config)]
    except PipelineError:  # a task that the hub has no data for: the evaluation itself refuses it
        return {}
    pins = sorted({f"{hub}@{entry['revision']}" for hub, entry in entries if entry})
    return {"benchmarks": Found("benchmarks of the hub", digest(pins), Path("hub"))} if pins else {}


def root(reference: str, config: RunStage, known: Known) -> Parent | None:
    """The data run that data_root names; None where it is a plain folder."""
    if reference in known:
        return known[reference]
    folder = Path(reference)
    if folder.is_dir() and read_manifest(folder) is None:
        return None
    if ("/" in reference or reference.startswith(".")) and not folder.is_dir():
        raise PipelineError(
            f"data_root={reference} is not a folder: name one laid out like mgsm/sw/test.jsonl, or a data run"
        )
    return find(reference, Path(config.runs_dir), "data_root")


def eval_root(config: EvalStage, known: Known) -> Parent:
    assert config.data_root is not None
    found = root(config.data_root, config, known)
    if found is not None:
        return found
    folder = Path(config.data_root)
    asked = [(task.task, language) for task in config.eval.tasks for language in {*config.languages, "en"}]
    files = {path for task, language in asked for path in folder.glob(f"{task}/{language}/*.jsonl")}
    return Found(folder.name, content_hash(sorted(files), folder), folder)


def train_parents(config: TrainStage, known: Known) -> dict[str, Parent]:
    expert = config.expert
    if config.stage == "cpt" and expert.text:  # the same words, stage=cpt expert=bn, read the set of plain text
        expert = replace(expert, name=f"{expert.name}_text", sources=expert.text, text={}, size=None)
    data = DataStage(
        stage="data", runs_dir=config.runs_dir, tracking=config.tracking, seed=config.seed, group=config.group,
        expert=expert, data=config.data, data_root=config.data_root,
    )  # fmt: skip
    parents: dict[str, Parent] = {"data": build(data, known)}
    if config.model.init == "pretrained":
        if config.model.path is None:
            raise PipelineError(f"model={config.model.name} has no path: give model.path=RUN, or model.init=random")
        parents["model"] = parent(config.model.path, config, "model.path", known, config.model.revision)
    if config.model.tokenizer == "data_root":
        if config.data_root is None:
            raise PipelineError(
                "model.tokenizer=data_root needs data_root: give data_root=RUN of stage=data expert=sandbox"
            )
        parents["data_root"] = root(config.data_root, config, known) or with_tokenizer(Path(config.data_root))
    return parents


def with_tokenizer(folder: Path) -> Found:
    """A plain data_root of which only tokenizer/ is read."""
    files = list((folder / "tokenizer").glob("*.json"))
    if not files:
        raise PipelineError(
            f"model.tokenizer=data_root: data_root={folder} has no tokenizer/tokenizer.json; put it there"
        )
    return Found(folder.name, content_hash(files, folder), folder)


def build_merge(config: MergeStage, known: Known) -> Run:
    merge = config.merge
    if isinstance(merge, LayerSwap):
        named = {"math": merge.math, "language": merge.language}
        sizes = f"-{merge.bottom_layers}-{merge.top_layers}"
    elif isinstance(merge, Soup | Ties):
        if len(merge.experts) < 2:
            raise PipelineError(f"merge.experts={merge.experts}: name two runs or more")
        named, sizes = {str(index): expert for index, expert in enumerate(merge.experts)}, ""
    else:
        raise PipelineError(f"merge.method={merge.method} is not known")
    knobs = {role: f"merge.{role}" if isinstance(merge, LayerSwap) else "merge.experts" for role in named}
    parents = {role: parent(reference, config, knobs[role], known) for role, reference in named.items()}
    label = f"{merge.method}{sizes}-" + "-".join(label_of(expert) for expert in parents.values())
    if isinstance(merge, Ties):
        bases = {role: base_of(expert, config) for role, expert in parents.items()}
        if len({base.hash for base in bases.values()}) > 1:
            told = ", ".join(f"{parents[role].name} from {base.name}" for role, base in bases.items())
            raise PipelineError(f"merge.experts have different bases ({told}): merge experts of one base")
        parents["base"] = next(iter(bases.values()))
    return Run(config, label, parents)


def base_of(expert: Parent, config: RunStage) -> Parent:
    """The base that an expert was trained from, by its plan or its manifest."""
    if isinstance(expert, Run) and "model" in expert.parents:
        return expert.parents["model"]
    manifest = read_manifest(expert.folder) if expert.folder.is_dir() else None
    recorded = (manifest or {"parents": {}})["parents"].get("model")
    if manifest is None or recorded is None:
        raise PipelineError(
            f"merge.experts: {expert.name} does not say which base it was trained from; name an sft run"
        )
    ours = sorted(Path(config.runs_dir).glob(f"*-{recorded['hash'][:8]}"))
    if ours:
        return from_folder(ours[0], "merge.experts")
    base = manifest["config"]["model"]
    return find(base["path"], Path(config.runs_dir), "merge.experts", base["revision"])


def label_of(of: Parent) -> str:
    return of.label if isinstance(of, Run) else re.sub(r"-[0-9a-f]{8}$", "", of.name)
