"""The builder of trainings: resolved settings, and the data set as a separate run."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """Return the draft of a training.

    Resolves the settings whose defaults depend on others, and the counts of a partition.
    """
    _check_expert(config)
    _check_partition(config)
    _check_rows(config)
    micro_batches(config.sft)
    parents = parents_of(config, resolver)
    config = config.settled()
    base = parents.get("model")
    # the Hub is only asked for a configuration that is needed
    config_is_local = not isinstance(base, External) or base.folder.is_dir()
    partition = config.partition
    if config_is_local or (partition and partition.scale_to_depth):
        settings = common_settings(read_architecture(config, base))
        check_length(config, settings)
        if partition:
            layers = layer_count(config, settings)
            config = replace(config, partition=resolve_partition(partition, layers))
    method = config.sft.name
    if config.stage == "cpt":
        method = f"cpt-{method}".removesuffix("-full")
    if config.partition:
        method += f"-{config.partition.name}"
    return config, f"{config.expert.name}-{method}-s{config.seed}", parents


def about_default_rate(config: TrainStage) -> str:
    """Return a warning if a training on a user's files has the default learning rate."""
    rate = default_rate(config.sft.adapter)
    sources = config.expert.sources.values()
    if config.sft.learning_rate != rate or not sources or not all(map(is_here, sources)):
        return ""
    return (
        f"sft.learning_rate={rate:g} is the default, for models of billions of weights. Small"
        " models learn little with it: set sft.learning_rate or a recipe."
    )


def _check_expert(config: TrainStage) -> None:
    sft, expert = config.sft, config.expert
    takes_two, is_joint = sft.method in ("mixed", "simultaneous"), expert.side == "both"
    if takes_two and not is_joint:
        raise PipelineError(
            f"sft={sft.name} trains on two sets, but expert={expert.name} has one. Choose a joint"
            " set, such as expert=math_sw."
        )
    if is_joint and not takes_two:
        raise PipelineError(
            f"sft={sft.name} trains on one set, but expert={expert.name} has two. Set sft=mixed or"
            " sft=simultaneous."
        )
    if sft.side is not None and sft.method != "partial":
        raise PipelineError(
            f"sft.side={sft.side} is only read by sft=partial. Leave it out with sft={sft.name}."
        )
    if sft.method == "partial" and sft.side is None and expert.side == "none":
        raise PipelineError(
            f"expert={expert.name} has no side. Set the side that sft={sft.name} trains, such as"
            " sft.side=math."
        )
    if sft.method == "simultaneous" and sft.steps is not None and sft.steps <= sft.steps_per_switch:
        raise PipelineError(
            f"sft.steps={sft.steps} with sft.steps_per_switch={sft.steps_per_switch} ends before"
            f" the language side's first turn. Set sft.steps={2 * sft.steps_per_switch} or more, or"
            " lower sft.steps_per_switch."
        )


def _check_partition(config: TrainStage) -> None:
    sft, partition = config.sft, config.partition
    is_needed = sft.method in ("partial", "simultaneous")
    if partition is None:
        if is_needed:
            raise PipelineError(
                f"sft={sft.name} needs a partition. Set partition=A, B, C, Z, or own with your own"
                " counts."
            )
        return
    if not is_needed:
        raise PipelineError(
            f"sft={sft.name} does not use a partition. Leave partition={partition.name} out, or set"
            " sft=partial."
        )
    if sft.adapter == "lora" and partition.outside != "frozen":
        raise PipelineError(
            f"partition.outside={partition.outside}: adapters are only in attention and MLP. Set"
            " partition.outside=frozen."
        )


def _check_rows(config: TrainStage) -> None:
    sft = config.sft
    if sft.validate_at_start and not config.data.validation:
        raise PipelineError(
            "sft.validate_at_start=true needs validation rows. Set data.validation=N, or leave it"
            " out."
        )
    if sft.loss_on == "assistant_turns" and sft.template != "chat":
        raise PipelineError(
            "sft.loss_on=assistant_turns needs turns. Set sft.template=chat, or"
            " sft.loss_on=response."
        )
    if sft.template == "chat":
        date_of_templates(sft.template_date, "sft.template_date")


def check_length(config: TrainStage, settings: Mapping[str, Any]) -> None:
    """Raise PipelineError if rows are longer than the base's positions."""
    longest = settings.get("max_position_embeddings")
    if longest is not None and config.sft.seq_length > int(longest):
        raise PipelineError(
            f"sft.seq_length={config.sft.seq_length} is above the {longest} positions of"
            f" model={config.model.name}. Set sft.seq_length={longest} or less."
        )


def layer_count(config: TrainStage, settings: Mapping[str, Any]) -> int:
    """Return the number of layers of a base with these settings.

    Raises:
        PipelineError: The number is unknown.
    """
    if "num_hidden_layers" not in settings:
        raise PipelineError(
            f"model={config.model.name}: its config has no num_hidden_layers, and transformers has"
            f" no model_type={settings.get('model_type')}. Choose a model of transformers."
        )
    return int(settings["num_hidden_layers"])


def read_architecture(config: TrainStage, base: Parent | None) -> dict[str, Any]:
    """Return the config.json of a trained or planned base; None: of random weights.

    Raises:
        PipelineError: It is unknown on this machine.
    """
    if base is None:
        return config.model.architecture
    if isinstance(base, Run) and isinstance(base.config, TrainStage):
        return read_architecture(base.config, base.parents.get("model"))
    if isinstance(base, Run):  # a merge has the shape of its sources
        sources = dict(base.parents)
        sources.pop("data_root", None)
        return read_architecture(config, next(iter(sources.values())))
    path = base.folder / "config.json"
    if not base.folder.is_dir():
        path = Path(hub_file(str(base.folder), config.model.revision))
    elif not path.is_file():  # the manifest of an adapter names its base
        manifest = read_manifest(base.folder)
        if manifest is None or "model" not in manifest.parents:
            raise PipelineError(
                f"model.path={base.folder} has no config.json. Name a folder with a model."
            )
        return read_architecture(config, base_of(base, config.runs_path))
    fields: dict[str, Any] = json.loads(path.read_bytes())
    return fields


def hub_file(name: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(name, "config.json", revision=revision)
    except hub_errors() as error:
        raise PipelineError(
            f"partition.scale_to_depth=true needs the depth of {name}, which could not be read from"
            " the Hub. Set the partition's counts instead."
        ) from error


def parents_of(config: TrainStage, resolver: Resolver) -> dict[str, Parent]:
    data = DataStage(
        stage="data",
        runs_dir=config.runs_dir,
        tracking=config.tracking,
        seed=config.seed,
        group=config.group,
        expert=plain_text(config.expert) if config.stage == "cpt" else config.expert,
        data=config.data,
        data_root=config.data_root,
    )
    parents: dict[str, Parent] = {"data": resolver.run(data)}
    if config.model.init == "pretrained":
        parents["model"] = _base(config, resolver)
    if config.model.tokenizer == "data_root":
        root = config.data_root
        if root is None:
            raise PipelineError(
                "model.tokenizer=data_root needs data_root. Set data_root=RUN of stage=data"
                " expert=sandbox."
            )
        parents["data_root"] = resolver.data_root(root) or with_tokenizer(Path(root))
    return parents


def _base(config: TrainStage, resolver: Resolver) -> Parent:
    path = config.model.path
    if path is None:
        raise PipelineError(
            f"model={config.model.name} has no path. Set model.path=RUN, or model.init=random."
        )
    base = resolver.model(path, "model.path", config.model.revision)
    if gives_adapter(base):
        raise PipelineError(
            f"model.path={path} is an adapter. Write it as a model first: stage=merge"
            " merge=task_arithmetic merge.form=dense merge.experts=[RUN]."
        )
    return base


def plain_text(expert: Expert) -> Expert:
    """Return the expert with the sets that stage=cpt reads: its plain text.

    A joint set needs plain text of both members.
    """
    if expert.union and all(member.text for member in expert.union.values()):
        union = {name: plain_text(member) for name, member in expert.union.items()}
        return replace(expert, name=f"{expert.name}_text", union=union)
    if not expert.text:
        return expert
    return replace(expert, name=f"{expert.name}_text", sources=expert.text, text={}, size=None)


def with_tokenizer(folder: Path) -> External:
    """Return a plain data_root as a parent, if only its tokenizer/ is read."""
    paths = (folder / "tokenizer").glob("*")
    files = [path for path in paths if path.suffix in IDENTIFYING_SUFFIXES]
    if not any(path.suffix == ".json" for path in files):
        raise PipelineError(
            f"model.tokenizer=data_root: data_root={folder} has no tokenizer/tokenizer.json. Put it"
            " there."
        )
    return External.of_files(folder, files)
