"""The types of the settings that are read from config.json and adapter_config.json.

Other keys may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

from pipeline.errors import PipelineError
from pipeline.models.files import ADAPTER_CONFIG
from pipeline.text import shorten

SIZE = Annotated[int, Field(ge=0, le=2**31)]
CONFIG = ConfigDict(strict=True, protected_namespaces=(), allow_inf_nan=False)
TYPES: dict[str, Any] = {
    "text": Annotated[str, Field(pattern=r"^[^\x00]*$")],
    "size": SIZE,
    "size or sizes of layers": SIZE | list[SIZE],
    "layers": Annotated[int, Field(ge=0, le=1_000)],
    "number": float,
    "flag": bool,
    "object": dict,
    "list": list[str],
    "numbers": dict[str, float],
}
FILES = {  # file -> type -> keys
    "config.json": {
        "size": (
            "hidden_size num_attention_heads num_key_value_heads head_dim vocab_size sliding_window"
            " max_position_embeddings num_experts num_local_experts n_routed_experts"
        ),
        "size or sizes of layers": "intermediate_size",  # a list in Gemma 3n
        "text": "model_type",
        "flag": "tie_word_embeddings",
        "layers": "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers",
        "object": "text_config auto_map",
        "list": "layer_types",
    },
    ADAPTER_CONFIG: {
        "text": "peft_type base_model_name_or_path revision",
        "size": "r",
        "number": "lora_alpha",
        "numbers": "alpha_pattern rank_pattern",
        "flag": "use_rslora",
        "list": "modules_to_save",
    },
}


@cache
def _model_of(file: str) -> Any:
    fields = {}
    for kind, keys in FILES[file].items():
        for key in keys.split():
            fields[key] = (TYPES[kind] | None, None)
    return create_model(file, __config__=CONFIG, **fields)  # type: ignore[call-overload]


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise PipelineError if a settings file, known by its name, has a value of another type."""
    if path.name not in FILES:
        return
    try:
        _model_of(path.name).model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key, reason = first["loc"][0], first["msg"]
        value = shorten(repr(first["input"]), 60)
        raise PipelineError(
            f"{path}: {key} has the value {value} ({reason}). Copy the file again."
        ) from error
    inner = settings.get("text_config")
    if inner:
        check_settings(path, inner)
