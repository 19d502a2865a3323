"""Tokenizers, configurations and models that transformers loads from a folder.

Only this module calls from_pretrained. It reads only local files and safetensors, and never runs
Python code of a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pipeline.sandbox  # noqa: F401 - limits the time of chat templates
from pipeline.errors import PipelineError, first_line
from pipeline.models.checkpoint import read_header, read_json, weight_files
from pipeline.models.files import TOKENIZERS
from pipeline.models.names import unwrapped

SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        PipelineError: there is none, it has custom Python code, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    refuse_without_tokenizer(folder)
    refuse_own_code(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, **SAFE)
    except Exception as error:  # a tokenizer's class can raise anything
        raise PipelineError(
            f"The tokenizer of {folder} cannot be read ({first_line(error)}). Copy its files again,"
            " or update transformers and tokenizers, if newer versions wrote them."
        ) from error


def with_end_token(tokenizer: Any, token: str | None) -> Any:
    """Return the tokenizer with this token as its end of sequence.

    Raises:
        PipelineError: the tokenizer does not have the token.
    """
    if token is None:
        return tokenizer
    if token not in tokenizer.get_vocab():
        raise PipelineError(
            f"sft.eos_token={token}: the tokenizer of {tokenizer.name_or_path} has no such token."
            " Give one of its tokens."
        )
    tokenizer.eos_token = token
    return tokenizer


def refuse_without_tokenizer(folder: Path) -> None:
    if not has_tokenizer(folder):
        raise PipelineError(
            f"{folder} has no tokenizer. Put tokenizer.json and tokenizer_config.json next to the"
            " weights; for a trained model, its base's."
        )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def take_generation_config(model: Any, folder: Path) -> None:
    """Set on a model the generation settings of a folder, if there are any.

    Raises:
        PipelineError: they cannot be read.
    """
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise PipelineError(
            f"generation_config.json of {folder} cannot be read ({first_line(error)}). Copy it"
            " again."
        ) from error


def date_of_templates(date: str, knob: str = "template_date") -> dict[str, Any]:
    """Return the variables that replace today's date in a chat template.

    They are `date_string`, in Llama's format, and `strftime_now`.

    Args:
        date: the date.
        knob: its configuration key, for the message.

    Raises:
        PipelineError: the date is not in the form YYYY-MM-DD.
    """
    try:
        day = datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise PipelineError(
            f"{knob}={date} is not a date. Give a date such as 2024-07-26."
        ) from error
    return {"date_string": day.strftime("%d %b %Y"), "strftime_now": day.strftime}


def with_template_variables(
    tokenizer: Any, date: str, variables: dict[str, Any] | None = None
) -> Any:
    """Return a tokenizer whose chat template has these variables, and this date as today's."""
    given = date_of_templates(date) | (variables or {})
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def load_config(folder: Path) -> Any:
    """Load the configuration of a model.

    Raises:
        PipelineError: it has custom Python code, or transformers raises.
    """
    from transformers import AutoConfig

    refuse_own_code(folder)
    return AutoConfig.from_pretrained(folder, **SAFE)


def load_model(folder: Path, **settings: Any) -> Any:
    """Load the causal language model of a folder with these settings of from_pretrained.

    Raises:
        PipelineError: as in `load_config`.
    """
    from transformers import AutoModelForCausalLM

    refuse_own_code(folder)
    renamed = {}
    for key, name in wrapped_names(folder).items():
        renamed[f"^{re.escape(key)}$"] = name
    if renamed:
        settings["key_mapping"] = renamed
    return AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **settings, **SAFE)


def wrapped_names(folder: Path) -> dict[str, str]:
    """Return {stored name: name without wrappers such as torch.compile's}."""
    found = {}
    for file in weight_files(folder):
        for key in read_header(file):
            name = unwrapped(key)
            if name != key:
                found[key] = name
    return found


def refuse_own_code(folder: Path) -> None:
    """Raise PipelineError for a tokenizer, or a model of an unknown type, that is custom code.

    If transformers has the model's type (DeepSeek V3, Phi-3), its class is used, even if the model
    also names code. A tokenizer that names code may read text differently from all classes of
    transformers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        fields = {}
        if file.is_file():
            fields = read_json(file)
        refuse_kernels(file, fields)
        auto_map = fields.get("auto_map")
        if name == "config.json":
            expected = "a model_type that transformers has"
            if fields.get("model_type") in CONFIG_MAPPING_NAMES:
                continue
        else:
            expected = "tokenizer.json"
            if isinstance(auto_map, dict):
                auto_map = auto_map.get("AutoTokenizer")
        if auto_map:
            raise PipelineError(
                f"{file} names Python code in auto_map ({auto_map}), which is never run. Give a"
                f" model with {expected}, and without auto_map."
            )


def refuse_kernels(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise PipelineError if a config names compiled kernels, which transformers would run."""
    for key, value in fields.items():
        if "attn_implementation" in key and "/" in json.dumps(value):
            raise PipelineError(
                f"{file} names code on the Hub ({key}={value}), which is never run. Remove the key."
            )
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, Mapping):
                refuse_kernels(file, part)
