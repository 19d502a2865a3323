"""From one stage asked for to a run with its parents, made or not."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config import DataStage, EvalStage, LayerSwap, MergeStage, RunStage, Soup, Ties, TrainStage
from pipeline.knobs import PipelineError
from pipeline.runs import Found, Parent, Run, content_hash, find, from_folder, read_manifest, sha256

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
        return build_merge(config, known)
    assert isinstance(config, EvalStage)
    parents = {"checkpoint": parent(config.checkpoint, config, "checkpoint", known)}
    if config.data_root is not None:
        parents["data_root"] = eval_root(config, known)
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is no file: give the SentencePiece model of spBLEU, or leave it out"
            )
        parents["spm_model"] = Found(file.name, sha256(file), file)
    return Run(config, f"eval-{config.eval.name}-{label_of(parents['checkpoint'])}", parents)


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
    places = [(re.sub("^mgsm_.*", "mgsm", task), language) for task, language in asked]
    files = {path for task, language in places for path in folder.glob(f"{task}/{language}/*.jsonl")}
    if any(task == "flores" for task, _ in asked):
        files |= {
            path for kind in ("*/*.txt", "dev/*.dev", "devtest/*.devtest") for path in folder.glob(f"flores/{kind}")
        }
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
    return find(manifest["config"]["model"]["path"], Path(config.runs_dir), "merge.experts")


def label_of(of: Parent) -> str:
    return of.label if isinstance(of, Run) else re.sub(r"-[0-9a-f]{8}$", "", of.name)
