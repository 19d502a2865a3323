"""Defaults that depend on a command's other settings.

These are the first paper's recipes, and the values that hardware=NAME sets. They enter hashes as if
they had been typed. Typed values are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import conf
from pipeline.config.evaluation import Eval
from pipeline.config.explain import validated
from pipeline.config.knob import Tree, Words
from pipeline.config.stages import HARDWARE, Launcher, Plan
from pipeline.config.training import Model, Sft
from pipeline.errors import PipelineError

KNOBS = (  # settings that depend on the machine; the others belong to recipes
    "sft.processes",
    "sft.parallel",
    "sft.micro_batch_size",
    "sft.gradient_checkpointing",
    "sft.weights",
    "sft.optimizer",
    "model.attn_implementation",
    "eval.products",
    "launcher.gpus",
    "launcher.time",
    "launcher.memory",
    "launcher.memory_per_gpu",
    "plan.gpu",
    "plan.gpus",
)
CLASSES: dict[str, type] = {
    "sft": Sft,
    "model": Model,
    "eval": Eval,
    "launcher": Launcher,
    "plan": Plan,
}
OF_ALL_WEIGHTS = (
    "weights",
    "optimizer",
)  # adapters train few parameters, so these settings save no memory there


def left_open(settings: Words) -> dict[str, str]:
    """Return the recipe of layer_swapping's Table 4 and its data, or nothing.

    They are the defaults if the command names neither, and its other settings match the paper.
    """
    base = conf.option("model", "llama3.1_8b")["model"]["path"]  # another spelling
    plain = {"stage": ("sft",), "model": (None, "llama3.1_8b", base), "sft": (None, "full")}
    other_settings = {
        "recipe",
        "mixture",
        "model.path",
        "model.init",
        "sft.method",
        "sft.adapter",
    } & settings.keys()
    recipe = f"layer_swapping_{settings.get('expert')}_1"
    if other_settings or any(settings.get(key) not in values for key, values in plain.items()):
        return {}
    if conf.option_file("recipe", recipe):
        return {"recipe": recipe, "mixture": "layer_swapping"}
    return {}


def option_of(group: str, settings: Words, knob: str, default: str) -> str:
    """Return the value of a key in the option of a group that a command chooses."""
    name = str(settings.get(group))
    if conf.option_file(group, name):
        return str(conf.option(group, name)[group].get(knob, default))
    return default


def of_hardware(name: str, tree: Mapping[str, Any], adapter: str | None) -> Tree:
    """Return what an option of hardware= sets, group by group.

    Args:
        name: the option.
        tree: the settings of the stage's other options.
        adapter: sft.adapter if it is typed.
    """
    parts = read_hardware(name, adapter or tree.get("sft", {}).get("adapter", "none"))
    parts["launcher"] = {**parts.get("launcher", {}), "gpu": parts.get("plan", {}).get("gpu")}
    if tree["launcher"]["name"] != "slurm":
        del parts["launcher"]
    if tree.get("select", {}).get("by", "scores") == "scores":
        parts["select"] = {"eval": parts.get("eval", {})}
    return parts


def read_hardware(name: str, adapter: str = "none") -> dict[str, Tree]:
    """Return group -> key -> value of an option of hardware=, for this sft.adapter.

    Raises:
        PipelineError: its file sets a key that belongs to a recipe, or an impossible value.
    """
    path, content = conf.option_file(HARDWARE, name), conf.option(HARDWARE, name)[HARDWARE]
    if not content:
        raise PipelineError(f"{path} sets no value. Write for example sft: {{processes: 8}}.")
    wrong = []
    for part, knobs in content.items():
        keys = [part]
        if isinstance(knobs, dict):
            keys = [f"{part}.{knob}" for knob in knobs]
        wrong += [key for key in keys if key not in KNOBS]
    if wrong:
        raise PipelineError(
            f"{path} sets {', '.join(wrong)}, but hardware may only set {', '.join(KNOBS)}. Move"
            " the others to a recipe."
        )
    parts = {}
    for part, knobs in content.items():
        validated(CLASSES[part], knobs, f"{path}: {part}.")
        parts[part] = dict(knobs)
        if adapter != "none":
            for key in OF_ALL_WEIGHTS & knobs.keys():
                del parts[part][key]
    return parts
