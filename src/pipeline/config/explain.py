"""Sentences about a wrong key, option or type, with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from pipeline.config import conf
from pipeline.config.harness_tasks import explain_tag, harness_index
from pipeline.errors import close_matches

SYNONYMS = {  # another program's name of a knob -> ours
    **dict.fromkeys(("lr", "learning_rate"), "sft.learning_rate=..."),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "sft.epochs=..."),
    **dict.fromkeys(("max_steps", "steps", "num_steps"), "sft.steps=..."),
    **dict.fromkeys(("batch_size", "train_batch_size"), "sft.batch_size=... or eval.batch_size=..."),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "sft.micro_batch_size=..."),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_length", "cutoff_len"), "sft.seq_length=..."),
    **dict.fromkeys(("lora_r", "r", "rank"), "sft.lora_rank=..."),
    **dict.fromkeys(("model_name_or_path", "base_model", "base", "model_path"), "model=hub:org/name or model=./FOLDER"),
    **dict.fromkeys(("adapter", "lora", "use_peft"), "sft=lora"),
    **dict.fromkeys(("output_dir", "out", "out_dir", "save_dir"), "runs_dir=FOLDER"),
    **dict.fromkeys(("task", "tasks", "benchmark", "num_fewshot", "shots"), "eval=TASK_Nshot, such as eval=mgsm_2shot"),
    **dict.fromkeys(("lang", "language"), "languages=[sw]"),
    **dict.fromkeys(("density", "scale", "weights", "bottom_layers", "top_layers"), "merge.{}=..."),
    **dict.fromkeys(("run", "model_run", "ckpt"), "checkpoint=RUN"),
    **dict.fromkeys(("swap", "merge_method", "method"), "merge=layer_swap"),
    **dict.fromkeys(("dataset", "data", "train_file"), "expert=... and data_root=FOLDER"),
}

TYPES = {  # the beginning of pydantic's name of an error -> the expected type
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
}  # fmt: skip


def unknown_key(key: str, names: list[str]) -> str:
    """Message for an unknown key: our name of the knob where it is another program's, else close or all `names`."""
    parent, dot, last = key.rpartition(".")
    synonym = SYNONYMS.get(last, "").format(last)
    if synonym and (not parent or synonym.startswith(f"{parent}.") and not synonym.startswith(f"{key}=")):
        return f"unknown key {key}: did you mean {synonym}?"
    if close := close_matches(last, names):
        return f"unknown key {key}: did you mean {' or '.join(parent + dot + name for name in close)}?"
    return f"unknown key {key}: there are {', '.join(names)}"


def unknown_option(group: str, option: str) -> str:
    names = conf.options(group)
    close = close_matches(option, names, cutoff=0.5)
    if group == "eval":
        if tag := explain_tag(option):
            return f"{group}={option} is not an option: {tag}"
        close += close_matches(option, harness_index().tasks, cutoff=0.8)[:1]
        names = [*names, "and the tasks of the harness, such as arc_easy"]
    hint = f"did you mean {' or '.join(close)}? There" if close else "there"
    own = "" if close or group == "stage" else f" (a file of your own: --config-dir=DIR with {group}/{option}.yaml)"
    return f"{group}={option} is not an option: {hint} are {', '.join(names)}{own}"


def not_read(word: str, stage: str) -> str:
    table = f"give every.{word} for the runs of the table, or " if stage in ("plan", "table") else ""
    return f"stage={stage} does not read {word}: {table}leave it out; it reads {', '.join(conf.groups_read(stage))}"


def explain_key(key: str, holder: Any, stage: str) -> str:
    """Message for a key that does not exist. holder: the type in which its last name was looked up."""
    group = key.partition(".")[0]
    kind = conf.stage_class(stage)
    of_stage = getattr(kind, "__dataclass_fields__", ())
    if group in conf.groups() and group not in (*conf.groups_read(stage), *of_stage):
        return not_read(key, stage)
    if is_dataclass(holder) and (holder is not kind or "." not in key):
        return unknown_key(key, sorted(holder.__dataclass_fields__))
    return f"unknown key {key}: stage={stage} reads {', '.join(conf.groups_read(stage))}"


def explain_invalid(error: Mapping[str, Any], kind: Any, prefix: str) -> str:
    """Message for pydantic's error about a value of a dataclass `kind`, whose keys begin with `prefix`."""
    holder = kind
    for name in error["loc"][:-1]:
        holder = type_inside(holder, str(name))
    key, value = prefix + ".".join(map(str, error["loc"])), error["input"]
    if error["type"] == "unexpected_keyword_argument":
        return unknown_key(key, sorted(holder.__dataclass_fields__))
    if value is None:
        return f"{key}=null: give a value, null is not allowed"
    if expected := TYPES.get(error["type"].partition("_")[0]):
        return f"{key} must be {expected}, got {value!r}"
    if error["type"] == "list_type":
        return f"{key}={value}: write a list, {key}=[{value}]"
    if error["type"] in ("dict_type", "dataclass_type"):
        return f"{key}={value}: it is a mapping, give {key}.KEY=..."
    return f"{key}={value}: {error['msg']}"


def type_inside(kind: Any, name: str) -> Any:
    """The type of a field, or of its items where it is a dict or a list; None where there is no such field."""
    hint = type_hints(kind).get(name) if is_dataclass(kind) else next(iter(get_args(kind)[-1:]), None)  # type: ignore[arg-type]
    if not isinstance(hint, UnionType):
        return hint
    inner = [member for member in get_args(hint) if member is not type(None)]
    return next((member for member in inner if is_dataclass(member)), inner[0])


@cache
def type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
