"""Hydra's and OmegaConf's errors as one sentence with the key and the remedy."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_type_hints

from omegaconf.errors import OmegaConfBaseException

from pipeline.config import conf
from pipeline.config.harness_tasks import harness_index

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

TYPES = {  # OmegaConf's message for a value of another type -> the expected type
    r"Value '(?P<got>.*)' of type '(?P<type>\w+)' could not be converted to Integer": "a whole number",
    r"Value '(?P<got>.*)' of type '(?P<type>\w+)' could not be converted to Float": "a number",
    r"Value '(?P<got>.*)' is not a valid bool \(type (?P<type>\w+)\)": "true or false",
    r"Cannot convert '(?P<type>\w+)' to string: '(?P<got>.*)'": "text",
}


def unknown_key(key: str, names: list[str]) -> str:
    """Message for an unknown key: our name of the knob where it is another program's, else close or all `names`."""
    parent, dot, last = key.rpartition(".")
    synonym = SYNONYMS.get(last, "").format(last)
    if synonym and (not parent or synonym.startswith(f"{parent}.") and not synonym.startswith(f"{key}=")):
        return f"unknown key {key}: did you mean {synonym}?"
    close = [parent + dot + name for name in get_close_matches(last, names, n=3, cutoff=0.6)]
    if close:
        return f"unknown key {key}: did you mean {', '.join(close)}?"
    return f"unknown key {key}: there are {', '.join(names)}"


def options_in(words: list[str]) -> dict[str, str]:
    """Key -> value of each override, as typed."""
    return {word.lstrip("+~").partition("=")[0]: word.partition("=")[2] for word in words}


def explain_error(error: Exception, words: list[str]) -> str:
    """One sentence with the key and the remedy for an error of Hydra or OmegaConf."""
    text, options = str(error), options_in(words)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}\n{error.__cause__}"
    stage = options.get("stage", "table")
    if (match := re.search(r"In '[^']*': Could not find '(\w+)/([^']*)'", text)) and match.group(1) in conf.groups():
        return _unknown_option(*match.groups())
    if match := re.search(r"Could not override '([\w/@.]+)'", text):
        return _explain_override(match.group(1), text, stage, options)
    if match := re.search(r"You must specify '(\w+)'", text):
        group = match.group(1)
        return f"stage={stage} needs {group}=...: one of {', '.join(conf.options(group))}"
    full_key = re.search(r"full_key: (\S+)", text)
    if match := re.search(r"(?:Key|key) '(\w+)' (?:is )?not in '(\w+)'", text):
        key = full_key.group(1) if full_key else match.group(1)
        if not key.endswith(match.group(1)):  # key={wrong: 1}
            key = f"{key}.{match.group(1)}"
        return _explain_key(key, stage, options.get("merge"))
    if full_key and "not in struct" in text:
        return _explain_key(full_key.group(1), stage, options.get("merge"))
    return _explain_value(full_key.group(1), text, options) if full_key else " ".join(text.split())


def _unknown_option(group: str, option: str) -> str:
    names = conf.options(group)
    close = get_close_matches(option, names, n=3, cutoff=0.5)
    if group == "eval":
        close += get_close_matches(option, harness_index().tasks, n=1, cutoff=0.8)
        names = [*names, "and the tasks of the harness, such as arc_easy"]
    hint = f"did you mean {' or '.join(close)}? There" if close else "there"
    return f"{group}={option} is not an option: {hint} are {', '.join(names)}"


def _explain_override(key: str, text: str, stage: str, options: dict[str, str]) -> str:
    """Message for a key that Hydra could not override."""
    inner = re.search(r"Key '(\w+)' not in '\w+'\s+full_key: \1\s", text)
    if inner and inner.group(1) not in key.split("."):  # key=[{wrong: 1}]
        return _explain_key(f"{key}.{inner.group(1)}", stage, options.get("merge"))
    if new := re.search(rf"full_key: ({re.escape(key)}\.\S+)", text):  # key={new: ...}
        return f"{new.group(1)} is new: add it with a plus, +{new.group(1)}=..."
    if key not in conf.groups() and key not in conf.STAGES:
        return _explain_key(key, stage, options.get("merge"))
    value = options.get(key, "")
    if (key, value) == ("model", "trained"):
        value = options.get("model.path", value)
    return _not_read(f"{key}={value}", stage)


def _explain_value(key: str, text: str, options: dict[str, str]) -> str:
    """Message for the value of a known key."""
    if "is not Optional" in text:
        return f"{key}={options.get(key, 'null')}: give a value, null is not allowed"
    value = options.get(key, "...")
    if "is not a subclass of" in text:
        return f"{key}={value}: it is a mapping, give {key}.KEY=..."
    if "not a ListConfig" in text or "Cannot merge DictConfig with ListConfig" in text:
        return f"{key}={value}: write a list, {key}=[{value}]"
    if message := wrong_type_message(key, text):
        return message
    lines = [line for line in text.splitlines() if re.match(r"\s*(Value|Invalid|Cannot|Non optional)", line)]
    return f"{key}={value}: {' '.join((lines or text.splitlines())[0].split())}"


def wrong_type_message(key: str, text: str) -> str | None:
    """`sft.epochs must be a whole number, got 'many'`, if `text` is OmegaConf's error for a wrong type; else None."""
    for pattern, expected in TYPES.items():
        if match := re.search(pattern, text):
            got = repr(match["got"]) if match["type"] == "str" else match["got"]
            return f"{key} must be {expected}, got {got}"
    return None


def _not_read(word: str, stage: str) -> str:
    table = f"give every.{word} for the runs of the table, or " if stage in ("plan", "table") else ""
    return f"stage={stage} does not read {word}: {table}leave it out; it reads {', '.join(conf.groups_read(stage))}"


def _explain_key(key: str, stage: str, merge: str | None) -> str:
    kind: Any = conf.STAGES.get(stage)
    group = key.partition(".")[0]
    if group in conf.groups() and group not in (*conf.groups_read(stage), *getattr(kind, "__dataclass_fields__", ())):
        return _not_read(key, stage)
    for name in key.split(".")[:-1]:
        kind = (name == "merge" and conf.method_of(merge)) or type_inside(kind, name)
    if not is_dataclass(kind) and get_args(kind):
        kind = get_args(kind)[-1]
    names = sorted(getattr(kind, "__dataclass_fields__", {}))
    if names:
        return unknown_key(key, names)
    return f"unknown key {key}: stage={stage} reads {', '.join(conf.groups_read(stage))}"


def type_inside(kind: Any, name: str) -> Any:
    """The type of a field, or of its items where it is a dict or a list; None where there is no such field."""
    hint = get_type_hints(kind).get(name) if is_dataclass(kind) else next(iter(get_args(kind)[-1:]), None)
    if not isinstance(hint, UnionType):
        return hint
    inner = [member for member in get_args(hint) if member is not type(None)]
    return next((member for member in inner if is_dataclass(member)), inner[0])
