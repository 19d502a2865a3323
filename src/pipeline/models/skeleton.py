"""A model without its weights: whether a folder holds the tensors that its config.json requires,
decided from headers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint, read_json
from pipeline.models.load import load_config
from pipeline.text import one_line


def check_shapes(folder: Path, key: str) -> None:
    """Raise PipelineError unless a folder holds the tensors, by name and shape, that its
    config.json asks for; of a type that transformers does not have nothing is known.
    """
    _check_shapes(folder, key, folder.stat().st_mtime_ns)


@lru_cache(maxsize=256)  # asked by each merge of a table
def _check_shapes(folder: Path, key: str, _: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if read_json(folder / "config.json").get("model_type") in CONFIG_MAPPING_NAMES:
        build_skeleton(folder, key)


def build_skeleton(folder: Path, key: str) -> Any:
    """The model of `folder` on the meta device, built as from_pretrained builds it, without reading
    a weight.

    Tied heads, and names that transformers itself changes or passes over, are as in
    from_pretrained. The tensors of a quantized model are its quantizer's, and are not compared.
    `key` is the knob that named the folder.

    Raises:
        PipelineError: config.json is not a model of transformers, or the files lack a tensor that
            it requires, hold one that it does not, or one of another shape: from_pretrained would
            draw it at random, or pass it over.
    """
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(folder)
    stored = {
        checkpoint.written_name(name): torch.empty(info.shape, device="meta")
        for name, info in checkpoint.infos.items()
    }
    try:
        config = load_config(folder)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            return model
        model, loading_info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=stored,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except PipelineError:
        raise
    except Exception as error:  # of values in config.json, whatever the model's class makes of them
        reason = one_line(str(error))[:300] or type(error).__name__
        raise PipelineError(
            f"{key}={folder}: transformers cannot build a model from its config.json ({reason})"
        ) from error
    remedy = "copy it again, or correct its config.json"
    for verb, kind, reason in (
        ("holds", "unexpected", "has no place for: transformers does not load it"),
        ("lacks", "missing", "asks for"),
    ):
        names = sorted(loading_info[f"{kind}_keys"])
        if names:
            more = ""
            if names[1:]:
                more = f" and {len(names) - 1} more tensors"
            raise PipelineError(
                f"{key}={folder} {verb} {names[0]}{more}, which its config.json {reason}: {remedy}"
            )
    for name, *shapes in loading_info["mismatched_keys"]:
        found, expected = (list(shape) for shape in shapes)
        raise PipelineError(
            f"{key}={folder} holds {name} of shape {found}, its config.json asks for {expected}:"
            f" {remedy}"
        )
    return model
