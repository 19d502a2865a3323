"""Tokenizers, configurations and models read by transformers from a folder: the one place that
calls from_pretrained.

Only files that are on this machine, only safetensors, and never Python code that a folder brings
along.
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

    Raises: PipelineError: there is none, it has custom Python code, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    refuse_without_tokenizer(folder)
    refuse_own_code(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, **SAFE)
    except Exception as error:  # classes of tokenizers raise what they like
        raise PipelineError(
            f"the tokenizer of {folder} cannot be read ({first_line(error)}): copy its files again,"
            " or update transformers and tokenizers, where newer ones wrote them"
        ) from error


def with_end_token(tokenizer: Any, token: str | None) -> Any:
    """Return the tokenizer with this token as its end of sequence.

    Raises PipelineError if it has no such token.
    """
    if token is not None and token not in tokenizer.get_vocab():
        raise PipelineError(
            f"sft.eos_token={token}: the tokenizer of {tokenizer.name_or_path} has no such token."
            " Give one of its own"
        )
    if token is not None:
        tokenizer.eos_token = token
    return tokenizer


def refuse_without_tokenizer(folder: Path) -> None:
    if not has_tokenizer(folder):
        raise PipelineError(
            f"{folder} has no tokenizer: put tokenizer.json and tokenizer_config.json next to the"
            " weights, for a trained model those of its base"
        )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def take_generation_config(model: Any, folder: Path) -> None:
    """Give a model the settings for generation of a folder, where it has some.

    Raises PipelineError where these cannot be read.
    """
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise PipelineError(
                f"generation_config.json of {folder} cannot be read ({first_line(error)}): copy it"
                " again"
            ) from error


def date_of_templates(date: str, knob: str = "template_date") -> dict[str, Any]:
    """Variables that replace today's date in a chat template: `date_string` as Llama writes it, and
    `strftime_now`. Raises PipelineError unless `date` is YYYY-MM-DD."""
    try:
        day = datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise PipelineError(f"{knob}={date} is not a date: give one as 2024-07-26") from error
    return {"date_string": day.strftime("%d %b %Y"), "strftime_now": day.strftime}


def with_template_variables(
    tokenizer: Any, date: str, variables: dict[str, Any] | None = None
) -> Any:
    """Return the tokenizer, whose chat template has these variables and this date as today's
    wherever it is applied.
    """
    given = date_of_templates(date) | (variables or {})
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def load_config(folder: Path) -> Any:
    """Load the configuration of a model.

    Raises: PipelineError: it has custom Python code, or transformers raises.
    """
    from transformers import AutoConfig

    refuse_own_code(folder)
    return AutoConfig.from_pretrained(folder, **SAFE)


def load_model(folder: Path, **settings: Any) -> Any:
    """Load the causal language model of a folder with these settings of from_pretrained.

    Raises as load_config.
    """
    from transformers import AutoModelForCausalLM

    refuse_own_code(folder)
    renamed = {f"^{re.escape(key)}$": name for key, name in wrapped_names(folder).items()}
    if renamed:
        settings |= {"key_mapping": renamed}
    return AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **settings, **SAFE)


def wrapped_names(folder: Path) -> dict[str, str]:
    """Name in a model's files that begins with those of wrappers such as torch.compile's -> the
    name without them.
    """
    keys = []
    for file in weight_files(folder):
        for key in read_header(file):
            keys.append(key)
    found = {}
    for key in keys:
        if unwrapped(key) != key:
            found[key] = unwrapped(key)
    return found


def refuse_own_code(folder: Path) -> None:
    """Raise PipelineError for a folder whose tokenizer, or whose model of a type unknown to
    transformers, is custom code.

    A model of a type that transformers has (DeepSeek V3, Phi-3) may name code too: the class of
    transformers is used. A tokenizer that names code may read text differently from any class of
    transformers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for name in ("config.json", "tokenizer_config.json"):
        fields = {}
        if (folder / name).is_file():
            fields = read_json(folder / name)
        refuse_kernels(folder / name, fields)
        auto_map = fields.get("auto_map")
        of_tokenizer = name == "tokenizer_config.json"
        if of_tokenizer and isinstance(auto_map, dict):
            auto_map = auto_map.get("AutoTokenizer")
        if auto_map and (of_tokenizer or fields.get("model_type") not in CONFIG_MAPPING_NAMES):
            expected = "a model_type that transformers has"
            if of_tokenizer:
                expected = "tokenizer.json"
            raise PipelineError(
                f"{folder / name} names Python code in auto_map ({auto_map}), which is never run:"
                f" give a model with {expected}, and without auto_map"
            )


def refuse_kernels(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise PipelineError if a config names a repository of compiled kernels, which transformers
    would run.
    """
    for key, value in fields.items():
        if "attn_implementation" in key and "/" in json.dumps(value):
            raise PipelineError(
                f"{file} names code on the Hub ({key}={value}), which is never run: remove that key"
            )
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                refuse_kernels(file, part)
