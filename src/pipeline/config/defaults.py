"""Defaults that depend on a command's other settings: the first paper's recipes, and what
hardware=NAME sets.

They enter hashes as if they had been typed. What is typed is kept.
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

KNOBS = (  # of a training, scores and a plan that a machine decides; others belong to recipes
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
)  # adapters train few parameters: these take no memory there


def left_open(settings: Words) -> dict[str, str]:
    """Return the recipe of layer_swapping's Table 4, and its data, where neither is named and the
    rest is as in the paper.
    """
    base = conf.option("model", "llama3.1_8b")["model"]["path"]  # as it may be spelled, too
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
    """Return a knob in the file of a group's option that these words choose."""
    name = str(settings.get(group))
    if conf.option_file(group, name):
        return str(conf.option(group, name)[group].get(knob, default))
    return default


def of_hardware(name: str, tree: Mapping[str, Any], adapter: str | None) -> Tree:
    """Return what an option of hardware= sets, group by group.

    Args: tree: what the stage's other options set. adapter: sft.adapter where it is typed.
    """
    parts = read_hardware(name, adapter or tree.get("sft", {}).get("adapter", "none"))
    parts["launcher"] = {**parts.get("launcher", {}), "gpu": parts.get("plan", {}).get("gpu")}
    if tree["launcher"]["name"] != "slurm":
        del parts["launcher"]
    if tree.get("select", {}).get("by", "scores") == "scores":
        parts["select"] = {"eval": parts.get("eval", {})}
    return parts


def read_hardware(name: str, adapter: str = "none") -> dict[str, Tree]:
    """Group -> knob -> value of an option of hardware=, for trainings with this sft.adapter.

    Raises:
        PipelineError: its file sets what a recipe decides, or a value that is not possible.
    """
    path, content = conf.option_file(HARDWARE, name), conf.option(HARDWARE, name)[HARDWARE]
    if not content:
        raise PipelineError(f"{path} sets no knob: write sft: {{processes: 8}} for example")
    parts = {
        part: dict(knobs) if isinstance(knobs, dict) else {"": knobs}
        for part, knobs in content.items()
    }
    keys = []
    for part, knobs in parts.items():
        for knob in knobs:
            keys.append(f"{part}.{knob}".removesuffix("."))
    wrong = [key for key in keys if key not in KNOBS]
    if wrong:
        raise PipelineError(
            f"{path} sets {', '.join(wrong)}: hardware sets {', '.join(KNOBS)} alone; the rest"
            " belongs to a recipe"
        )
    for part, knobs in parts.items():
        validated(CLASSES[part], knobs, f"{path}: {part}.")
        parts[part] = {
            key: value
            for key, value in knobs.items()
            if adapter == "none" or key not in OF_ALL_WEIGHTS
        }
    return parts


def card_of(name: str | None) -> str | None:
    """Return the GPU of an option of hardware=, or None for one without and for no option."""
    if name:
        return read_hardware(name).get("plan", {}).get("gpu")
    return None
