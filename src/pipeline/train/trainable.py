"""Which parameters a way to train moves: freezing, and LoRA adapters, by the sides of a partition."""

from __future__ import annotations

from typing import Any

from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import anatomy, plain_name
from pipeline.models.partition import sides_of_all

ALL = "all"  # the one part of a way that knows no sides
Parts = dict[str, list[str]]  # part -> names of the parameters that move in its steps


def choose(model: Any, sft: Sft, partition: Partition | None) -> tuple[Any, Parts]:
    """The model, wrapped where adapters are asked for, with what is not trained frozen; and the names by part.

    full and mixed have the one part `all`; partial has its side; simultaneous has math and language, in the order of
    their turns. LoRA is rank-stabilised (Kalajdzievski 2023: scaled by alpha / sqrt(rank)).

    Raises:
        PipelineError: a partition that does not split this model, a LoRA target that matches no module, or nothing
        left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    side_of = dict(sides_of_all(partition, anatomy(names))) if partition else dict.fromkeys(names, ALL)
    wanted = {"partial": (sft.side,), "simultaneous": ("math", "language")}.get(sft.method, (ALL,))
    if sft.adapter == "lora":
        model = add_adapters(model, sft, [name for name in names if side_of[name] in wanted])
    named = dict(model.named_parameters())
    moves = [name for name in named if sft.adapter == "none" or ".lora_" in name]
    parts = {str(part): [name for name in moves if side_of[plain_name(name)] == part] for part in wanted}
    trained = {name for part in parts.values() for name in part}
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)
    for part, members in parts.items():
        if not members:
            raise PipelineError(
                f"sft={sft.name} has nothing to train on side {part}: change sft.lora_targets or the partition"
            )
    return model, parts


def add_adapters(model: Any, sft: Sft, names: list[str]) -> Any:
    """The model with an adapter on each module of `names` (parameters) that sft.lora_targets names."""
    from peft import LoraConfig, get_peft_model

    inside = [name.removesuffix(".weight") for name in names if ".layers." in name and name.endswith(".weight")]
    modules = [module for module in inside if module.rpartition(".")[2] in sft.lora_targets]
    there = {module.rpartition(".")[2] for module in inside if module.endswith("_proj")}
    for target in sft.lora_targets:
        if target not in there:
            known = {name.split(".")[-2] for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
            if target not in known:
                raise PipelineError(f"sft.lora_targets: {target} matches nothing; there are {', '.join(sorted(known))}")
    if not modules:
        raise PipelineError(f"sft.lora_targets={sft.lora_targets} match nothing that is trained; there are {there}")
    config = LoraConfig(
        r=sft.lora_rank, lora_alpha=sft.lora_alpha, lora_dropout=sft.lora_dropout, use_rslora=True,  # type: ignore[arg-type]
        task_type="CAUSAL_LM", target_modules=pattern(modules),
    )  # fmt: skip
    wrapped = get_peft_model(model, config)
    got = {name.removeprefix("base_model.model.") for name in wrapped.targeted_module_names}
    if got != set(modules):
        raise RuntimeError(f"adapters were asked for on {sorted(modules)} and put on {sorted(got)}")
    return wrapped


def pattern(modules: list[str]) -> str:
    """One regular expression that matches these modules of layers in full, and no others.

    Names and not a list, as PEFT keeps a list as a set, whose order changes from process to process.
    """
    layers: dict[str, list[str]] = {}  # module in a layer -> layers
    for module in modules:
        before, _, rest = module.partition(".layers.")
        layer, _, inner = rest.partition(".")
        layers.setdefault(f"{before}.layers.#.{inner}", []).append(layer)
    dotted = {inner.replace(".", r"\."): "|".join(numbers) for inner, numbers in layers.items()}
    return "|".join(inner.replace("#", f"({numbers})") for inner, numbers in dotted.items())
