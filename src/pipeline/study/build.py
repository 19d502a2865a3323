"""From one stage asked for to a run with its parents, made or not."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config import AnalyzeStage, DataStage, EvalStage, MergeStage, RunStage, TrainStage
from pipeline.knobs import PipelineError
from pipeline.runs import Found, Parent, Run, content_hash, find, read_manifest
from pipeline.study.merges import base_of, merge_label, merge_parents

Known = dict[str, Parent]  # runs that a RUN may name before they are finished


def build(config: RunStage, known: Known | None = None) -> Run:
    """The run that a stage asks for, with its parents, made or not.

    Raises:
        PipelineError: a RUN that is nothing, or a data file that is not there.
    """
    known = known or {}
    if isinstance(config, DataStage):
        return Run(config, f"data-{config.expert.name}", data_parents(config, known))
    if isinstance(config, TrainStage):
        way = "cpt" if config.stage == "cpt" else config.sft.name
        return Run(config, f"{config.expert.name}-{way}-s{config.seed}", train_parents(config, known))
    if isinstance(config, MergeStage):
        return Run(config, *merge_of(config, known))
    if isinstance(config, AnalyzeStage):
        return build_analysis(config, known)
    assert isinstance(config, EvalStage)
    if config.checkpoint is None:
        label, parents = merge_of(config, known)
    else:
        parents = {"checkpoint": parent(config.checkpoint, config, "checkpoint", known)}
        label = label_of(parents["checkpoint"])
    if config.data_root is not None:
        parents["data_root"] = eval_root(config, known)
    return Run(config, f"eval-{config.eval.name}-{label}", parents)


def parent(reference: str, config: RunStage, knob: str, known: Known) -> Parent:
    return known[reference] if reference in known else find(reference, Path(config.runs_dir), knob)


def data_parents(config: DataStage, known: Known) -> dict[str, Parent]:
    """A finished data run or a folder; of a folder, the files that are read make its identity."""
    if config.data_root is None or config.expert.world is not None:
        return {}
    found = root(config.data_root, config, known)
    if found is not None:
        return {"data_root": found}
    from pipeline.data.mixture import files_read

    folder = Path(config.data_root)
    return {"data_root": Found(folder.name, content_hash(files_read(config.expert.sources, folder), folder), folder)}


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
    data = DataStage(
        stage="data", runs_dir=config.runs_dir, tracking=config.tracking, seed=config.seed, group=config.group,
        expert=config.expert, data=config.data, data_root=config.data_root,
    )  # fmt: skip
    parents: dict[str, Parent] = {"data": build(data, known)}
    if config.model.init == "pretrained":
        if config.model.path is None:
            raise PipelineError(f"model={config.model.name} has no path: give model.path=RUN, or model.init=random")
        parents["model"] = parent(config.model.path, config, "model.path", known)
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
    bases = {role: base_of(expert, config, "checkpoint") for role, expert in parents.items()}
    if len({base.hash for base in bases.values()}) > 1:
        told = ", ".join(f"{parents[role].name} from {base.name}" for role, base in bases.items())
        raise PipelineError(f"checkpoint: the experts have different bases ({told}): analyze experts of one base")
    return Run(config, label, {**parents, "base": next(iter(bases.values()))})


def label_of(of: Parent) -> str:
    return of.label if isinstance(of, Run) else re.sub(r"-[0-9a-f]{8}$", "", of.name)
