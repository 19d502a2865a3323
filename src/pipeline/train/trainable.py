"""Which parameters a training method trains: freezing, and LoRA adapters, by the sides of a partition."""

from __future__ import annotations

import re
from typing import Any

from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import anatomy, plain_name, towers
from pipeline.models.partition import sides_of_all

ALL = "all"  # the only part of a method without sides
Parts = dict[str, list[str]]  # part -> names of the parameters trained in its steps


def choose_parameters(model: Any, sft: Sft, partition: Partition | None) -> tuple[Any, Parts]:
    """The model, with adapters if requested and all else frozen, and the names of the trained parameters by part.

    full and mixed have one part, `all`; partial has its side; simultaneous has math and language, in the order of
    their turns. LoRA is rank-stabilised (Kalajdzievski 2023: scaled by alpha / sqrt(rank)).

    Raises:
        PipelineError: a partition that does not split this model, a LoRA target that matches no module, or nothing
        to train.
    """
    names = [name for name, _ in model.named_parameters()]
    side_of: dict[str, Any] = dict(sides_of_all(partition, anatomy(names))) if partition else dict.fromkeys(names, ALL)
    side_of |= dict.fromkeys(towers(names), "frozen")
    trained_parts = {"partial": (sft.side,), "simultaneous": ("math", "language")}.get(sft.method, (ALL,))
    if sft.adapter == "lora":
        model = add_adapters(model, sft, {name for name in names if side_of[name] in trained_parts})
    parameters = dict(model.named_parameters())
    moves = [name for name in parameters if sft.adapter == "none" or ".lora_" in name]
    parts = {str(part): [name for name in moves if side_of[plain_name(name)] == part] for part in trained_parts}
    trained = {name for part in parts.values() for name in part}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    for part, members in parts.items():
        if not members:
            raise PipelineError(
                f"sft={sft.name} has nothing to train on side {part}: change sft.lora_targets or the partition"
            )
    return model, parts


def add_adapters(model: Any, sft: Sft, names: set[str]) -> Any:
    """The model with an adapter on each module of the parameters `names` that sft.lora_targets selects."""
    from peft import LoraConfig, get_peft_model

    matrices = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2]
    layers = {name: name.rpartition(".")[2] for name in matrices if ".layers." in name}  # module -> its own name
    if unknown := [target for target in sft.lora_targets if target not in layers.values()]:
        there = ", ".join(sorted({*layers.values()}))
        raise PipelineError(f"sft.lora_targets: {unknown[0]} matches nothing; there are {there}")
    trained = [name for name, own in layers.items() if own in sft.lora_targets and f"{name}.weight" in names]
    if not trained:
        raise PipelineError(f"sft.lora_targets={sft.lora_targets} match nothing that is trained: name others")
    config = LoraConfig(
        r=sft.lora_rank, lora_alpha=sft.lora_alpha, lora_dropout=sft.lora_dropout, use_rslora=True,  # type: ignore[arg-type]
        task_type="CAUSAL_LM", target_modules="|".join(map(re.escape, trained)),  # a list would become a set, unordered
    )  # fmt: skip
    return get_peft_model(model, config)
