"""Defaults that depend on a command's other settings: what hardware=NAME sets, and the first paper's recipes.

They are filled in before a command is composed, and enter hashes as if they had been typed. What is typed is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.config import conf
from pipeline.config.evaluation import Eval
from pipeline.config.explain import refuse_invalid
from pipeline.config.stages import RUN_STAGES, Launcher, Plan, Stage, TableStage
from pipeline.config.training import Model, Sft
from pipeline.errors import PipelineError, suggest
from pipeline.files import read_yaml

HARDWARE = "hardware"
KNOBS = (  # of a training, scores and a plan that a machine decides; others belong to recipes
    "sft.processes", "sft.parallel", "sft.micro_batch_size", "sft.gradient_checkpointing", "sft.weights",
    "sft.optimizer", "model.attn_implementation", "eval.products", "launcher.gpus", "launcher.time", "launcher.memory",
    "launcher.memory_per_gpu", "plan.gpu", "plan.gpus",
)  # fmt: skip
CLASSES: dict[str, Any] = {"sft": Sft, "model": Model, "eval": Eval, "launcher": Launcher, "plan": Plan}
OF_ALL_WEIGHTS = ("sft.weights", "sft.optimizer")  # adapters train few parameters: these take no memory there


def left_open(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> value of what a command or a table's run, key -> value, leaves to its other words.

    Raises:
        PipelineError: hardware= is not an option, not read by the stage, or its file sets what a recipe decides.
    """
    added = recipe_of_paper(settings)
    if name := settings.get(HARDWARE) or settings.get(f"every.{HARDWARE}"):
        added |= hardware_for(str(name), settings)
    return {key: value for key, value in added.items() if key not in settings}


def recipe_of_paper(settings: Mapping[str, Any]) -> dict[str, str]:
    """The recipe of layer_swapping's Table 4, and its data, where neither is named and the rest is as in the paper."""
    base = conf.option("model", "llama3.1_8b")["model"]["path"]  # as it may be spelled, too
    plain = {"stage": ("sft",), "model": (None, "llama3.1_8b", base), "sft": (None, "full")}
    other_settings = {"recipe", "mixture", "model.path", "model.init", "sft.method", "sft.adapter"} & settings.keys()
    recipe = f"layer_swapping_{settings.get('expert')}_1"
    if other_settings or any(settings.get(key) not in values for key, values in plain.items()):
        return {}
    return {"recipe": recipe, "mixture": "layer_swapping"} if conf.option_file("recipe", recipe) else {}


def hardware_for(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an option of hardware sets in a command: knobs of its training, its jobs and its plan. A table passes it on
    to its runs, by their own methods."""
    values, stage = read_hardware(name), str(settings.get("stage", "table"))
    values["launcher.gpu"] = values.get("plan.gpu")
    kind = conf.stage_class(stage)
    if kind is not None and issubclass(kind, TableStage):
        passed: dict[str, Any] = {f"every.{HARDWARE}": name}
        parts = ["plan"] if stage == "plan" else []
    elif reads_hardware(stage) or kind is None:  # None: an unknown stage, which is refused later
        passed, parts = {}, ["sft", "model"] if kind and "sft" in kind.groups else []
        parts += ["eval"] if kind and "eval" in kind.groups else []
        if kind and "select" in kind.groups and option_of("select", settings, "by", "scores") == "scores":
            values["select.eval.products"], parts = values.pop("eval.products", "ieee"), [*parts, "select"]
    else:
        raise PipelineError(f"stage={stage} does not read {HARDWARE}: leave {HARDWARE}={name} out")
    parts += ["launcher"] if option_of("launcher", settings, "name", "local") == "slurm" else []
    adapter = settings.get("sft.adapter") or option_of("sft", settings, "adapter", "none")
    return passed | {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] in parts and (adapter == "none" or key not in OF_ALL_WEIGHTS)
    }


def with_hardware(config: Any, every: Mapping[str, Any]) -> Any:
    """A table's stage with what the hardware of its own `every` sets of plans and jobs, where neither the command nor
    its options do."""
    if HARDWARE not in every or HARDWARE in config.every:  # the command's own is among its words
        return config
    for key, value in hardware_for(
        str(every[HARDWARE]), {"stage": config.stage, "launcher": config.launcher.name}
    ).items():
        part, _, name = key.partition(".")
        holder = getattr(config, part)
        if part == "every" or key in config.given:
            continue
        if getattr(holder, name) == type(holder).__dataclass_fields__[name].default:
            config = replace(config, **{part: replace(holder, **{name: value})})
    return config


def reads_hardware(stage: str) -> bool:
    """Whether a stage has trainings, a plan or jobs that a machine decides about."""
    return stage in (*RUN_STAGES, "check") or issubclass(conf.stage_class(stage) or Stage, TableStage)


def option_of(group: str, settings: Mapping[str, Any], knob: str, default: str) -> str:
    """A knob in the file of a group's option that these words choose."""
    name = str(settings.get(group))
    return str(conf.option(group, name)[group].get(knob, default)) if conf.option_file(group, name) else default


def read_hardware(name: str) -> dict[str, Any]:
    """Dotted key -> value of an option of hardware."""
    path = conf.option_file(HARDWARE, name)
    if path is None:
        raise PipelineError(
            f"{HARDWARE}={name} is not an option: {suggest(name, conf.options(HARDWARE))} (a file of your own: "
            f"--config-dir=DIR with {HARDWARE}/{name}.yaml)"
        )
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise PipelineError(f"{path} sets no knob: write sft: {{processes: 8}} for example")
    values = {
        f"{part}.{key}".removesuffix("."): value
        for part, knobs in content.items()
        for key, value in (knobs if isinstance(knobs, dict) else {"": knobs}).items()
    }
    if wrong := [key for key in values if key not in KNOBS]:
        raise PipelineError(
            f"{path} sets {', '.join(wrong)}: hardware sets {', '.join(KNOBS)} alone; the rest belongs to a recipe"
        )
    for key, value in values.items():
        part, _, knob = key.partition(".")
        refuse_invalid(CLASSES[part], knob, value, f"{path}: {part}.")
    return values
