"""Hydra's and OmegaConf's errors as one sentence in this program's words."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_type_hints

from omegaconf.errors import OmegaConfBaseException

from pipeline.config import conf

SYNONYMS = {  # what other programs call a knob -> what it is here
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

TYPES = {  # what OmegaConf says of a value of another type -> what it must be
    r"Value '(?P<got>.*)' of type '(?P<type>\w+)' could not be converted to Integer": "a whole number",
    r"Value '(?P<got>.*)' of type '(?P<type>\w+)' could not be converted to Float": "a number",
    r"Value '(?P<got>.*)' is not a valid bool \(type (?P<type>\w+)\)": "true or false",
    r"Cannot convert '(?P<type>\w+)' to string: '(?P<got>.*)'": "text",
}


def unknown_key(key: str, known: list[str]) -> str:
    parent, dot, last = key.rpartition(".")
    meant = SYNONYMS.get(last, "").format(last)
    if meant and (not parent or meant.startswith(f"{parent}.") and not meant.startswith(f"{key}=")):
        return f"unknown key {key}: did you mean {meant}?"
    close = [parent + dot + word for word in get_close_matches(last, known, n=3, cutoff=0.6)]
    return f"unknown key {key}: " + (f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}")


def options_in(words: list[str]) -> dict[str, str]:
    """key -> value of each override, as typed."""
    return {word.lstrip("+~").partition("=")[0]: word.partition("=")[2] for word in words}


def explain(error: Exception, words: list[str]) -> str:
    """Hydra's and OmegaConf's errors as one sentence in this program's words."""
    text, asked = str(error), options_in(words)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}\n{error.__cause__}"
    stage = asked.get("stage", "table")
    if match := re.search(r"In '[^']*': Could not find '(\w+)/([^']*)'", text):
        group, option = match.groups()
        if group in conf.groups():
            close = get_close_matches(option, conf.options(group), n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(close)}? There" if close else "there"
            return f"{group}={option} is no option: {meant} are {', '.join(conf.options(group))}"
    if match := re.search(r"Could not override '([\w/@.]+)'", text):
        key = match.group(1)
        inner = re.search(r"Key '(\w+)' not in '\w+'\s+full_key: \1\s", text)
        if inner and inner.group(1) not in key.split("."):  # key=[{wrong: 1}]
            return _explain_key(f"{key}.{inner.group(1)}", stage, asked.get("merge"))
        if new := re.search(rf"full_key: ({re.escape(key)}\.\S+)", text):  # key={new: ...}
            return f"{new.group(1)} is new: add it with a plus, +{new.group(1)}=..."
        if key in conf.groups() or key in conf.STAGES:
            value = asked.get(key, "")
            value = asked.get("model.path", value) if (key, value) == ("model", "trained") else value
            return _not_read(f"{key}={value}", stage)
        return _explain_key(key, stage, asked.get("merge"))
    if match := re.search(r"You must specify '(\w+)'", text):
        group = match.group(1)
        return f"stage={stage} needs {group}=...: one of {', '.join(conf.options(group))}"
    if match := re.search(r"(?:Key|key) '(\w+)' (?:is )?not in '(\w+)'", text):
        full = re.search(r"full_key: (\S+)", text)
        key = full.group(1) if full else match.group(1)
        inside = "" if key.endswith(match.group(1)) else f".{match.group(1)}"  # key={wrong: 1}
        return _explain_key(key + inside, stage, asked.get("merge"))
    if match := re.search(r"full_key: (\S+)", text):
        key = match.group(1)
        if "not in struct" in text:
            return _explain_key(key, stage, asked.get("merge"))
        if "is not Optional" in text:
            return f"{key}={asked.get(key, 'null')}: give a value, there is no meaning to null here"
        if "is not a subclass of" in text:
            return f"{key}={asked.get(key, '...')}: it holds keys of its own, give {key}.KEY=..."
        if "not a ListConfig" in text:
            return f"{key}={asked.get(key, '...')}: write a list, {key}=[{asked.get(key, '...')}]"
        if told := of_another_type(key, text):
            return told
        lines = [line for line in text.splitlines() if re.match(r"\s*(Value|Invalid|Cannot|Non optional)", line)]
        return f"{key}={asked.get(key, '...')}: {' '.join((lines or text.splitlines())[0].split())}"
    return " ".join(text.split())


def of_another_type(key: str, text: str) -> str | None:
    """`sft.epochs must be a whole number, got 'many'`, where that is what OmegaConf's words come to."""
    for pattern, wanted in TYPES.items():
        if match := re.search(pattern, text):
            got = repr(match["got"]) if match["type"] == "str" else match["got"]
            return f"{key} must be {wanted}, got {got}"
    return None


def _not_read(word: str, stage: str) -> str:
    table = f"give every.{word} for the runs of the table, or " if stage in ("plan", "table") else ""
    return f"stage={stage} does not read {word}: {table}leave it out; it reads {', '.join(conf.reads(stage))}"


def _explain_key(key: str, stage: str, merge: str | None) -> str:
    if key.partition(".")[0] in conf.groups() and key.partition(".")[0] not in conf.reads(stage):
        return _not_read(key, stage)
    kind: Any = conf.STAGES.get(stage)
    method = next((name for name in conf.METHODS if merge in (name, *conf.presets(name))), None)
    for name in key.split(".")[:-1]:
        kind = conf.METHODS[method] if name == "merge" and method else type_inside(kind, name)
    if not is_dataclass(kind) and get_args(kind):
        kind = get_args(kind)[-1]
    known = sorted(getattr(kind, "__dataclass_fields__", {}))
    return (
        unknown_key(key, known) if known else f"unknown key {key}: stage={stage} reads {', '.join(conf.reads(stage))}"
    )


def type_inside(kind: Any, name: str) -> Any:
    """The dataclass behind a name: that of a field (of its items, where it is a dict or a list of some), else None."""
    hint = get_type_hints(kind).get(name) if is_dataclass(kind) else next(iter(get_args(kind)[-1:]), None)
    if not isinstance(hint, UnionType):
        return hint
    inner = [one for one in get_args(hint) if one is not type(None)]
    return next((one for one in inner if is_dataclass(one)), inner[0])
