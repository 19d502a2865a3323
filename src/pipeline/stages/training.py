"""The builder of trainings: its configuration holds resolved values, and its data set is a run of
its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.data import Expert
from pipeline.config.stages import DataStage, TrainStage
from pipeline.config.training import default_rate
from pipeline.errors import PipelineError
from pipeline.hub.models import hub_errors
from pipeline.models.files import IDENTIFYING_SUFFIXES
from pipeline.models.load import date_of_templates
from pipeline.models.partition import resolve_partition
from pipeline.models.shape import common_settings
from pipeline.runs.lineage import base_of, gives_adapter
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import External, Parent, Run
from pipeline.stages.lengths import is_here
from pipeline.stages.resolver import Draft, Resolver
from pipeline.train.memory import micro_batches


def build(config: TrainStage, resolver: Resolver) -> Draft:
    """Config, label and parents; resolves the knobs whose default depends on others, and the counts
    of a partition.
    """
    check_method(config)
    parents = parents_of(config, resolver)
    config = config.settled()
    base = parents.get("model")
    config_is_local = (
        not isinstance(base, External) or base.folder.is_dir()
    )  # the Hub is asked only where necessary
    if config.partition is not None and (config.partition.scale_to_depth or config_is_local):
        partition = resolve_partition(
            config.partition, layer_count(config, parents)
        )  # raises for too few layers
        config = replace(config, partition=partition)
    if config_is_local:
        check_length(config, parents)
    method = {"sft": config.sft.name, "cpt": f"cpt-{config.sft.name}".removesuffix("-full")}[
        config.stage
    ]
    if config.partition:
        method += f"-{config.partition.name}"
    return config, f"{config.expert.name}-{method}-s{config.seed}", parents


def about_default_rate(config: TrainStage) -> str:
    """Return a warning about the default learning rate of a training on the user's files; otherwise
    "".
    """
    rate, sources = default_rate(config.sft.adapter), config.expert.sources.values()
    if config.sft.learning_rate != rate or not sources or not all(map(is_here, sources)):
        return ""
    return (
        f"sft.learning_rate={rate:g} is the default, for models of billions of weights: small ones"
        " learn little by it, give sft.learning_rate or a recipe"
    )


def check_method(config: TrainStage) -> None:
    """Raise PipelineError for a training method that does not fit its expert or its partition."""
    sft, expert = config.sft, config.expert
    two, joint = sft.method in ("mixed", "simultaneous"), expert.side == "both"
    if two and not joint:
        raise PipelineError(
            f"sft={sft.name} trains on two sets, expert={expert.name} is one: give a joint set,"
            " such as expert=math_sw"
        )
    if joint and not two:
        raise PipelineError(
            f"sft={sft.name} trains on one set, expert={expert.name} is two: use sft=mixed or"
            " sft=simultaneous"
        )
    needs_partition = sft.method in ("partial", "simultaneous")
    if needs_partition and config.partition is None:
        raise PipelineError(
            f"sft={sft.name} needs a partition: give partition=A, B, C, Z, or own with counts of"
            " yours"
        )
    if config.partition is not None and not needs_partition:
        raise PipelineError(
            f"sft={sft.name} reads no partition: leave partition={config.partition.name} out, or"
            " use sft=partial"
        )
    if sft.side is not None and sft.method != "partial":
        raise PipelineError(
            f"sft.side={sft.side} is read by sft=partial alone: leave it out with sft={sft.name}"
        )
    if sft.method == "partial" and sft.side is None and expert.side == "none":
        raise PipelineError(
            f"expert={expert.name} has no side: set the one that sft={sft.name} trains,"
            " sft.side=math"
        )
    if sft.method == "simultaneous" and sft.steps is not None and sft.steps <= sft.steps_per_switch:
        raise PipelineError(
            f"sft.steps={sft.steps} with sft.steps_per_switch={sft.steps_per_switch} ends before"
            f" the language side's first turn: give sft.steps={2 * sft.steps_per_switch} or more,"
            " or fewer steps per switch"
        )
    if sft.validate_at_start and not config.data.validation:
        raise PipelineError(
            "sft.validate_at_start=true needs validation rows: give data.validation=N, or leave"
            " it out"
        )
    if sft.padding_free and sft.packing:
        raise PipelineError(
            "sft.padding_free=true: packed rows have no padding; leave it out, or give"
            " sft.packing=false"
        )
    if sft.loss_on == "assistant_turns" and sft.template != "chat":
        raise PipelineError(
            "sft.loss_on=assistant_turns needs turns: give sft.template=chat, or"
            " sft.loss_on=response"
        )
    if sft.template == "chat":
        date_of_templates(sft.template_date, "sft.template_date")
    micro_batches(sft)
    if (
        sft.adapter == "lora"
        and config.partition is not None
        and config.partition.outside != "frozen"
    ):
        raise PipelineError(
            f"partition.outside={config.partition.outside}: adapters sit on attention and MLP"
            " alone; leave it frozen"
        )


def check_length(config: TrainStage, parents: dict[str, Parent]) -> None:
    """Raise PipelineError for rows longer than the base's positions."""
    longest = common_settings(read_architecture(config, parents)).get("max_position_embeddings")
    if longest is not None and config.sft.seq_length > int(longest):
        raise PipelineError(
            f"sft.seq_length={config.sft.seq_length} is above the {longest} positions of"
            f" model={config.model.name}: give sft.seq_length={longest} or less"
        )


def layer_count(config: TrainStage, parents: dict[str, Parent]) -> int:
    """Return the number of layers of a trained or planned base.

    Raises PipelineError if it is unknown on this machine.
    """
    settings = common_settings(read_architecture(config, parents))
    if "num_hidden_layers" not in settings:
        raise PipelineError(
            f"model={config.model.name}: its config has no num_hidden_layers, and transformers has"
            f" no model_type={settings.get('model_type')}: give a model of transformers"
        )
    return int(settings["num_hidden_layers"])


def read_architecture(config: TrainStage, parents: dict[str, Parent]) -> dict[str, Any]:
    """Return the config.json of a trained or planned base.

    Raises PipelineError if it is unknown on this machine.
    """
    if config.model.init == "random":
        return config.model.architecture
    base = parents["model"]
    if isinstance(base, Run) and isinstance(base.config, TrainStage):
        return read_architecture(base.config, base.parents)
    if isinstance(base, Run):  # a merge has the shape of its sources
        merged = (parent for role, parent in base.parents.items() if role != "data_root")
        return next(read_architecture(config, {"model": parent}) for parent in merged)
    path = base.folder / "config.json"
    if not base.folder.is_dir():
        path = Path(hub_file(str(base.folder), config.model.revision))
    elif not path.is_file():  # an expert that is adapters: its base is in its manifest
        manifest = read_manifest(base.folder)
        if manifest is None or "model" not in manifest.parents:
            raise PipelineError(
                f"model.path={base.folder} has no config.json: name a folder with a model"
            )
        return read_architecture(config, {"model": base_of(base, Path(config.runs_dir))})
    fields: dict[str, Any] = json.loads(path.read_bytes())
    return fields


def hub_file(name: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(name, "config.json", revision=revision)
    except hub_errors() as error:
        raise PipelineError(
            f"partition.scale_to_depth=true needs the depth of {name}, which could not be read from"
            " the Hub: give the counts themselves"
        ) from error


def parents_of(config: TrainStage, resolver: Resolver) -> dict[str, Parent]:
    if config.stage == "cpt":
        expert = plain_text(config.expert)
    else:
        expert = config.expert
    data = DataStage(
        stage="data",
        runs_dir=config.runs_dir,
        tracking=config.tracking,
        seed=config.seed,
        group=config.group,
        expert=expert,
        data=config.data,
        data_root=config.data_root,
    )
    parents: dict[str, Parent] = {"data": resolver.run(data)}
    if config.model.init == "pretrained":
        if config.model.path is None:
            raise PipelineError(
                f"model={config.model.name} has no path: give model.path=RUN, or model.init=random"
            )
        parents["model"] = resolver.model(config.model.path, "model.path", config.model.revision)
        if gives_adapter(parents["model"]):
            raise PipelineError(
                f"model.path={config.model.path} is an adapter: write it as a model first,"
                " stage=merge merge=task_arithmetic merge.form=dense merge.experts=[RUN]"
            )
    if config.model.tokenizer == "data_root":
        if config.data_root is None:
            raise PipelineError(
                "model.tokenizer=data_root needs data_root: give data_root=RUN of stage=data"
                " expert=sandbox"
            )
        parents["data_root"] = resolver.data_root(config.data_root) or with_tokenizer(
            Path(config.data_root)
        )
    return parents


def plain_text(expert: Expert) -> Expert:
    """Return the expert with the sets that stage=cpt reads: its plain text, or a joint set if both
    members have text.
    """
    if expert.union and all(member.text for member in expert.union.values()):
        union = {name: plain_text(member) for name, member in expert.union.items()}
        return replace(expert, name=f"{expert.name}_text", union=union)
    if not expert.text:
        return expert
    return replace(expert, name=f"{expert.name}_text", sources=expert.text, text={}, size=None)


def with_tokenizer(folder: Path) -> External:
    """Return a plain data_root as a parent, of which only tokenizer/ is read."""
    files = []
    for path in (folder / "tokenizer").glob("*"):
        if path.suffix in IDENTIFYING_SUFFIXES:
            files.append(path)
    if not any(path.suffix == ".json" for path in files):
        raise PipelineError(
            f"model.tokenizer=data_root: data_root={folder} has no tokenizer/tokenizer.json; put it"
            " there"
        )
    return External.of_files(folder, files)
