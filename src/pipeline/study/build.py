"""From one stage asked for to a run with its parents, made or not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from pipeline.config.stages import AnalyzeStage, DataStage, EvalStage, MergeStage, RunStage, SelectStage, TrainStage
from pipeline.data import benchmark_files
from pipeline.errors import PipelineError
from pipeline.files import content_hash, sha256
from pipeline.hub.lock import digest, read_lock
from pipeline.languages import language
from pipeline.models.partition import resolved
from pipeline.runs.find import find
from pipeline.runs.lineage import base_of, one_base
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import External, Parent, Run, Snapshot
from pipeline.study.merges import merge_label, merge_parents
from pipeline.train.memory import MOST_BETA2, bytes_per_parameter, micro_batches

Known = dict[str, Parent]  # runs that a RUN may name before they are finished


def build(config: RunStage, known: Known | None = None) -> Run:
    """The run that a stage asks for, with its parents, made or not.

    Raises:
        PipelineError: a RUN that is nothing, or a data file that is not there.
    """
    known = known or {}
    if isinstance(config, DataStage):
        from pipeline.data.draw import check_halves

        check_halves(config)
        config = at_locked_revisions(config)
        return Run(config, f"data-{config.expert.name}", data_parents(config, known))
    if isinstance(config, TrainStage):
        return build_training(config, known)
    if isinstance(config, MergeStage):
        return Run(config, *merge_of(config, known))
    if isinstance(config, AnalyzeStage):
        return build_analysis(config, known)
    if isinstance(config, SelectStage):
        from pipeline.study.select import build_select

        return build_select(config, known)
    assert isinstance(config, EvalStage)
    for code in config.languages:
        if language(code).constructed and config.data_root is None:
            raise PipelineError(f"{code} is a constructed language and not on the hub: set data_root")
    if config.checkpoint is None:
        label, parents = merge_of(config, known)
    else:
        parents = {"checkpoint": parent(config.checkpoint, config, "checkpoint", known)}
        label = label_of(parents["checkpoint"])
    if config.data_root is not None:
        parents["data_root"] = eval_root(config, known)
    else:
        parents |= locked_benchmarks(config)
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is no file: give the SentencePiece model of spBLEU, or leave it out"
            )
        parents["spm_model"] = External(file.name, sha256(file), file)
    return Run(config, f"eval-{config.eval.name}-{label}", parents)


def parent(reference: str, config: RunStage, knob: str, known: Known, revision: str | None = None) -> Parent:
    """What RUN or RUN@STEP means, a run that is known before it is made included."""
    name, at, step = reference.rpartition("@")
    if reference not in known and at and step.isdigit() and isinstance(run := known.get(name), Run):
        return Snapshot(run, int(step))
    if reference in known:
        return known[reference]
    found = find(reference, Path(config.runs_dir), knob, revision)
    manifest = read_manifest(found.folder)
    if manifest and manifest.stage in ("data", "eval", "analyze"):
        raise PipelineError(
            f"{knob}={reference} is a run of stage={manifest.stage}, which holds no model: name another RUN"
        )
    return found


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
    from pipeline.data.mixture import files_read

    parents: dict[str, Parent] = {}
    if config.data.benchmarks is not None:
        folder = Path(config.data.benchmarks)
        files = [path for paths in benchmark_files.scored(folder).values() for path in paths]
        if not files:
            raise PipelineError(
                f"data.benchmarks={folder} holds no file like mgsm/sw/test.jsonl: name a folder with some"
            )
        parents["benchmarks"] = External(folder.name, content_hash(files, folder), folder)
    elif config.data_root is None:
        parents |= locked_benchmarks(config)
    if config.data_root is None:
        return parents
    found = root(config.data_root, config, known)
    if found is None:
        folder = Path(config.data_root)
        files = files_read(config.expert.sources, folder)
        if config.data.benchmarks is None:
            files += [path for paths in benchmark_files.scored(folder).values() for path in paths]
        found = External(folder.name, content_hash(files, folder), folder)
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
    return {"benchmarks": External("benchmarks of the hub", digest(pins), Path("hub"))} if pins else {}


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
    places = [(re.sub("^mgsm_.*", "mgsm", task), language) for task, language in asked]
    files = {path for task, language in places for path in benchmark_files.files(folder, task, language)}
    return External(folder.name, content_hash(sorted(files), folder), folder)


def build_training(config: TrainStage, known: Known) -> Run:
    """What decides a training stands in its config by value: the side that partial trains, a partition's counts."""
    check_method(config)
    parents = train_parents(config, known)
    if config.sft.method == "partial" and config.sft.side is None:
        config = replace(config, sft=replace(config.sft, side=config.expert.side))
    base = parents.get("model")
    told = not isinstance(base, External) or base.folder.is_dir()  # a model of the hub is asked only where it must be
    if config.partition is not None and (config.partition.scale_to_depth or told):
        config = replace(config, partition=resolved(config.partition, depth(config, parents)))  # or refused
    way = {"sft": config.sft.name, "cpt": f"cpt-{config.sft.name}".removesuffix("-full")}[config.stage]
    way += f"-{config.partition.name}" if config.partition else ""
    return Run(config, f"{config.expert.name}-{way}-s{config.seed}", parents)


def check_method(config: TrainStage) -> None:
    """Refuse a way to train that does not fit its expert or its partition."""
    sft, expert = config.sft, config.expert
    two, joint = sft.method in ("mixed", "simultaneous"), expert.side == "both"
    if two and not joint:
        raise PipelineError(
            f"sft={sft.name} trains on two sets, expert={expert.name} is one: give a joint set, such as expert=math_sw"
        )
    if joint and not two:
        raise PipelineError(
            f"sft={sft.name} trains on one set, expert={expert.name} is two: use sft=mixed or sft=simultaneous"
        )
    needs = sft.method in ("partial", "simultaneous")
    if needs and config.partition is None:
        raise PipelineError(f"sft={sft.name} needs a partition: give partition=A, B, C, Z, or own with counts of yours")
    if config.partition is not None and not needs:
        raise PipelineError(
            f"sft={sft.name} reads no partition: leave partition={config.partition.name} out, or use sft=partial"
        )
    if sft.side is not None and sft.method != "partial":
        raise PipelineError(f"sft.side={sft.side} is read by sft=partial alone: leave it out with sft={sft.name}")
    if sft.method == "partial" and sft.side is None and expert.side == "none":
        raise PipelineError(f"expert={expert.name} is of no side: say which one sft={sft.name} trains, sft.side=math")
    if sft.method == "simultaneous" and sft.steps is not None and sft.steps <= sft.steps_per_switch:
        raise PipelineError(
            f"sft.steps={sft.steps} with sft.steps_per_switch={sft.steps_per_switch} ends before the language side's "
            f"first turn: give sft.steps={2 * sft.steps_per_switch} or more, or fewer steps per switch"
        )
    bytes_per_parameter(sft)
    if sft.optimizer == "adamw_bf16" and sft.adam_beta2 > MOST_BETA2:
        raise PipelineError(
            f"sft.adam_beta2={sft.adam_beta2}: the bfloat16 moments of sft.optimizer=adamw_bf16 stand still above "
            f"{MOST_BETA2}; use sft.optimizer=adamw_8bit, or lower it"
        )
    micro_batches(sft)
    if sft.adapter == "lora" and config.partition is not None and config.partition.outside != "frozen":
        raise PipelineError(
            f"partition.outside={config.partition.outside}: adapters sit on attention and MLP alone; leave it frozen"
        )
    if sft.adapter == "lora" and sft.optimizer == "muon_adamw":
        raise PipelineError("sft.optimizer=muon_adamw makes bases from nothing: use sft.optimizer=adamw with adapters")


def depth(config: TrainStage, parents: dict[str, Parent]) -> int:
    """The number of layers of the base, made or not. PipelineError where nothing on this machine tells it."""
    if config.model.init == "random":
        return int(config.model.architecture["num_hidden_layers"])
    base = parents["model"]
    if isinstance(base, Run) and isinstance(base.config, TrainStage):
        return depth(base.config, base.parents)
    if isinstance(base, Run):  # a merge has the depth of what it merges
        return next(depth(config, {"model": one}) for role, one in base.parents.items() if role != "data_root")
    path = base.folder / "config.json"
    if not base.folder.is_dir():
        path = Path(hub_file(str(base.folder), config.model.revision))
    elif not path.is_file():  # an expert that is adapters: its base is in its manifest
        manifest = read_manifest(base.folder)
        if manifest is None or "model" not in manifest.parents:
            raise PipelineError(f"model.path={base.folder} has no config.json: name a folder with a model")
        return depth(config, {"model": base_of(base, config)})
    return int(json.loads(path.read_bytes())["num_hidden_layers"])


def hub_file(name: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(name, "config.json", revision=revision)
    except Exception as error:
        raise PipelineError(
            f"partition.scale_to_depth=true needs the depth of {name}, which could not be read from the hub: "
            "give the counts themselves"
        ) from error


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


def with_tokenizer(folder: Path) -> External:
    """A plain data_root of which only tokenizer/ is read."""
    files = list((folder / "tokenizer").glob("*.json"))
    if not files:
        raise PipelineError(
            f"model.tokenizer=data_root: data_root={folder} has no tokenizer/tokenizer.json; put it there"
        )
    return External(folder.name, content_hash(files, folder), folder)


def merge_of(config: MergeStage | EvalStage, known: Known) -> tuple[str, dict[str, Parent]]:
    """Label and parents of the merge that a stage writes, or scores in memory."""
    assert config.merge is not None
    parents = merge_parents(config.merge, config, lambda reference, key: parent(reference, config, key, known))
    names = [label_of(expert) for role, expert in parents.items() if role != "base"]
    return merge_label(config.merge, config.partition, names), parents


def build_analysis(config: AnalyzeStage, known: Known) -> Run:
    """The experts, by number, and the base that all of them have."""
    listed = config.checkpoint if isinstance(config.checkpoint, list) else [config.checkpoint]
    if not listed or not all(isinstance(one, str) for one in listed):
        raise PipelineError(f"checkpoint={config.checkpoint} is no RUN: give checkpoint=RUN, or checkpoint=[RUN,RUN]")
    parents = {str(index): parent(one, config, "checkpoint", known) for index, one in enumerate(listed)}
    label = "analyze-" + "-".join(label_of(one) for one in parents.values())
    if config.base is not None:
        return Run(config, label, {**parents, "base": parent(config.base, config, "base", known)})
    bases = [(expert.name, base_of(expert, config, "checkpoint")) for expert in parents.values()]
    return Run(config, label, {**parents, "base": one_base(bases, "checkpoint: the experts")})


def label_of(of: Parent) -> str:
    return of.label if isinstance(of, Run) else re.sub(r"-[0-9a-f]{8}([0-9a-f]{4})?$", "", of.name)
